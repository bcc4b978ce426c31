"""States in a text: the share of tokens that each emits, and occurrences in context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hmmlm.checks import padded
from hmmlm.data.tokenfile import TokenFile
from hmmlm.errors import InputError
from hmmlm.lm.lm import LanguageModel
from hmmlm.report.explain import StateSummary
from hmmlm.report.labels import state_label, token_label
from hmmlm.terminal import printable

MAX_TOKENS = 10_000  # tokens read: enough to meet every frequent state
MAX_WORK = 2**37  # transitions computed for posteriors: models of thousands of states read less text
WINDOW = 192  # tokens of a window
MARGIN = 32  # tokens read on both sides of a window, so that the ends hardly affect its states
BATCH_SIZE = 16  # windows per query
CONTEXT = 6  # tokens shown on both sides of an occurrence
CANDIDATES = 48  # places of a state that are read to find its best passages, at most
READ_CELLS = 2**24  # tokens × states that are read for them
LIKELY_WORDS = 24  # most likely words of a state whose places are candidates
MAX_SEARCHED = 2_000_000  # tokens of a text that are searched for these words


class TextWindow(NamedTuple):
    """A part of a text with a margin on both sides."""

    tokens: list[int]  # [T] margins included
    inner: slice  # positions of the window itself


class Occurrence(NamedTuple):
    """A token of a text in its context."""

    tokens: list[int]  # the token and up to CONTEXT tokens on both sides
    position: int  # index of the token in `tokens`


def _window_batches(lm: LanguageModel, text: TokenFile, max_tokens: int) -> Iterator[list[TextWindow]]:
    """Yield batches of windows that cover `max_tokens` of the text, in a fixed random order."""
    starts = np.random.default_rng(0).permutation(np.arange(0, len(text), WINDOW))[: -(-max_tokens // WINDOW)].tolist()
    for i in range(0, len(starts), BATCH_SIZE):
        yield [_window(lm, text, start) for start in starts[i : i + BATCH_SIZE]]


def _window(lm: LanguageModel, text: TokenFile, start: int) -> TextWindow:
    """Return the window of a text that starts at `start`, with its margins."""
    first, end = max(0, start - MARGIN), min(start + WINDOW, len(text))
    line_ends = np.flatnonzero(text.tokens[first:start] == lm.tokenizer.eos_id)
    if lm.restarts and line_ends.size:  # start reading at the start of a line, where the chain restarts
        first += int(line_ends[0]) + 1
    return TextWindow(text.tokens[first : end + MARGIN].tolist(), slice(start - first, end - first))


def _query(
    lm: LanguageModel, windows: list[TextWindow], query: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[TextWindow, Tensor]]:
    """Yield each window with the results of `query` for its tokens.

    Windows of probability zero are skipped: a model may have no path that starts in the middle of a text.

    Args:
        query: maps tokens [B, T] and lengths [B] to results [B, T, ...].
    """
    parts = [lm.sequences(window.tokens) for window in windows]
    try:
        results = iter(query(*padded([sequence for part in parts for sequence in part])).cpu())
    except InputError:  # one window is impossible: query them one by one
        if len(windows) > 1:
            for window in windows:
                yield from _query(lm, [window], query)
        return
    for window, part in zip(windows, parts, strict=True):
        yield window, torch.cat([next(results)[: len(sequence)] for sequence in part])


@torch.no_grad()
def text_share(lm: LanguageModel, text: TokenFile) -> Tensor | None:
    """Return the share of the text's tokens that each state emits [Z], by posterior; None if no part is possible."""
    total, count = torch.zeros(lm.hmm.num_states, dtype=torch.float64), 0
    for windows in _window_batches(lm, text, min(MAX_TOKENS, MAX_WORK // lm.hmm.num_states**2)):
        for window, posterior in _query(lm, windows, lm.hmm.posterior):
            total += posterior[window.inner].double().sum(0)
            count += len(posterior[window.inner])
    return total / count if count else None


@torch.no_grad()
def find_occurrences(lm: LanguageModel, text: TokenFile, per_state: int) -> dict[int, list[Occurrence]]:
    """Return up to `per_state` occurrences of each state on the Viterbi paths of the text, of different words first."""
    by_word: dict[int, dict[int, list[Occurrence]]] = {}
    for windows in _window_batches(lm, text, MAX_TOKENS):
        for window, path in _query(lm, windows, lambda tokens, lengths: lm.hmm.viterbi(tokens, lengths)[0]):
            for t in range(len(window.tokens))[window.inner]:
                found = by_word.setdefault(int(path[t]), {}).setdefault(window.tokens[t], [])
                if len(found) < per_state:
                    first = max(0, t - CONTEXT)
                    found.append(Occurrence(window.tokens[first : t + CONTEXT + 1], t - first))
    return {state: _round_robin(list(words.values()))[:per_state] for state, words in by_word.items()}


class Passage(NamedTuple):
    """An occurrence of a state in a text, with its probability."""

    occurrence: Occurrence
    prob: float  # p(state | the passage)


@torch.no_grad()
def find_passages(lm: LanguageModel, text: TokenFile, state: int, count: int) -> list[Passage]:
    """Return up to `count` passages of a text in which the posterior of `state` is highest, the highest first.

    Looks at CANDIDATES places, drawn at random from those of the words that the state emits most; each is read with
    MARGIN tokens on both sides. Of models with very many states, fewer places with smaller margins are read.
    """
    tokens = max(READ_CELLS // lm.hmm.num_states, 128)
    margin = MARGIN if tokens > CANDIDATES * 2 * MARGIN else MARGIN // 3
    candidates = min(CANDIDATES, tokens // (2 * margin + 1))
    words, log_probs = lm.hmm.detach().emission.log_rows(torch.tensor([state], device=lm.hmm.device))
    likely = log_probs[0].topk(min(LIKELY_WORDS, log_probs.shape[1]))
    chosen = words[0, likely.indices[likely.values > -torch.inf]].tolist()
    rng, places = np.random.default_rng(state), list[int]()
    if len(text) > MAX_SEARCHED:
        first = int(rng.integers(len(text) - MAX_SEARCHED))
        part = np.asarray(text.tokens[first : first + MAX_SEARCHED])
    else:
        first, part = 0, np.asarray(text.tokens)
    # A word's share of the candidates is its probability: frequent words must not displace those that tell.
    for word, p in zip(chosen, likely.values.exp().tolist(), strict=False):
        found = np.flatnonzero(part == word)
        wanted = min(len(found), 1 + round(candidates * p))
        places += (first + rng.choice(found, wanted, replace=False)).tolist()
    windows = [_around(lm, text, place, margin) for place in places[:candidates]]
    passages = []
    for i in range(0, len(windows), BATCH_SIZE):
        for window, posterior in _query(lm, windows[i : i + BATCH_SIZE], lm.hmm.posterior):
            t = window.inner.start
            start = max(0, t - CONTEXT)
            occurrence = Occurrence(window.tokens[start : t + CONTEXT + 1], t - start)
            passages.append(Passage(occurrence, float(posterior[t, state])))
    return sorted(passages, key=lambda passage: -passage.prob)[:count]


def _around(lm: LanguageModel, text: TokenFile, place: int, margin: int) -> TextWindow:
    """Return the window of one token, with its margins within the line if the chain restarts at each."""
    first, end = max(0, place - margin), min(place + 1 + margin, len(text))
    if lm.restarts:
        ends = np.flatnonzero(text.tokens[first:end] == lm.tokenizer.eos_id) + first
        first = max([first, *(int(e) + 1 for e in ends if e < place)])
        end = min([end, *(int(e) + 1 for e in ends if e >= place)])
    return TextWindow(text.tokens[first:end].tolist(), slice(place - first, place - first + 1))


def _round_robin(by_word: list[list[Occurrence]]) -> list[Occurrence]:
    """Order occurrences: the first of every word, then the second of every word, and so on."""
    ranked = sorted((rank, word) for word, found in enumerate(by_word) for rank in range(len(found)))
    return [by_word[word][rank] for rank, word in ranked]


class _TextEnd:
    """One line of text that is cut at its start to fit its column: the words next to an occurrence stay."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        if cell_len(text) > options.max_width:
            while text and cell_len(text) >= options.max_width:
                text = text[1:]
            text = f"…{text}"
        yield Text(text, justify="right", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, cell_len(self.text)))


def contexts_table(lm: LanguageModel, summary: StateSummary, count: int, text: TokenFile, per_state: int = 3) -> Table:
    """Return a table of `per_state` occurrences in the text of each of the first `count` states in `summary.order`."""
    table = Table(box=None, pad_edge=False)
    # Only the columns that may wrap give up width, so the state stays whole; their cells cut instead of wrapping.
    table.add_column("state", no_wrap=True)
    table.add_column("before", justify="right")
    table.add_column("word")
    table.add_column("after")
    occurrences = find_occurrences(lm, text, per_state)
    chosen = summary.order[:count].tolist()
    missing = [str(state) for state in chosen if state not in occurrences]
    if missing:
        table.caption = f"not found in the {min(len(text), MAX_TOKENS):,} tokens read: {', '.join(missing)}"
        table.caption_justify, table.caption_style = "left", ""
    for state in chosen:
        for i, (tokens, position) in enumerate(occurrences.get(state, [])):
            label = "" if i else state_label(summary, state, lm.tokenizer)
            parts = tokens[:position], tokens[position + 1 :]
            before, after = (printable(" ".join(lm.tokenizer.decode(part).split())) for part in parts)
            word = Text(token_label(lm.tokenizer, tokens[position]), style="bold", no_wrap=True, overflow="ellipsis")
            # Text, not str: rich would read a word such as "[/b]" as markup.
            table.add_row(Text(label), _TextEnd(before), word, Text(after, no_wrap=True, overflow="ellipsis"))
    return table
