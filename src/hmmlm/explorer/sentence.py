"""The sentence panel: surprisal, posterior, entropy and Viterbi path of a text; what could stand at a position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from hmmlm.checks import padded
from hmmlm.errors import InputError
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.query import MAX_CHARACTERS, Count, Query, Text
from hmmlm.explorer.tokens import bits, continues, described, display, spans_of
from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.scoring import perplexity
from hmmlm.terminal import counted

CELLS = 2**25  # tokens × states of a posterior
MAX_TOKENS = 2_000
STATES = 5  # most likely states of a token


class SentenceQuery(Query):
    text: Text
    """Lines of text."""


class BlankQuery(Query):
    text: Text
    """Lines of text."""
    position: Annotated[int, Field(ge=0, le=2 * MAX_CHARACTERS)]
    """Index of a token of the text, `<eos>` counted."""
    top: Count = 12
    """Number of words."""


@torch.no_grad()
def sentence(explorer: Explorer, query: SentenceQuery) -> dict[str, Any]:
    """Return every token of a text with its surprisal, states and entropy; entropies and surprisal are in bits.

    Of a text that is too long for a model of this size, the first part is read.
    """
    lm, tokenizer = explorer.lm, explorer.lm.tokenizer
    whole = lm.encode(query.text)
    tokens = whole[: _limit(lm)]
    (log_probs,) = lm.token_log_probs([tokens])
    total = float(log_probs.sum())
    rows: list[dict[str, Any]] = []
    for i, (token, log_prob, span) in enumerate(
        zip(tokens, log_probs.tolist(), spans_of(lm, query.text), strict=False)
    ):
        shown = described(tokenizer, token, tokens[i - 1] if i else None, log_prob)
        rows.append(shown | {"start": span[0], "stop": span[1]})
    answer: dict[str, Any] = {
        "tokens": rows,
        "omitted": len(whole) - len(tokens),
        "bits": bits(total),
        "perplexity": perplexity(total, len(tokens)) if math.isfinite(total) else None,
        "states": {},
        "problem": None,
    }
    try:
        states = list[tuple[list[int], list[float], float, int]]()
        for sequences in _groups(lm, tokens):
            batch = padded(sequences)
            posterior, (paths, _) = lm.hmm.posterior(*batch), lm.hmm.viterbi(*batch)
            for row, path, sequence in zip(posterior, paths, sequences, strict=True):
                states += _most_likely(row[: len(sequence)], path[: len(sequence)])
    except InputError as error:  # impossible under the model: there is no posterior
        return answer | {"problem": str(error)}
    for shown, (best, probs, entropy, viterbi) in zip(rows, states, strict=True):
        shown["states"] = [[state, p] for state, p in zip(best, probs, strict=True) if p > 0]
        shown |= {"entropy": entropy, "viterbi": viterbi}
    named = {state for best, _, _, viterbi in states for state in (*best[:STATES], viterbi)}
    labels = {str(state): words for state, words in explorer.index.words(sorted(named)).items()}
    return answer | {"states": labels}


def _limit(lm: LanguageModel) -> int:
    """Return how many tokens of a text are read."""
    return max(1, min(MAX_TOKENS, CELLS // lm.hmm.num_states))


def _groups(lm: LanguageModel, tokens: list[int]) -> Iterator[list[list[int]]]:
    """Yield the sequences of a text in order, as many together as fit CELLS."""
    group: list[list[int]] = []
    for sequence in lm.sequences(tokens):
        longest = max(len(sequence), *(len(other) for other in group), 0)
        if group and (len(group) + 1) * longest * lm.hmm.num_states > CELLS:
            yield group
            group = []
        group.append(sequence)
    yield group


def _most_likely(posterior: Tensor, path: Tensor) -> list[tuple[list[int], list[float], float, int]]:
    """Return, for each position of posterior [T, Z], the likely states, their probabilities, entropy and path state."""
    best = posterior.topk(min(STATES, posterior.shape[1]), dim=1)
    entropy = torch.special.entr(posterior).sum(1) / math.log(2)
    lists = best.indices.tolist(), best.values.tolist(), entropy.tolist(), path.tolist()
    return list(zip(*lists, strict=True))


@torch.no_grad()
def blank(explorer: Explorer, query: BlankQuery) -> dict[str, Any]:
    """Return what could stand at a position given everything before and after it: exact probabilities.

    They are given that the line does not end there, unless it does.
    """
    lm, tokenizer, position = explorer.lm, explorer.lm.tokenizer, query.position
    tokens = lm.encode(query.text)[: _limit(lm)]
    if position >= len(tokens):
        raise InputError(f"position {position} is beyond the text of {counted(len(tokens), 'token')}")
    sequence, offset = _sequence_at(lm, tokens, position)
    probs = lm.hmm.infill_at([sequence], offset).double().exp()
    own = tokens[position]
    if own != tokenizer.eos_id:
        probs[tokenizer.eos_id] = 0.0
    probs /= probs.sum()
    best = probs.topk(min(query.top, len(probs)))
    before = tokens[position - 1] if position else None
    return {
        "token": {"text": display(tokenizer, own), "p": float(probs[own]), "rank": int((probs > probs[own]).sum()) + 1},
        "words": [
            {"id": i, "text": display(tokenizer, i), "continues": continues(tokenizer, i, before), "p": p}
            for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            if p > 0
        ],
        "entropy": float(torch.special.entr(probs).sum()) / math.log(2),
    }


def _sequence_at(lm: LanguageModel, tokens: list[int], position: int) -> tuple[list[int], int]:
    """Return the sequence that a position of a text belongs to, and the position in it."""
    for sequence in lm.sequences(tokens):
        if position < len(sequence):
            return sequence, position
        position -= len(sequence)
    raise AssertionError("the sequences of a text have all of its tokens")
