"""The figures of a text that follow from log-probabilities of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenizers import Tokenizer


def perplexity(log_likelihood: float, tokens: int) -> float:
    """Return exp(−log_likelihood / tokens); infinity if a sequence is impossible, NaN without tokens."""
    loss = -log_likelihood / tokens if tokens else math.nan
    return math.exp(loss) if loss < 700 else loss if math.isnan(loss) else math.inf


@dataclass(frozen=True)
class TextScore:
    """What a model assigns to a text, and figures that can be compared between vocabularies."""

    tokens: int
    """<eos> and <unk> counted."""
    log_likelihood: float
    """Natural log-likelihood of all tokens."""
    words: int
    """Tokens other than <eos>."""
    unknown_words: int
    """Tokens that are <unk>."""
    unknown_log_likelihood: float
    """The part of the log-likelihood that is of <unk>."""
    text_bytes: int | None = None
    """Of the text in UTF-8; None if not recorded."""

    @property
    def perplexity(self) -> float:
        return perplexity(self.log_likelihood, self.tokens)

    @property
    def known_perplexity(self) -> float:
        """Perplexity without unknown words: they are context, but not counted."""
        known = self.tokens - self.unknown_words
        # An impossible <unk> leaves nothing to subtract from.
        rest = self.log_likelihood - self.unknown_log_likelihood
        return perplexity(-math.inf if math.isnan(rest) else rest, known) if known else math.nan

    @property
    def bits_per_token(self) -> float:
        return -self.log_likelihood / math.log(2) / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text; too low if words are unknown, as `<unk>` does not spell them."""
        return -self.log_likelihood / math.log(2) / self.text_bytes if self.text_bytes else None

    @property
    def unknown_share(self) -> float:
        """The fraction of unknown words among words."""
        return self.unknown_words / self.words if self.words else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values; null where one is infinite or not defined."""
        values = {
            "tokens": self.tokens,
            "log_likelihood": self.log_likelihood,
            "perplexity": self.perplexity,
            "perplexity_without_unknown": self.known_perplexity,
            "bits_per_token": self.bits_per_token,
            "bits_per_byte": self.bits_per_byte,
            "unknown_share": self.unknown_share,
        }
        return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}


def score_of(
    tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, log_probs: Tensor, text_bytes: int | None = None
) -> TextScore:
    """Return the score of a text of tokens from their log-probabilities [T]."""
    ids = torch.as_tensor(tokens)
    unknown = ids == (-1 if tokenizer.unk_id is None else tokenizer.unk_id)
    return TextScore(
        tokens=len(ids),
        log_likelihood=float(log_probs.sum()),
        words=int((ids != tokenizer.eos_id).sum()),
        unknown_words=int(unknown.sum()),
        unknown_log_likelihood=float(log_probs[unknown].sum()),
        text_bytes=text_bytes,
    )
