"""Regular expressions as automata over bytes: the syntax of Python's `re`, matched against a whole text in UTF-8.

What is not regular, or depends on what was tried before, is refused: lookaround, backreferences, atomic groups. `\\w`
and `\\d` match ASCII only, which makes automata a hundred times smaller; every text that is accepted matches in `re`.
"""

from __future__ import annotations

import _sre
import re
import sys
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from re import _casefix, _parser  # type: ignore[attr-defined]
from re import _constants as sre  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np
import torch

from hmmlm.constrain.automaton import LARGEST, Automaton
from hmmlm.errors import InputError

_LARGEST_NFA = 2**18  # states before determinization
_SURROGATES = (0xD800, 0xDFFF)  # no UTF-8 text has them
_REFUSED = {
    sre.ASSERT: "lookahead and lookbehind look at text outside the match",
    sre.ASSERT_NOT: "lookahead and lookbehind look at text outside the match",
    sre.GROUPREF: "a backreference is not regular",
    sre.GROUPREF_EXISTS: "a conditional group is not regular",
    sre.ATOMIC_GROUP: "an atomic group depends on the order of attempts",
    sre.POSSESSIVE_REPEAT: "a possessive repeat depends on the order of attempts",
}
Ranges = tuple[tuple[int, int], ...]
"""Disjoint ranges of characters, sorted, both ends included."""


@lru_cache(maxsize=64)
def regex_automaton(pattern: str, optional_space: bool = False) -> Automaton:
    """Return the automaton over bytes of texts that match `pattern` from beginning to end.

    With `optional_space`, one space may precede the match.
    """
    if not isinstance(pattern, str):
        raise InputError(f"regex: give a string, not {pattern!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that a later version of Python may read in another way
            parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise InputError(f"regex {_short(pattern)} is not a regular expression: {error}") from None
    network = _Network(pattern)
    start = network.add_state()
    try:
        end = network.build_sequence(list(parsed), parsed.state.flags, start, outermost=True)
    except RecursionError:
        raise InputError(f"regex {_short(pattern)} cannot be used: its groups are nested too deeply") from None
    if optional_space:
        before = network.add_state()
        network.epsilons[before].append(start)
        network.edges[before].append((0x20, 0x20, start))
        start = before
    return network.determinize(start, end).minimized()


class _Network:
    """A nondeterministic automaton over bytes (Thompson's construction)."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.epsilons: list[list[int]] = []
        self.edges: list[list[tuple[int, int, int]]] = []  # first byte, last byte, target

    def add_state(self) -> int:
        if len(self.edges) >= _LARGEST_NFA:
            self.refuse("it is too large: use smaller repeats")
        self.epsilons.append([])
        self.edges.append([])
        return len(self.edges) - 1

    def refuse(self, reason: str) -> None:
        raise InputError(f"regex {_short(self.pattern)} cannot be used: {reason}")

    def build_sequence(self, items: list[Any], flags: int, start: int, outermost: bool = False) -> int:
        """Add what matches `items` one after another, from the state `start`; return the state after it."""
        for place, (op, argument) in enumerate(items):
            if op is sre.AT:
                first, last = outermost and place == 0, outermost and place == len(items) - 1
                ends = (sre.AT_END, sre.AT_END_STRING)
                begins = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
                if not ((first and argument in begins) or (last and argument in ends)):
                    self.refuse("\\b and \\B, and ^ or $ inside the expression, look at text outside the match")
            else:
                start = self.build(op, argument, flags, start)
        return start

    def build(self, op: Any, argument: Any, flags: int, start: int) -> int:
        """Add what matches one item of a parsed expression from the state `start`; return the state after it."""
        if op in _REFUSED:
            self.refuse(_REFUSED[op])
        if op is sre.SUBPATTERN:
            _, added, removed, items = argument
            return self.build_sequence(list(items), (flags | added) & ~removed, start)
        if op is sre.BRANCH:
            end = self.add_state()
            for items in argument[1]:
                branch = self.add_state()
                self.epsilons[start].append(branch)
                self.epsilons[self.build_sequence(list(items), flags, branch)].append(end)
            return end
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, items = argument
            return self.build_repeat(least, None if most is sre.MAXREPEAT else most, list(items), flags, start)
        return self.build_characters(_characters(op, argument, flags), start)

    def build_repeat(self, least: int, most: int | None, items: list[Any], flags: int, start: int) -> int:
        start = self.build_copies(least, items, flags, start)
        if most is None:
            loop = self.add_state()
            self.epsilons[start].append(loop)
            self.epsilons[self.build_sequence(items, flags, loop)].append(loop)
            return loop
        end = self.add_state()
        self.epsilons[self.build_copies(most - least, items, flags, start, end)].append(end)
        return end

    def build_copies(self, count: int, items: list[Any], flags: int, start: int, end: int | None = None) -> int:
        """Add what matches `items` several times; `end` may follow instead of each copy."""
        for place in range(count):
            if end is not None:
                self.epsilons[start].append(end)
            before = len(self.edges)
            start = self.build_sequence(items, flags, start)
            size = len(self.edges) - before
            if not size:  # of the empty text: more copies are the same
                break
            if not place and before + size * count > _LARGEST_NFA:
                self.refuse("it is too large: use smaller repeats")
        return start

    def build_characters(self, ranges: Ranges, start: int) -> int:
        """Add what matches one character, as the bytes that encode it."""
        end = self.add_state()
        known: dict[tuple[ByteRanges, ...], int] = {((),): end}

        def state_of(rests: tuple[ByteRanges, ...]) -> int:
            if rests not in known:
                known[rests] = self.add_state()
                connect(known[rests], rests)
            return known[rests]

        def connect(state: int, sequences: Iterable[ByteRanges]) -> None:
            by_first: dict[tuple[int, int], list[ByteRanges]] = {}
            for first, *rest in sequences:
                by_first.setdefault(first, []).append(tuple(rest))
            for (low, high), rests in by_first.items():
                self.edges[state].append((low, high, state_of(tuple(rests))))

        connect(start, _utf8(ranges))
        return end

    def determinize(self, start: int, end: int) -> Automaton:
        """Return the automaton of sets of states (the subset construction), over classes of bytes."""
        bounds = sorted({0, *(b for edges in self.edges for low, high, _ in edges for b in (low, high + 1))} - {256})
        class_of = torch.zeros(256, dtype=torch.long)
        class_of[bounds] = 1
        class_of = class_of.cumsum(0) - 1
        numbers = class_of.tolist()
        moves: dict[int, dict[int, list[int]]] = {}
        closures: dict[int, frozenset[int]] = {}

        def closure(state: int) -> frozenset[int]:
            """Return the states with edges (and the end) that are reached without a byte."""
            if state not in closures:
                seen, todo = {state}, [state]
                while todo:
                    for following in self.epsilons[todo.pop()]:
                        if following not in seen:
                            seen.add(following)
                            todo.append(following)
                closures[state] = frozenset(s for s in seen if self.edges[s] or s == end)
            return closures[state]

        def moves_of(state: int) -> dict[int, list[int]]:
            if state not in moves:
                moves[state] = {}
                for low, high, target in self.edges[state]:
                    for number in range(numbers[low], numbers[high] + 1):
                        moves[state].setdefault(number, []).append(target)
            return moves[state]

        lost: frozenset[int] = frozenset()
        known = {closure(start): 0}
        rows: list[dict[int, int]] = []
        for current in (todo := list(known)):
            targets: dict[int, set[int]] = {}
            for state in current:
                for number, following in moves_of(state).items():
                    targets.setdefault(number, set()).update(*map(closure, following))
            row = {}
            for number, reached in targets.items():
                key = frozenset(reached)
                if key not in known:
                    if len(known) >= LARGEST:
                        self.refuse(f"it needs more than {LARGEST:,} automaton states: use smaller repeats")
                    known[key] = len(known)
                    todo.append(key)
                row[number] = known[key]
            rows.append(row)
        if lost not in known:
            known[lost] = len(known)
            rows.append({})
        table = torch.full((len(known), len(bounds)), known[lost])
        places = [(i, number, target) for i, row in enumerate(rows) for number, target in row.items()]
        if places:
            source, number, target = torch.tensor(places).t()
            table[source, number] = target
        return Automaton.of_classes(table, class_of, torch.tensor([end in key for key in known]))


ByteRanges = tuple[tuple[int, int], ...]
"""The first and last value of each byte of a sequence of bytes."""


@lru_cache(maxsize=256)
def _utf8(ranges: Ranges) -> tuple[ByteRanges, ...]:
    """Return the sequences of byte ranges that encode characters in `ranges`."""
    return tuple(sequence for low, high in ranges for sequence in _utf8_of_range(low, high))


def _utf8_of_range(low: int, high: int) -> Iterator[ByteRanges]:
    """Yield sequences of byte ranges for one range of characters: split until all bytes vary independently."""
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            yield from _utf8_of_range(low, limit)
            yield from _utf8_of_range(limit + 1, high)
            return
    if high > 0x7F:
        for bits in (6, 12, 18):
            mask = (1 << bits) - 1
            if low & ~mask != high & ~mask:
                if low & mask:
                    yield from _utf8_of_range(low, low | mask)
                    yield from _utf8_of_range((low | mask) + 1, high)
                    return
                if high & mask != mask:
                    yield from _utf8_of_range(low, (high & ~mask) - 1)
                    yield from _utf8_of_range(high & ~mask, high)
                    return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


def _characters(op: Any, argument: Any, flags: int) -> Ranges:
    """Return the characters that an item of a parsed expression matches."""
    if op is sre.ANY:
        return _without(() if flags & re.DOTALL else ((10, 10),))
    if op is sre.LITERAL:
        return _folded(((argument, argument),), flags)
    if op is sre.NOT_LITERAL:
        return _without(_folded(((argument, argument),), flags))
    if op is sre.IN:
        negated = argument[0][0] is sre.NEGATE
        found: list[tuple[int, int]] = []
        categories: list[tuple[int, int]] = []
        for kind, value in argument:
            if kind is sre.LITERAL:
                found.append((value, value))
            elif kind is sre.RANGE:
                found.append(value)
            elif kind is sre.CATEGORY:
                categories += _category(value, bool(flags & re.ASCII) or (value in _ASCII and not negated))
        ranges = _folded(tuple(found), flags, tuple(categories))
        return _without(ranges) if negated else ranges
    raise InputError(f"regex: {str(op).lower()} is not supported")


class _Category(NamedTuple):
    pattern: str
    negated: bool


_CATEGORIES = {
    sre.CATEGORY_DIGIT: _Category(r"\d+", False),
    sre.CATEGORY_NOT_DIGIT: _Category(r"\d+", True),
    sre.CATEGORY_SPACE: _Category(r"\s+", False),
    sre.CATEGORY_NOT_SPACE: _Category(r"\s+", True),
    sre.CATEGORY_WORD: _Category(r"\w+", False),
    sre.CATEGORY_NOT_WORD: _Category(r"\w+", True),
}
_ASCII = (sre.CATEGORY_DIGIT, sre.CATEGORY_WORD)


@lru_cache(maxsize=16)
def _category(category: Any, ascii_only: bool) -> Ranges:
    """Return the characters of \\d, \\s, \\w or their opposites."""
    pattern, negated = _CATEGORIES[category]
    codes = np.arange(128 if ascii_only else sys.maxunicode + 1, dtype="<u4")
    every = codes.tobytes().decode("utf-32-le", "surrogatepass")
    found = re.finditer(pattern, every, re.ASCII if ascii_only else 0)
    ranges = _joined((match.start(), match.end() - 1) for match in found)
    return _without(ranges) if negated else ranges


@cache
def _lower(ascii_only: bool) -> dict[int, int]:
    """Return the lower case of every character that has another one, as `re` compares characters."""
    lower = _sre.ascii_tolower if ascii_only else _sre.unicode_tolower
    return {code: lower(code) for code in range(128 if ascii_only else 0x20000) if lower(code) != code}


@lru_cache(maxsize=1024)
def _folded(found: tuple[tuple[int, int], ...], flags: int, categories: tuple[tuple[int, int], ...] = ()) -> Ranges:
    """Return sorted disjoint ranges of characters; with the flag IGNORECASE, of those that match one of them in `re`.

    Such a character has the lower case of a character of the ranges, or a lower case that `re` takes for the same (ſ
    and s), or one in the `categories`.
    """
    ranges = _joined(found)
    if not flags & re.IGNORECASE:
        return _joined([*ranges, *categories])
    only_ascii = bool(flags & re.ASCII)
    lower, same = _lower(only_ascii), {} if only_ascii else _casefix._EXTRA_CASES
    lowered = _changed(ranges, set(lower), {lower[code] for code in lower if _has(ranges, code)})
    others = {other for code in same if _has(lowered, code) for other in same[code]}
    wanted = _joined([*_changed(lowered, set(), others), *categories])
    return _changed(wanted, set(lower), {code for code in lower if _has(wanted, lower[code])})


def _has(ranges: Ranges, code: int) -> bool:
    place = bisect_right(ranges, (code, sys.maxunicode)) - 1
    return place >= 0 and code <= ranges[place][1]


def _changed(ranges: Ranges, removed: set[int], added: set[int]) -> Ranges:
    """Return ranges without the characters `removed`, then with those `added`."""
    kept = _without(_joined([*_without(ranges), *((code, code) for code in removed)]))
    return _joined([*kept, *((code, code) for code in added)])


def _joined(found: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted disjoint ranges without surrogates."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(found):
        for first, last in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if first > last:
                continue
            if result and first <= result[-1][1] + 1:
                result[-1] = (result[-1][0], max(last, result[-1][1]))
            else:
                result.append((first, last))
    return tuple(result)


def _without(ranges: Ranges) -> Ranges:
    """Return all characters outside `ranges`."""
    result, first = [], 0
    for low, high in ranges:
        result.append((first, low - 1))
        first = high + 1
    return _joined((a, b) for a, b in [*result, (first, sys.maxunicode)] if a <= b)


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "…")
