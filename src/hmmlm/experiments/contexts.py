"""States in the text: how often, and where, a model sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hmmlm.data.tokenfile import TokenFile
from hmmlm.errors import InputError
from hmmlm.experiments.explain import States
from hmmlm.experiments.tables import state_label
from hmmlm.lm import LanguageModel, padded

READ, LENGTH = 10_000, 192  # tokens, and in a piece: enough for the states that matter
LEAD = 32  # tokens read before and after a piece: by then where reading began makes no difference
PIECES = 16  # read side by side
WORK = 2**37  # transitions: the share in the text of thousands of states is measured on less of it
AROUND = 6  # tokens shown on either side


class Piece(NamedTuple):
    """Some of a text, and its lead on either side."""

    tokens: list[int]  # [T]
    inner: slice  # the positions that are not lead


def pieces(lm: LanguageModel, text: TokenFile, read: int) -> Iterator[list[Piece]]:
    """`read` tokens of the text in pieces, in a random order that is always the same, PIECES at a time."""
    begins = np.random.default_rng(0).permutation(np.arange(0, len(text), LENGTH))[: -(-read // LENGTH)].tolist()
    for some in range(0, len(begins), PIECES):
        yield [_piece(lm, text, begin) for begin in begins[some : some + PIECES]]


def _piece(lm: LanguageModel, text: TokenFile, begin: int) -> Piece:
    first, end = max(0, begin - LEAD), min(begin + LENGTH, len(text))
    ends = np.flatnonzero(text.tokens[first:begin] == lm.tokenizer.eos_id)
    if lm.restarts and ends.size:  # the lead begins with a line, as the chain does
        first += int(ends[0]) + 1
    return Piece(text.tokens[first : end + LEAD].tolist(), slice(begin - first, end - first))


def _ask(
    lm: LanguageModel, some: list[Piece], query: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[Piece, Tensor]]:
    """Every piece with what `query` [B, T, ...] says of its tokens [T, ...], the chain restarting as in evaluation.

    Pieces that are impossible are left out: the model may know no path that begins in the middle of a text."""
    parts = [lm.sequences(piece.tokens) for piece in some]
    try:
        answers = iter(query(*padded([sequence for part in parts for sequence in part])).cpu())
    except InputError:
        if len(some) > 1:
            yield from (answer for piece in some for answer in _ask(lm, [piece], query))
        return
    for piece, part in zip(some, parts, strict=True):
        yield piece, torch.cat([next(answers)[: len(sequence)] for sequence in part])


@torch.no_grad()
def text_share(lm: LanguageModel, text: TokenFile) -> Tensor | None:
    """The share of the text's tokens that come from each state [Z], by their posterior; None if it is impossible."""
    total, count = torch.zeros(lm.hmm.states, dtype=torch.float64), 0
    for some in pieces(lm, text, min(READ, WORK // lm.hmm.states**2)):
        for piece, posterior in _ask(lm, some, lm.hmm.posterior):
            total += posterior[piece.inner].double().sum(0)
            count += len(posterior[piece.inner])
    return total / count if count else None


@torch.no_grad()
def state_places(lm: LanguageModel, text: TokenFile, each: int) -> dict[int, list[tuple[list[int], int]]]:
    """Of every state in the Viterbi paths of some of the text, up to `each` places: tokens, and which of them it is.

    Places of a state are of different words as far as there are."""
    found: dict[int, dict[int, list[tuple[list[int], int]]]] = {}
    for some in pieces(lm, text, READ):
        for piece, path in _ask(lm, some, lambda tokens, lengths: lm.hmm.viterbi(tokens, lengths)[0]):
            for at in range(len(piece.tokens))[piece.inner]:
                places = found.setdefault(int(path[at]), {}).setdefault(piece.tokens[at], [])
                if len(places) < each:
                    first = max(0, at - AROUND)
                    places.append((piece.tokens[first : at + AROUND + 1], at - first))
    return {state: _in_turn(list(by_word.values()), each) for state, by_word in found.items()}


def _in_turn(by_word: list[list[tuple[list[int], int]]], each: int) -> list[tuple[list[int], int]]:
    """The first place of every word, then the second, …"""
    ranked = sorted((rank, word, place) for word, places in enumerate(by_word) for rank, place in enumerate(places))
    return [place for _, _, place in ranked[:each]]


def contexts_table(lm: LanguageModel, states: States, count: int, text: TokenFile, each: int = 3) -> Table:
    """The first `count` states with `each` places in the text; those without one are named below."""
    table = Table(box=None, pad_edge=False)
    table.add_column("state", no_wrap=True)
    table.add_column("before", justify="right", no_wrap=True, overflow="ellipsis")
    table.add_column("", no_wrap=True)
    table.add_column("after", no_wrap=True, overflow="ellipsis")
    places = state_places(lm, text, each)
    chosen = states.order[:count].tolist()
    nowhere = [str(state) for state in chosen if state not in places]
    if nowhere:
        table.caption = f"no place in the {min(len(text), READ):,} tokens read: {', '.join(nowhere)}"
        table.caption_justify, table.caption_style = "left", ""
    for state in chosen:
        for number, (tokens, at) in enumerate(places.get(state, [])):
            label = state_label(states, state, lm.tokenizer) if not number else ""
            words = [" ".join(lm.tokenizer.decode(part).split()) for part in (tokens[:at], tokens[at + 1 :])]
            # Text, not markup: a word may well be "[/b]"
            row = (label, words[0], lm.tokenizer.token(tokens[at]), words[1])
            table.add_row(*(Text(cell, style="bold" if i == 2 else "") for i, cell in enumerate(row)))
    return table
