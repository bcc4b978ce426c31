"""States in the text: where a model sees them."""

from __future__ import annotations

import torch
from rich.table import Table
from rich.text import Text

from hmmlm.data.batches import ChunkBatches
from hmmlm.data.tokenfile import TokenFile
from hmmlm.experiments.explain import States
from hmmlm.experiments.tables import state_label
from hmmlm.lm import LanguageModel

READ, LENGTH = 10_000, 64  # tokens, and in a chunk: enough for the states that matter
AROUND = 6  # tokens shown on either side


@torch.no_grad()
def state_places(lm: LanguageModel, text: TokenFile, each: int) -> dict[int, list[tuple[list[int], int]]]:
    """Of every state in the Viterbi paths of some of the text, up to `each` places: tokens, and which of them it is.

    Chunks are read in a random order, always the same; places of a state are of different words as far as there are.
    """
    found: dict[int, dict[int, list[tuple[list[int], int]]]] = {}
    read = 0
    for batch in ChunkBatches(text, 16, LENGTH, shuffle=True, drop_last=False, seed=0).epoch(0):
        paths, _ = lm.hmm.viterbi(batch.tokens, batch.lengths)
        for tokens, path in zip(batch.tokens.tolist(), paths.tolist(), strict=True):
            known = [token for token in tokens if token >= 0]
            for at, (token, state) in enumerate(zip(known, path, strict=False)):
                places = found.setdefault(state, {}).setdefault(token, [])
                if len(places) < each:
                    first = max(0, at - AROUND)
                    places.append((known[first : at + AROUND + 1], at - first))
            read += len(known)
        if read >= READ:
            break
    return {state: _in_turn(list(by_word.values()), each) for state, by_word in found.items()}


def _in_turn(by_word: list[list[tuple[list[int], int]]], each: int) -> list[tuple[list[int], int]]:
    """The first place of every word, then the second, …"""
    ranked = sorted((rank, word, place) for word, places in enumerate(by_word) for rank, place in enumerate(places))
    return [place for _, _, place in ranked[:each]]


def contexts_table(lm: LanguageModel, states: States, count: int, text: TokenFile, each: int = 3) -> Table:
    """The `count` most used states with `each` places in the text."""
    table = Table(box=None, pad_edge=False)
    table.add_column("state", no_wrap=True)
    table.add_column("before", justify="right", no_wrap=True, overflow="ellipsis")
    table.add_column("", no_wrap=True)
    table.add_column("after", no_wrap=True, overflow="ellipsis")
    places = state_places(lm, text, each)
    for state in states.order[:count].tolist():
        for number, (tokens, at) in enumerate(places.get(state, [])):
            label = state_label(states, state, lm.tokenizer) if not number else ""
            words = [" ".join(lm.tokenizer.decode(part).split()) for part in (tokens[:at], tokens[at + 1 :])]
            # Text, not markup: a word may well be "[/b]"
            row = (label, words[0], lm.tokenizer.token(tokens[at]), words[1])
            table.add_row(*(Text(cell, style="bold" if i == 2 else "") for i, cell in enumerate(row)))
    return table
