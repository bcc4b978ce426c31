"""Automata over tokens from automata over the symbols (bytes or characters) that spell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hmmlm.constrain.automaton import LARGEST_TABLE, Automaton
from hmmlm.errors import InputError

Array = NDArray[Any]


class Spelling:
    """The spelling of every token of a vocabulary: a bytes or str object each, None for a token without text."""

    def __init__(self, spellings: Sequence[bytes | str | None]) -> None:
        coded = [
            np.array([*map(ord, s)] if isinstance(s, str) else [*s], dtype=np.int64) for s in map(_text, spellings)
        ]
        lengths = torch.tensor([len(symbols) for symbols in coded])
        self._order = lengths.argsort(descending=True, stable=True)
        joined = torch.from_numpy(np.concatenate([coded[i] for i in self._order.tolist()]))
        self.symbols, flat = joined.unique(return_inverse=True)
        """The distinct symbols, as integers."""
        self._lengths = lengths[self._order]
        starts = self._lengths.cumsum(0) - self._lengths
        # The symbols at each place of the tokens that have one, longest token first.
        sizes = [int((self._lengths > place).sum()) for place in range(int(lengths.max()))]
        self._places = [flat[starts[:size] + place].numpy() for place, size in enumerate(sizes)]
        self._without_text = torch.tensor([s is None for s in spellings])

    def __len__(self) -> int:
        return len(self._order)

    def automaton(self, reader: Automaton, rejects: bool = False) -> Automaton:
        """Return the automaton over tokens that reads their symbols with `reader`, an automaton over symbols.

        Tokens with the same classes of symbols are read once, place by place. A token without text changes nothing, or,
        with `rejects`, is not accepted.
        """
        kinds, kind_of = reader.classes, reader.class_of[self.symbols].numpy()
        table = reader.by_class.long().numpy()  # NumPy: tokens have dozens of places, and short operations
        node = np.zeros(len(self), np.int64)  # of each token: its classes of symbols so far
        states = np.arange(len(table))[:, None]  # [S, nodes]
        columns, classes, found = list[Array](), list[Array](), 0
        for symbols in (*self._places, np.zeros(0, np.int64)):
            going = len(symbols)
            ended, which = _distinct(node[going:], states.shape[1])
            columns.append(states[:, ended])
            classes.append(which + found)  # of the tokens that end here
            found += len(ended)
            distinct, node = _distinct(node[:going] * kinds + kind_of[symbols], states.shape[1] * kinds)
            states = table[states[:, distinct // kinds], distinct % kinds]
        class_of = torch.empty_like(self._order)
        class_of[self._order] = torch.from_numpy(np.concatenate(classes[::-1]))
        by_class, accepting = torch.from_numpy(np.concatenate(columns, 1)), reader.accepting
        if rejects:
            lost = len(table)
            class_of[self._without_text] = found
            by_class = torch.cat([by_class, torch.full((lost, 1), lost)], 1)
            by_class = torch.cat([by_class, torch.full((1, found + 1), lost)])
            accepting = torch.cat([accepting, torch.tensor([False])])
        return Automaton.of_classes(by_class, class_of, accepting)


class SpacedSpelling:
    """The spelling of tokens that follow a space or not, by the marks before them.

    Args:
        spellings: of each token after a space, which is its first symbol; None for a token without text.
        kind_of: [V] the kind of each token, of K.
        joins: [D, K] whether a token of each kind follows without a space, after each of D spacings; the first one is
            that at the start.
        after: [D, K] the spacing after the token.
    """

    def __init__(self, spellings: Sequence[bytes | str | None], kind_of: Tensor, joins: Tensor, after: Tensor) -> None:
        self._spaced = Spelling(spellings)
        self._joined = Spelling([None if spelling is None else spelling[1:] for spelling in spellings])
        self._kind_of, self._joins, self._after = kind_of, joins, after

    @property
    def symbols(self) -> Tensor:
        return self._spaced.symbols

    def automaton(self, reader: Automaton, rejects: bool = False) -> Automaton:
        """Return the automaton over tokens that reads their symbols with `reader`; see `Spelling.automaton`."""
        joined, spaced = (s.automaton(reader, rejects) for s in (self._joined, self._spaced))
        kinds, states, spacings = self._joins.shape[1], joined.num_states, len(self._joins)
        codes = (joined.class_of * spaced.classes + spaced.class_of) * kinds + self._kind_of
        distinct, class_of = codes.unique(return_inverse=True)
        if spacings * states * len(distinct) > LARGEST_TABLE:
            raise InputError("the constraint is too large for the marks of this vocabulary: simplify it")
        kind, without, behind = (
            distinct % kinds,
            distinct // kinds // spaced.classes,
            distinct // kinds % spaced.classes,
        )
        parts = []
        for joins, after in zip(self._joins[:, kind], self._after[:, kind], strict=True):
            state = torch.where(joins, joined.by_class[:, without], spaced.by_class[:, behind])
            parts.append(after * states + state)
        return Automaton.of_classes(torch.cat(parts), class_of, joined.accepting.repeat(spacings))


def containing_text(
    phrase: str, spelling: Spelling | SpacedSpelling, left: bool = True, right: bool = True
) -> Automaton:
    """Return the automaton of texts that contain `phrase`, however it is tokenized.

    With `left` (`right`), if the phrase starts (ends) with a letter, digit or underscore, no such character may precede
    (follow) it: both match whole words, `left` alone the beginnings of words. Bytes of a character that tokens spell
    in parts are lone surrogates (the error handler "surrogateescape").
    """
    if not phrase:
        raise InputError("a phrase needs at least one character")
    left, right = left and _in_words(phrase[0]), right and _in_words(phrase[-1])
    in_bytes = ["" if c.isascii() else c.encode().decode("ascii", "surrogateescape") for c in phrase]
    own = {character: number for number, character in enumerate(sorted({*phrase, *"".join(in_bytes)}))}
    in_words = [*map(_in_words, own), True, False]  # other characters are parts of words or not
    length, found = len(phrase), frozenset([(-1, 0)])

    def step(begun: frozenset[tuple[int, int]], kind: int) -> frozenset[tuple[int, int]]:
        """Return the matched characters, and bytes of the next, for every place where the phrase may have started."""
        if begun == found or ((length, 0) in begun and not (in_words[kind] and right)):
            return found
        further = set() if in_words[kind] and left else {(0, 0)}
        for n, matched in begun:
            if n < length and not matched and kind == own[phrase[n]]:
                further.add((n + 1, 0))
            if n < length and in_bytes[n] and kind == own[in_bytes[n][matched]]:
                further.add((n, matched + 1) if matched + 1 < len(in_bytes[n]) else (n + 1, 0))
        return frozenset(further)

    start = frozenset([(0, 0)])
    numbers, table = {start: 0}, []
    for state in (todo := [start]):
        row = []
        for kind in range(len(in_words)):
            reached = step(state, kind)
            if reached not in numbers:
                numbers[reached] = len(numbers)
                todo.append(reached)
            row.append(numbers[reached])
        table.append(row)
    accepting = torch.tensor([state == found or (length, 0) in state for state in todo])
    kinds = {code: own.get(chr(code), len(own) + (not _in_words(chr(code)))) for code in spelling.symbols.tolist()}
    class_of = torch.zeros(max(kinds, default=0) + 1, dtype=torch.long)
    class_of[list(kinds)] = torch.tensor(list(kinds.values()))
    return spelling.automaton(Automaton.of_classes(torch.tensor(table), class_of, accepting)).minimized()


def _in_words(character: str) -> bool:
    """Return whether a character is part of words. A byte is part of a character, nearly always of a letter."""
    return character.isalnum() or character in "_\ufffd" or "\udc80" <= character <= "\udcff"


def _distinct(numbers: Array, most: int) -> tuple[Array, Array]:
    """Return the distinct numbers, sorted, of some below `most`, and the place of each number [n] among them."""
    if most > 64 * len(numbers):
        return np.unique(numbers, return_inverse=True)
    found = np.zeros(most, bool)
    found[numbers] = True
    distinct = found.nonzero()[0]
    place = np.empty(most, np.int64)
    place[distinct] = np.arange(len(distinct))
    return distinct, place[numbers]


def _text(spelling: bytes | str | None) -> bytes | str:
    return b"" if spelling is None else spelling
