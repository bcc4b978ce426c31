"""Automata over tokens from automata over the symbols (bytes or characters) that spell them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hmmlm.constrain.automaton import Array, Automaton, distinct_numbers, distinct_rows, finding
from hmmlm.constrain.budget import SLOW, spend
from hmmlm.errors import InputError


class Spelling:
    """The spelling of every token of a vocabulary: a bytes or str object each, None for a token without text."""

    def __init__(self, spellings: Sequence[bytes | str | None]) -> None:
        coded = [np.array([*map(ord, s)] if isinstance(s, str) else [*(s or b"")], np.int64) for s in spellings]
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

    def automaton(self, reader: Automaton, rejects: bool = False) -> Automaton:
        """Return the automaton over tokens that reads their symbols with `reader`, an automaton over symbols.

        Tokens with the same classes of symbols are read once, place by place. A token without text changes nothing, or,
        with `rejects`, is not accepted.
        """
        kinds, kind_of = reader.classes, reader.class_of[self.symbols].numpy()
        table = np.ascontiguousarray(reader.by_class.numpy().T)  # NumPy: tokens have dozens of places, short operations
        node = np.zeros(len(self._order), np.int64)  # of each token: what its symbols so far do
        after = np.arange(table.shape[1], dtype=np.int32)[None]  # [nodes, S] the automaton state after them
        rows, classes, found = list[Array](), list[Array](), 0
        for place in range(len(self._places) + 1):
            going = len(self._places[place]) if place < len(self._places) else 0
            ended, which = distinct_numbers(node[going:], len(after))
            rows.append(after[ended])
            classes.append(which + found)  # of the tokens that end here
            found += len(ended)
            if going:
                codes, which = distinct_numbers(node[:going] * kinds + kind_of[self._places[place]], len(after) * kinds)
                spend(going + len(codes) * (SLOW + reader.num_states))
                after, node = distinct_rows(table[code % kinds][after[code // kinds]] for code in codes.tolist())
                node = node[which]
        class_of = torch.empty_like(self._order)
        class_of[self._order] = torch.from_numpy(np.concatenate(classes[::-1]))
        by_class, accepting = torch.from_numpy(np.concatenate(rows)).t(), reader.accepting
        if rejects:
            lost = reader.num_states
            class_of[self._without_text] = found
            by_class = torch.cat([by_class, torch.full((lost, 1), lost, dtype=torch.int32)], 1)
            by_class = torch.cat([by_class, torch.full((1, found + 1), lost, dtype=torch.int32)])
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
        spend(2 * spacings * states * len(distinct))
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
    phrases: Sequence[str], spelling: Spelling | SpacedSpelling, left: bool = True, right: bool = True
) -> Automaton:
    """Return the automaton of texts that contain one of some phrases, however they are tokenized.

    With `left` (`right`), if a phrase starts (ends) with a letter, digit or underscore, no such character may precede
    (follow) it: both match whole words, `left` alone the beginnings of words. Bytes of a character that tokens spell
    in parts are lone surrogates (the error handler "surrogateescape").
    """
    if not all(phrases):
        raise InputError("a phrase needs at least one character")
    every = sorted({*"".join(phrases)})
    in_bytes = {c: "" if c.isascii() else c.encode().decode("ascii", "surrogateescape") for c in every}
    own = {symbol: number for number, symbol in enumerate(sorted({*every, *"".join(in_bytes.values())}))}
    outside = [*(not _in_words(symbol) for symbol in own), False, True]  # other characters: in words or not
    spelled = {c: [[own[symbol] for symbol in symbols] for symbols in (c, in_bytes[c]) if symbols] for c in every}
    codes = spelling.symbols.tolist()
    class_of = torch.zeros(max(codes, default=0) + 1, dtype=torch.long)
    class_of[codes] = torch.tensor([own.get(c, len(own) + (not _in_words(c))) for c in map(chr, codes)])
    found = (
        ([spelled[c] for c in phrase], left and _in_words(phrase[0]), right and _in_words(phrase[-1]))
        for phrase in phrases
    )
    return spelling.automaton(finding(found, outside, class_of)).minimized()


def _in_words(character: str) -> bool:
    """Return whether a character is part of words. A byte is part of a character, nearly always of a letter."""
    return character.isalnum() or character in "_\ufffd" or "\udc80" <= character <= "\udcff"
