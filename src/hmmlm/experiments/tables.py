"""Tables for the terminal: states with their words, and a sentence with its states."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from torch import Tensor

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.experiments.explain import States, explain_text
from hmmlm.learning.evaluate import perplexity
from hmmlm.learning.progress import perplexity_text
from hmmlm.lm import LanguageModel


def state_label(states: States, state: int, tokenizer: Tokenizer) -> str:
    """A state by its number and its most telling word."""
    return f"{state} {tokenizer.token(int(states.words[state, 0]))}"


def state_words(states: States, state: int, tokenizer: Tokenizer) -> str:
    """The most telling words of a state."""
    return " ".join(tokenizer.token(word) for word in states.words[state].tolist() if word >= 0)


def state_followers(states: States, state: int, tokenizer: Tokenizer, count: int = 3) -> str:
    """The states that most often follow one, with their probabilities."""
    top = states.transition[state].topk(min(count, len(states.mass)))
    pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    return ", ".join(f"{state_label(states, other, tokenizer)} {_percent(p)}" for p, other in pairs)


def _percent(p: float) -> str:
    """Whole per cents, but 100% only from 99.95% on."""
    return f"{p:.1%}" if 0.985 <= p < 0.9995 else f"{p:.0%}"


def states_table(lm: LanguageModel, states: States, count: int, in_text: Tensor | None = None) -> Table:
    """The first `count` states; their shares are those of the model's own text, and, where it is given, `in_text`."""
    shares = {"long-run\nshare": states.mass}
    if in_text is not None:
        shares["share of\nvalid"] = in_text
    table = Table(box=None, pad_edge=False)
    for name in ("state", *shares):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most telling words", ratio=3)
    table.add_column("goes on to", ratio=2)
    for state in states.order[:count].tolist():
        words = state_words(states, state, lm.tokenizer)
        followers = state_followers(states, state, lm.tokenizer)
        # Text, not markup: a word may well be "[/b]".
        table.add_row(str(state), *(f"{float(p[state]):.1%}" for p in shares.values()), Text(words), Text(followers))
    return table


def path_table(lm: LanguageModel, states: States, text: str) -> Table:
    """Every word of a text with its Viterbi state, how sure the model is of it, and what else the state says."""
    path = explain_text(lm, text)
    title = f"perplexity {perplexity_text(perplexity(path.log_prob, len(path.tokens)))}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="")
    table.add_column("word")
    for name in ("state", "p(state)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("words of the state", ratio=1)
    for token, state, posterior in zip(path.tokens, path.states, path.posterior, strict=True):
        words = Text(state_words(states, state, lm.tokenizer))
        table.add_row(Text(lm.tokenizer.token(token)), str(state), f"{float(posterior[state]):.2f}", words)
    return table
