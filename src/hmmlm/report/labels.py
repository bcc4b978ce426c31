"""Short, printable labels of tokens and states, for tables and plots."""

from __future__ import annotations

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.report.explain import StateSummary
from hmmlm.terminal import printable

MAX_LENGTH = 20  # characters of a token in a label: a long URL must not take the width of a table or plot


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as printable text of at most MAX_LENGTH characters."""
    text = printable(tokenizer.token(token))
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"


def state_label(summary: StateSummary, state: int, tokenizer: Tokenizer) -> str:
    """Return a state's number and its most telling word."""
    return f"{state} {token_label(tokenizer, int(summary.words[state, 0]))}"


def state_words(summary: StateSummary, state: int, tokenizer: Tokenizer) -> str:
    """Return the most telling words of a state."""
    return " ".join(token_label(tokenizer, word) for word in summary.words[state].tolist() if word >= 0)


def state_followers(summary: StateSummary, state: int, tokenizer: Tokenizer, count: int = 3) -> str:
    """Return the `count` most probable next states of a state, with their probabilities."""
    top = summary.transition[state].topk(min(count, len(summary.mass)))
    pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    return ", ".join(f"{state_label(summary, other, tokenizer)} {_percent(p)}" for p, other in pairs)


def _percent(p: float) -> str:
    """Format a probability in whole percents; only impossible and certain events read 0% and 100%."""
    if 0 < p < 0.005:
        return "<1%"
    return f"{p:.1%}" if 0.985 <= p < 0.9995 else f"{p:.0%}"
