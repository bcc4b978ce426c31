"""Tokens of a text as the page shows them: where each stands, and how it is written."""

from __future__ import annotations

import math
from typing import Any

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.lm.lm import LanguageModel
from hmmlm.terminal import printable


def display(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as a reader sees it: without the mark of a leading space."""
    text = tokenizer.token(token)
    if tokenizer.kind != "word" and text.startswith("▁"):
        text = text[1:] or " "
    return printable(text)


def continues(tokenizer: Tokenizer, token: int, before: int | None) -> bool:
    """Return whether a token continues the word of the token before it, as parts of words do."""
    special = (tokenizer.eos_id, tokenizer.unk_id)
    if tokenizer.kind == "word" or before is None or token in special or before == tokenizer.eos_id:
        return False
    return not tokenizer.token(token).startswith("▁")


def spans_of(lm: LanguageModel, text: str) -> list[tuple[int, int]]:
    """Return the characters [start, end) of the tokens of `lm.encode(text)`; none for an <eos>.

    Examples differ from the text in white space only, so each token is found after the one before it.
    """
    spans, end = [], 0
    for example in lm.examples(text):
        for a, b in lm.tokenizer.spans(example):
            surface = example[a:b].strip()
            start = text.find(surface, end) if surface else end
            start, end = (end, end) if start < 0 else (start, start + len(surface))
            spans.append((start, end))
        spans.append((end, end))
    return spans


def bits(log_prob: float) -> float | None:
    """Return −log2 p of a natural log-probability; None, which is null in JSON, if it is impossible."""
    return -log_prob / math.log(2) if math.isfinite(log_prob) else None


def described(tokenizer: Tokenizer, token: int, before: int | None, log_prob: float) -> dict[str, Any]:
    """Return a token of a text as JSON values."""
    return {
        "id": token,
        "text": display(tokenizer, token),
        "continues": continues(tokenizer, token, before),
        "unknown": token == tokenizer.unk_id,
        "end": token == tokenizer.eos_id,
        "surprisal": bits(log_prob),
    }
