"""Regular expressions as automata over bytes: the syntax of Python's `re`, matched against a whole text in UTF-8.

What is not regular, or depends on what was tried before, is refused: lookaround, backreferences, atomic groups. `\\w`
and `\\d` match ASCII only, which makes automata a hundred times smaller; every text that is accepted matches in `re`.
"""

from __future__ import annotations

import _sre
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from operator import ge
from re import _casefix, _parser  # type: ignore[attr-defined]
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np
import torch

from hmmlm.arguments import describe
from hmmlm.constrain.automaton import Array, Automaton, explore
from hmmlm.constrain.budget import SLOW, construction, spend
from hmmlm.errors import InputError

_REFUSED = {
    sre.ASSERT: "lookahead and lookbehind look at text outside the match",
    sre.ASSERT_NOT: "lookahead and lookbehind look at text outside the match",
    sre.GROUPREF: "a backreference is not regular",
    sre.GROUPREF_EXISTS: "a conditional group is not regular",
    sre.ATOMIC_GROUP: "an atomic group depends on the order of attempts",
    sre.POSSESSIVE_REPEAT: "a possessive repeat depends on the order of attempts",
}
_EVERY = sys.maxunicode + 1
# Of characters of two to four bytes: the first first byte, the first character, the one after the last, and all that
# would begin with such bytes, by byte.
_LENGTHS = (
    (0xC0, 0x80, 0x800, (32, 64)),
    (0xE0, 0x800, 0x10000, (16, 64, 64)),
    (0xF0, 0x10000, _EVERY, (5, 64, 64, 64)),
)


@construction()
def regex_automaton(pattern: str, optional_space: bool = False) -> Automaton:
    """Return the automaton over bytes of texts that match `pattern` from beginning to end.

    With `optional_space`, one space may precede the match.
    """
    spend(SLOW * len(pattern))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that a later version of Python may read in another way
            parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise InputError(f"regex {describe(pattern)} is not a regular expression: {error}") from None
    network = _Network(pattern)
    try:
        items = network.read(list(parsed), parsed.state.flags, outermost=True)
    except RecursionError:
        raise InputError(f"regex {describe(pattern)} cannot be used: its groups are nested too deeply") from None
    return network.determinize(items, optional_space)


@dataclass(eq=False)
class _Bytes:
    """One character, or its last bytes."""

    edges: list[tuple[int, int, _Bytes | None]]
    """The first and last value of a byte, and what follows it, if anything."""


@dataclass(eq=False)
class _Group:
    """Alternatives, each of which is a sequence of items."""

    alternatives: list[list[_Item]]
    nullable: bool  # whether it matches the empty text


class _Repeat(NamedTuple):
    least: int  # 0 if the group is nullable
    most: float
    group: _Group

    @classmethod
    def of(cls, least: int, most: float, *alternatives: list[_Item]) -> _Repeat:
        nullable = any(all(isinstance(i, _Repeat) and not i.least for i in items) for items in alternatives)
        return cls(0 if nullable else least, most, _Group([*alternatives], nullable))


_Item = _Bytes | _Repeat


@dataclass(eq=False, slots=True)
class _Term:
    """An item, then another term: the texts that may still follow. Equal terms are one object."""

    item: _Item | None
    tail: _Term | None
    shape: int  # the items, but for the bounds of repeats
    bounds: tuple[float, ...]  # of the repeats: least, -most
    moves: list[tuple[int, int, _Term]] | None = None  # by classes of bytes, from one up to another
    accepts: bool = False  # whether nothing may follow, once there are moves


class _Network:
    """The terms of an expression (Antimirov's partial derivatives), made as they are reached.

    Repeats keep their bounds, so a set of terms of a determinized automaton is often a few, whatever the bounds.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.characters: dict[object, _Bytes] = {}
        self.bounds = {0, 0x20, 0x21}  # where classes of bytes begin
        self.number_of: list[int] = []  # the class of each byte
        self.shapes: dict[tuple[object, int], int] = {}
        self.terms: dict[tuple[_Item, _Term], _Term] = {}
        self.end = _Term(None, None, -1, ())

    def refuse(self, reason: str) -> None:
        raise InputError(f"regex {describe(self.pattern)} cannot be used: {reason}")

    def read(self, parsed: list[Any], flags: int, outermost: bool = False) -> list[_Item]:
        """Return the items of a parsed expression."""
        items = list[_Item]()
        for place, (op, argument) in enumerate(parsed):
            spend(SLOW)
            if op in _REFUSED:
                self.refuse(_REFUSED[op])
            if op is sre.AT:
                first, last = outermost and place == 0, outermost and place == len(parsed) - 1
                ends = (sre.AT_END, sre.AT_END_STRING)
                begins = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
                if not ((first and argument in begins) or (last and argument in ends)):
                    self.refuse("\\b and \\B, and ^ or $ inside the expression, look at text outside the match")
            elif op is sre.SUBPATTERN:
                _, added, removed, inner = argument
                items += self.read(list(inner), (flags | added) & ~removed)
            elif op is sre.BRANCH:
                items.append(_Repeat.of(1, 1, *(self.read(list(inner), flags) for inner in argument[1])))
            elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
                least, most, inner = argument
                bound = inf if most is sre.MAXREPEAT else most
                items.append(_Repeat.of(least, bound, self.read(list(inner), flags)))
            else:
                key = (op, tuple(argument) if op is sre.IN else argument, flags)
                if key not in self.characters:
                    if op is sre.LITERAL and not flags & re.IGNORECASE and not 0xD800 <= argument < 0xE000:
                        encoded = [*chr(argument).encode()]
                        found = _Bytes([(encoded[-1], encoded[-1], None)])
                        for byte in encoded[-2::-1]:
                            found = _Bytes([(byte, byte, found)])
                        self.bounds.update(bound for byte in encoded for bound in (byte, byte + 1))
                    else:
                        found = self.read_characters(_characters(op, argument, flags))
                    self.characters[key] = found
                items.append(self.characters[key])
        return items

    def read_characters(self, chosen: Array) -> _Bytes:
        """Return one character of a mask, as the bytes that encode it in UTF-8."""
        known: dict[tuple[int, bytes], _Bytes] = {}

        def edges_of(first: int, block: Array) -> list[tuple[int, int, _Bytes | None]]:
            """Return the edges of the bytes from `first` on, each with a part of `block`."""
            after = [bytes_of(part) for part in block]
            starts = [i for i in range(len(after)) if not i or after[i] is not after[i - 1]]
            pairs = zip(starts, [*starts[1:], len(after)], strict=True)
            self.bounds.update(first + i for i in starts)
            self.bounds.add(first + len(after))
            return [(first + i, first + end - 1, after[i]) for i, end in pairs if block[i].any()]

        def bytes_of(block: Array) -> _Bytes | None:
            """Return what follows a byte: all blocks without a character are one object."""
            if not block.ndim and block:
                return None
            key = block.ndim, block.tobytes() if block.any() else b""
            if key not in known:
                spend(SLOW + block.size)
                known[key] = _Bytes(edges_of(0x80, block) if block.any() else [])
            return known[key]

        edges = edges_of(0, chosen[:0x80])
        for first, start, end, shape in _LENGTHS:
            block = np.zeros(shape, bool)
            block.reshape(-1)[start:end] = chosen[start:end]
            edges += edges_of(first, block)
        return _Bytes(edges)

    def put(self, item: _Item, tail: _Term) -> _Term:
        """Return the term of an item before another term."""
        repeat = item if isinstance(item, _Repeat) else None
        if repeat and not repeat.most:
            return tail
        term = self.terms.get((item, tail))
        if term is None:
            spend(2 * SLOW + len(tail.bounds))
            shape = self.shapes.setdefault((repeat.group if repeat else item, tail.shape), len(self.shapes))
            bounds = (repeat.least, -repeat.most, *tail.bounds) if repeat else tail.bounds
            term = self.terms[item, tail] = _Term(item, tail, shape, bounds)
        return term

    def put_all(self, items: Sequence[_Item], tail: _Term) -> _Term:
        for item in reversed(items):
            tail = self.put(item, tail)
        return tail

    def expand(self, term: _Term) -> list[tuple[int, int, _Term]]:
        """Find the moves of a term and whether it accepts the empty text; return the moves."""
        if term.moves is None:
            term.moves, seen, number_of = [], {term}, self.number_of
            for here in (todo := [term]):
                spend(2 * SLOW)
                item, tail = here.item, here.tail
                if item is None or tail is None:
                    term.accepts = True
                    continue
                if isinstance(item, _Bytes):
                    for low, high, rest in item.edges:
                        after = tail if rest is None else self.put(rest, tail)
                        term.moves.append((number_of[low], number_of[high] + 1, after))
                    continue
                after = self.put(_Repeat(max(item.least - 1, 0), item.most - 1, item.group), tail)
                if item.group.nullable and after is not tail:
                    seen.add(after)  # matches less than this term
                reached = [] if item.least else [tail]
                reached += [self.put_all(items, after) for items in item.group.alternatives]
                todo += [each for each in dict.fromkeys(reached) if each not in seen]
                seen.update(reached)
        return term.moves

    def reduce(self, terms: frozenset[_Term]) -> frozenset[_Term]:
        """Return fewer terms that match the same: repeats are joined, and those inside others left out."""
        if len({term.shape for term in terms}) == len(terms):
            return terms
        spend(4 * SLOW * len(terms))
        same = dict[tuple[int, _Term | None], list[_Term]]()
        for term in terms:
            same.setdefault((term.shape, term.tail), []).append(term)
        by_shape = dict[int, list[_Term]]()
        for (shape, _), group in same.items():
            joined = by_shape.setdefault(shape, [])
            for term in sorted(group, key=lambda each: each.bounds):
                item, last = term.item, joined[-1].item if joined and joined[-1].tail is term.tail else None
                if isinstance(item, _Repeat) and isinstance(last, _Repeat) and item.least <= last.most + 1:
                    assert term.tail is not None
                    term = self.put(last._replace(most=max(last.most, item.most)), term.tail)
                    joined.pop()
                joined.append(term)
        kept = set[_Term]()
        for group in by_shape.values():
            spend(len(group) ** 2 * (SLOW + len(group[0].bounds)) if len(group) > 1 else 0)
            kept.update(
                term
                for term in group
                if not any(all(map(ge, term.bounds, other.bounds)) for other in group if other is not term)
            )
        return frozenset(kept)

    def determinize(self, items: list[_Item], optional_space: bool) -> Automaton:
        """Return the automaton whose automaton states are sets of terms, over classes of bytes."""
        class_of = torch.zeros(257, dtype=torch.long)
        class_of[sorted(self.bounds)] = 1
        class_of = class_of[:256].cumsum(0) - 1
        self.number_of = class_of.tolist()
        start, reduced = self.put_all(items, self.end), dict[frozenset[_Term], frozenset[_Term]]()

        def follow(terms: frozenset[_Term]) -> dict[int, frozenset[_Term]]:
            targets = dict[int, set[_Term]]()
            for term in terms:
                for first, last, target in self.expand(term):
                    spend(SLOW + SLOW // 4 * (last - first))
                    for number in range(first, last):
                        targets.setdefault(number, set()).add(target)
            row = {number: frozenset(targets[number]) for number in sorted(targets)}
            for number, reached in row.items():
                if reached not in reduced:
                    reduced[reached] = self.reduce(reached)
                row[number] = reduced[reached]
            return row

        spaced = [self.put(_Bytes([(0x20, 0x20, None)]), start)] if optional_space else []
        table, states = explore(frozenset([start, *spaced]), [frozenset()] * (self.number_of[-1] + 1), follow)
        accepting = torch.tensor([any(term.accepts for term in terms) for terms in states])
        return Automaton.of_classes(table, class_of, accepting).minimized()


def _characters(op: Any, argument: Any, flags: int) -> Array:
    """Return a mask of the characters that an item of a parsed expression matches."""
    spend(_EVERY // 8)
    chosen, categories = np.zeros((2, _EVERY), bool)
    items: list[Any] = argument if op is sre.IN else [(sre.LITERAL, 10 if op is sre.ANY else argument)]
    negated = op in (sre.NOT_LITERAL, sre.ANY) or items[0][0] is sre.NEGATE
    if op is sre.ANY and flags & re.DOTALL:
        items = []
    for kind, value in items:
        if kind is sre.CATEGORY:
            categories |= _category(value, bool(flags & re.ASCII) or (value in _ASCII and not negated))
        elif kind is not sre.NEGATE:
            low, high = value if kind is sre.RANGE else (value, value)
            chosen[low : high + 1] = True
    if flags & re.IGNORECASE:  # characters whose lower case is that of one of them, or one that `re` takes for the same
        spend(_EVERY)
        lower, wanted = _lower(bool(flags & re.ASCII)), np.zeros(_EVERY, bool)
        wanted[lower[chosen]] = True
        same = {} if flags & re.ASCII else _casefix._EXTRA_CASES
        wanted[[other for code in same if wanted[code] for other in same[code]]] = True
        chosen = (wanted | categories)[lower]
    chosen = (chosen | categories) ^ negated
    chosen[0xD800:0xE000] = False  # no UTF-8 text has surrogates
    return chosen


_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d+",
    sre.CATEGORY_NOT_DIGIT: r"\D+",
    sre.CATEGORY_SPACE: r"\s+",
    sre.CATEGORY_NOT_SPACE: r"\S+",
    sre.CATEGORY_WORD: r"\w+",
    sre.CATEGORY_NOT_WORD: r"\W+",
}
_ASCII = (sre.CATEGORY_DIGIT, sre.CATEGORY_WORD)


@cache
def _category(category: Any, ascii_only: bool) -> Array:
    """Return a mask of the characters of \\d, \\s, \\w or their opposites."""
    every = np.arange(_EVERY, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    mask = np.zeros(_EVERY, bool)
    for match in re.finditer(_CATEGORIES[category], every, re.ASCII if ascii_only else 0):
        mask[match.start() : match.end()] = True
    return mask


@cache
def _lower(ascii_only: bool) -> Array:
    """Return the lower case of every character, as `re` compares characters."""
    lower = _sre.ascii_tolower if ascii_only else _sre.unicode_tolower
    return np.array([lower(code) for code in range(_EVERY)])
