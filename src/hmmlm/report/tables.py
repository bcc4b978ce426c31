"""Terminal tables: the states of a model, and the states of a text."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from torch import Tensor

from hmmlm.lm.lm import LanguageModel
from hmmlm.lm.scoring import perplexity
from hmmlm.report.explain import StateSummary, explain_text
from hmmlm.report.labels import state_followers, state_words, token_label
from hmmlm.runs.progress import perplexity_text


def states_table(lm: LanguageModel, summary: StateSummary, count: int, in_text: Tensor | None = None) -> Table:
    """Return a table of the first `count` states in `summary.order`.

    Args:
        in_text: [Z] share of each state in the validation text, shown beside the long-run share.
    """
    shares = {"long-run\nshare": summary.mass}
    if in_text is not None:
        shares["share of\nvalidation"] = in_text
    table = Table(box=None, pad_edge=False)
    for name in ("state", *shares):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most telling words", ratio=3)
    table.add_column("next states", ratio=2)
    for state in summary.order[:count].tolist():
        words = state_words(summary, state, lm.tokenizer)
        followers = state_followers(summary, state, lm.tokenizer)
        # Text, not str: rich would read a word such as "[/b]" as markup.
        table.add_row(str(state), *(f"{float(p[state]):.1%}" for p in shares.values()), Text(words), Text(followers))
    return table


def path_table(lm: LanguageModel, summary: StateSummary, text: str) -> Table:
    """Return a table of every token of a text with its Viterbi state, that state's posterior and its words."""
    explanation = explain_text(lm, text)
    title = f"perplexity {perplexity_text(perplexity(explanation.log_prob, len(explanation.tokens)))}"
    unknown = explanation.tokens.count(lm.tokenizer.unk_id) if lm.tokenizer.unk_id is not None else 0
    if unknown:
        title += f", {unknown} unknown {'word' if unknown == 1 else 'words'}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="")
    table.add_column("word")
    for name in ("state", "p(state)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most telling words of the state", ratio=1)
    for token, state, posterior in zip(explanation.tokens, explanation.states, explanation.posterior, strict=True):
        words = Text(state_words(summary, state, lm.tokenizer))
        table.add_row(Text(token_label(lm.tokenizer, token)), str(state), f"{float(posterior[state]):.2f}", words)
    return table
