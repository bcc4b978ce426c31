"""Deterministic finite automata over tokens: the sequences that a constraint accepts.

Tokens with the same transitions from every automaton state form one class, so an automaton is a small table over
classes and the class of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property, reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hmmlm.arguments import check_arguments, describe
from hmmlm.checks import check_count
from hmmlm.constrain.budget import SLOW, construction, spend
from hmmlm.errors import InputError
from hmmlm.ops.pieces import at_once

_CELLS = 2**24  # of a table that are expanded together
Array = NDArray[Any]
State = TypeVar("State", bound=Hashable)


class Edges(NamedTuple):
    """The pairs of automaton states with a transition, by source, then target."""

    source: Tensor  # [E]
    target: Tensor  # [E]
    of_cell: Tensor  # [S, C] the edge of each transition


class Automaton:
    """A finite automaton with S automaton states, which starts in 0.

    `next` [S, V] is the automaton state after each token; `accepting` [S] is True where a sequence may end. Automata
    over the same tokens are combined with & (both), | (either) and ~ (not). All tensors stay on the CPU; `Guide` copies
    what it needs to the device of its model.
    """

    by_class: Tensor  # [S, C] the automaton state after a token of each class
    class_of: Tensor  # [V]
    accepting: Tensor  # [S]

    @check_arguments
    def __init__(self, next: Tensor, accepting: Tensor) -> None:
        whole = not (next.dtype.is_floating_point or next.dtype.is_complex or next.dtype == torch.bool)
        if next.dim() != 2 or not whole or accepting.shape != next.shape[:1]:
            raise InputError(
                f"an automaton needs integers next [states, words] and accepting [states], not {list(next.shape)} of "
                f"{str(next.dtype).removeprefix('torch.')} and {list(accepting.shape)}"
            )
        if not next.numel() or bool((next < 0).any()) or bool((next >= next.shape[0]).any()):
            raise InputError(f"next must contain automaton states from 0 to {next.shape[0] - 1}")
        self._set(next.cpu().int(), torch.arange(next.shape[1]), accepting.cpu().bool())

    @classmethod
    def of_classes(cls, by_class: Tensor, class_of: Tensor, accepting: Tensor) -> Automaton:
        """Return the automaton of a table over classes of tokens [S, C], which may repeat, and class_of [V]."""
        automaton = cls.__new__(cls)
        automaton._set(by_class, class_of, accepting)
        return automaton

    def _set(self, by_class: Tensor, class_of: Tensor, accepting: Tensor) -> None:
        spend(2 * by_class.numel() + SLOW // 2 * by_class.shape[1])
        columns, merged = distinct_rows(np.ascontiguousarray(by_class.int().numpy().T))
        self.by_class = torch.from_numpy(np.ascontiguousarray(columns.T))
        self.class_of, self.accepting = torch.from_numpy(merged)[class_of], accepting

    def __repr__(self) -> str:
        return f"Automaton(num_states={self.num_states}, vocab_size={self.vocab_size})"

    @property
    def next(self) -> Tensor:
        return self.by_class[:, self.class_of].long()

    @property
    def num_states(self) -> int:
        return self.by_class.shape[0]

    @property
    def classes(self) -> int:
        return self.by_class.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.class_of.shape[0]

    @check_arguments
    def read(self, tokens: Sequence[int], state: int = 0) -> int:
        """Return the automaton state after `tokens`."""
        check_count("state", state, 0, self.num_states - 1)
        check_words(tokens, self.vocab_size)
        for token in tokens:
            state = self.step(state, token)
        return state

    def step(self, state: int, token: int) -> int:
        """Return the automaton state after one token; arguments are not checked."""
        by_class, class_of = self._arrays
        return by_class.item(state, class_of.item(token))

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.by_class.numpy(), self.class_of.numpy()  # reading a number from them is ten times faster

    @check_arguments
    def accepts(self, tokens: Sequence[int]) -> bool:
        return bool(self.accepting[self.read(tokens)])

    @cached_property
    def edges(self) -> Edges:
        """Return the pairs of automaton states with a transition."""
        states, table = self.num_states, self.by_class.numpy()
        spend(8 * table.size)
        codes, of_cell = distinct_numbers((np.arange(states)[:, None] * states + table).ravel(), states**2)
        source, target = map(torch.from_numpy, np.divmod(codes, states))
        return Edges(source, target, torch.from_numpy(of_cell).view(table.shape))

    def hopeful(self) -> Tensor:
        """Return a mask [S], True where some continuation is accepted."""
        return self._to(self.accepting) < self.num_states

    def _to(self, wanted: Tensor) -> Tensor:
        """Return the least number of tokens [S] that lead to one of the automaton states `wanted` [S]; S if none do."""
        return _distances(wanted, *self._into)

    @cached_property
    def _into(self) -> tuple[Array, Array]:
        """The sources of the edges, by target, and where those of each target begin [S + 1]."""
        return _grouped(self.edges.target, self.edges.source, self.num_states)

    def _longest(self) -> Tensor:
        """Return the largest number of tokens [S] of an accepted continuation; S if it has no limit, −1 if none is."""
        hopeful = self.hopeful()
        into, first = self._into
        inside = self.edges.source[hopeful[self.edges.target]]
        open_edges = torch.bincount(inside, minlength=self.num_states).numpy()
        found, length = torch.where(hopeful, self.num_states, -1).numpy(), 0
        frontier = (hopeful.numpy() & (open_edges == 0)).nonzero()[0]
        while len(frontier):
            found[frontier] = length
            length += 1
            before = into[_places(first, frontier)]
            spend(8 * SLOW + 8 * len(before))
            np.subtract.at(open_edges, before, 1)
            before = np.unique(before)
            frontier = before[open_edges[before] == 0]
        return torch.from_numpy(found)

    def settled(self) -> Tensor:
        """Return a mask [S], True where every continuation is accepted."""
        return self._to(~self.accepting) == self.num_states

    def complement(self) -> Automaton:
        """Return the automaton that accepts all other sequences; also written ~automaton."""
        automaton = copy(self)
        automaton.accepting = ~self.accepting
        return automaton

    __invert__ = complement

    @construction()
    @check_arguments
    def __and__(self, other: Automaton) -> Automaton:
        """Return the intersection; its automaton states are the reachable pairs, with all hopeless pairs merged."""
        if self.vocab_size != other.vocab_size:
            raise InputError(
                f"automata over {self.vocab_size} and {other.vocab_size} words cannot be combined: use one vocabulary"
            )
        pairs, class_of = (self.class_of * other.classes + other.class_of).unique(return_inverse=True)
        classes, theirs, lost = len(pairs), other.num_states, -1
        spend((self.num_states + theirs) * classes)
        # A pair is coded as one integer; the sum of two codes is negative if one of them is hopeless.
        left, right = (
            np.where(automaton.hopeful()[table].numpy(), table.numpy().astype(np.int64) * factor, -(2**62))
            for automaton, table, factor in (
                (self, self.by_class[:, pairs // other.classes], theirs),
                (other, other.by_class[:, pairs % other.classes], 1),
            )
        )
        start = 0 if bool(self.hopeful()[0] & other.hopeful()[0]) else lost
        numbers, todo, rows, done = {start: 0}, [start], list[Array](), 0
        while done < len(todo):
            codes = np.array(todo[done : done + at_once(classes, _CELLS)])
            done += len(codes)
            spend(16 * SLOW + len(codes) * 4 * classes)
            following = np.maximum(left[codes // theirs] + right[codes % theirs], lost)
            following[codes == lost] = lost
            distinct, which = distinct_numbers(following.ravel() + 1, self.num_states * theirs + 1)
            reached = (distinct - 1).tolist()
            for code in reached:
                if code not in numbers:
                    numbers[code] = len(numbers)
                    todo.append(code)
            spend(SLOW * len(reached))
            rows.append(np.array([numbers[code] for code in reached], np.int32)[which].reshape(-1, classes))
        last = torch.tensor(todo)
        accepting = self.accepting[last // theirs] & other.accepting[last % theirs] & (last != lost)
        return Automaton.of_classes(torch.from_numpy(np.concatenate(rows)), class_of, accepting)

    @check_arguments
    def __or__(self, other: Automaton) -> Automaton:
        """Return the union."""
        return ~(~self & ~other)

    @check_arguments
    def until(self, end: int, require_eos: bool = True) -> Automaton:
        """Return the automaton of a sequence that this one accepts and that has no `end`, then `end`, then anything.

        With require_eos=False, the sequence is also accepted without `end`. Keeps the numbers of automaton states.
        """
        check_words([end], self.vocab_size)
        done, lost = self.num_states, self.num_states + 1
        rows = torch.cat([self.by_class, torch.tensor([[done], [lost]]).expand(-1, self.classes)])
        after = torch.cat([torch.where(self.accepting, done, lost), torch.tensor([done, lost])])
        before = self.accepting & (not require_eos)
        return self._with_column([end], rows, after, torch.cat([before, torch.tensor([True, False])]))

    @check_arguments
    def without(self, token: int, *others: int) -> Automaton:
        """Forbid tokens; keeps the numbers of automaton states and adds a hopeless one."""
        tokens = [token, *others]
        check_words(tokens, self.vocab_size)
        lost = torch.full((self.num_states + 1,), self.num_states)
        rows = torch.cat([self.by_class, lost[:1].expand(1, self.classes)])
        return self._with_column(tokens, rows, lost, torch.cat([self.accepting, torch.tensor([False])]))

    def _with_column(self, tokens: Sequence[int], rows: Tensor, after: Tensor, accepting: Tensor) -> Automaton:
        """Return the automaton with the table `rows` over classes and the automaton states `after` some tokens."""
        class_of = self.class_of.clone()
        class_of[list(tokens)] = self.classes
        return Automaton.of_classes(torch.cat([rows, after[:, None]], 1), class_of, accepting)

    @check_arguments
    def starting_at(self, state: int) -> Automaton:
        """Return the automaton that starts in `state`: the automaton states 0 and `state` are exchanged."""
        check_count("state", state, 0, self.num_states - 1)
        order = torch.arange(self.num_states)
        order[0], order[state] = state, 0  # its own inverse
        return Automaton.of_classes(order[self.by_class[order].long()], self.class_of, self.accepting[order])

    @construction()
    def minimized(self) -> Automaton:
        """Return the automaton with the fewest automaton states that accepts the same sequences."""
        start = torch.arange(self.num_states) == 0
        grouped = _grouped(self.edges.source, self.edges.target, self.num_states)
        reached = _distances(start, *grouped) < self.num_states
        table = (reached.cumsum(0) - 1)[self.by_class[reached].long()].int().numpy()
        # Automaton states that count something are told apart at once; refining would take a round for each.
        facts = torch.stack([self._to(self.accepting), self._to(~self.accepting), self._longest()], 1)
        rows, block = distinct_rows(facts[reached].int().numpy())
        blocks = 0
        while blocks < len(rows):  # refine them until automaton states of a block lead to the same blocks (Moore)
            blocks = len(rows)
            spend(2 * table.size + SLOW // 2 * len(table))
            rows, block = distinct_rows(np.column_stack([block, block[table]]).astype(np.int32))
        accepting = torch.zeros(blocks, dtype=torch.bool)
        accepting[block] = self.accepting[reached]
        return Automaton.of_classes(torch.from_numpy(rows[:, 1:]), self.class_of, accepting)


def anything(vocab_size: int) -> Automaton:
    """Return the automaton that accepts every sequence."""
    return Automaton.of_classes(torch.zeros(1, 1), torch.zeros(vocab_size, dtype=torch.long), torch.tensor([True]))


def containing(phrase: Sequence[int], vocab_size: int, *others: Sequence[int]) -> Automaton:
    """Return the automaton of sequences that contain the tokens of a phrase in a row, or those of one of others."""
    phrases = [phrase, *others]
    if not all(map(len, phrases)):
        raise InputError("a phrase needs at least one token")
    own = sorted({token for each in phrases for token in each})
    check_words(own, vocab_size)
    class_of = torch.full((vocab_size,), len(own))
    class_of[own] = torch.arange(len(own))
    found = ([[(kind,)] for kind in class_of[list(each)].tolist()] for each in phrases)
    return finding(((each, False, False) for each in found), [False] * (len(own) + 1), class_of)


Spelled = Sequence[Sequence[Sequence[int]]]
"""A phrase: for each of its characters (or tokens), the alternatives, symbols in a row each."""


def finding(phrases: Iterable[tuple[Spelled, bool, bool]], outside: Sequence[bool], class_of: Tensor) -> Automaton:
    """Return the automaton of texts that contain one of some phrases (Aho and Corasick).

    Args:
        phrases: with whether they must start after a symbol outside words, and end before one.
        outside: of each of K symbols, whether it is outside words.
        class_of: the symbol of each token.
    """
    # A trie with two roots, of phrases that start anywhere or outside words; node 2 is after all that a phrase needs.
    following: list[dict[int, int]] = [{}, {}, {}]
    waiting, done, found = set[int](), {2}, frozenset([2])  # nodes after phrases
    ends = {symbol: 2 for symbol, out in enumerate(outside) if out}

    def extend(node: int, symbol: int) -> int:
        after = following[node].setdefault(symbol, len(following))
        if after == len(following):
            following.append({})
        return after

    for phrase, left, right in phrases:
        node = int(left)
        for first, *others in phrase:
            spend(SLOW)
            after = reduce(extend, first, node)
            for *symbols, last in others:
                following[reduce(extend, symbols, node)][last] = after
            node = after
        (waiting if right else done).add(node)
        following[node] |= ends if right else {}

    begun = ({0, int(out), following[0].get(symbol, 0)} for symbol, out in enumerate(outside))
    usual = [frozenset(each) if done.isdisjoint(each) else found for each in begun]  # after each symbol

    def follow(nodes: frozenset[int]) -> dict[int, frozenset[int]]:
        """Return the nodes of all phrases that may have begun, after each symbol that continues one."""
        if nodes == found:
            return dict.fromkeys(range(len(outside)), found)
        reached = dict[int, set[int]]()
        for node in nodes - {0}:
            for symbol, after in following[node].items():
                reached.setdefault(symbol, {*usual[symbol]}).add(after)
        return {symbol: frozenset(each) if done.isdisjoint(each) else found for symbol, each in reached.items()}

    table, states = explore(frozenset([0, 1]), usual, follow)
    accepting = torch.tensor([not (waiting | done).isdisjoint(nodes) for nodes in states])
    return Automaton.of_classes(table, class_of, accepting).minimized()


def explore(
    start: State, usual: Sequence[State], follow: Callable[[State], Mapping[int, State]]
) -> tuple[Tensor, list[State]]:
    """Return the table [S, C] of the automaton states that are reached from `start`, and these.

    Args:
        usual: the automaton state after each class.
        follow: returns the automaton states after the classes for which it is another.
    """
    states = list(dict.fromkeys([start, *usual]))
    numbers, cells = {state: number for number, state in enumerate(states)}, list[tuple[int, int, int]]()
    for source, state in enumerate(states):
        row = follow(state)
        spend(SLOW * (3 + len(row)) + len(usual))
        for kind, reached in row.items():
            target = numbers.setdefault(reached, len(states))
            if target == len(states):
                states.append(reached)
            cells.append((source, kind, target))
    table = torch.tensor([numbers[state] for state in usual], dtype=torch.int32).repeat(len(states), 1)
    if cells:
        sources, kinds, targets = torch.tensor(cells).t()
        table[sources, kinds] = targets.int()
    return table, states


def at_least(count: int, vocab_size: int) -> Automaton:
    """Return the automaton of sequences of at least `count` tokens."""
    following = (torch.arange(count + 1) + 1).clamp(max=count)
    return Automaton.of_classes(
        following[:, None], torch.zeros(vocab_size, dtype=torch.long), torch.arange(count + 1) == count
    )


def _distances(begins: Tensor, targets: Array, first: Array) -> Tensor:
    """Return the number of edges [S] from one of the automaton states `begins` [S] to each; S if none lead there.

    Args:
        targets: of `_grouped`, as is `first`.
    """
    count = len(begins)
    frontier, found, distance = begins.nonzero()[:, 0].numpy(), np.full(count, count), 0
    found[frontier] = 0
    while len(frontier):
        distance += 1
        reached = targets[_places(first, frontier)]
        spend(8 * SLOW + 4 * len(reached))
        frontier = np.unique(reached[found[reached] == count])
        found[frontier] = distance
    return torch.from_numpy(found)


def _grouped(source: Tensor, target: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets in the order of their sources, and where those of each source begin [count + 1]."""
    spend(8 * len(source))
    order = source.argsort()
    return target[order].numpy(), torch.searchsorted(source[order], torch.arange(count + 1)).numpy()


def _places(first: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the places of all edges of the `chosen` sources."""
    sizes = first[chosen + 1] - first[chosen]
    return np.repeat(first[chosen] - sizes.cumsum() + sizes, sizes) + np.arange(sizes.sum())


def distinct_rows(rows: Iterable[Array]) -> tuple[Array, Array]:
    """Return the distinct of some rows of int32, by their first place, and the number of each row [n] among them."""
    numbers, which = dict[bytes, int](), list[int]()
    for row in rows:
        which.append(numbers.setdefault(row.tobytes(), len(numbers)))
    return np.frombuffer(bytearray().join(numbers), np.int32).reshape(len(numbers), -1), np.array(which)


def distinct_numbers(numbers: Array, most: int) -> tuple[Array, Array]:
    """Return the distinct numbers, sorted, of some below `most`, and the place of each number [n] among them."""
    if most > min(64 * len(numbers), _CELLS):
        return np.unique(numbers, return_inverse=True)
    found = np.zeros(most, bool)
    found[numbers] = True
    distinct = found.nonzero()[0]
    place = np.empty(most, np.int64)
    place[distinct] = np.arange(len(distinct))
    return distinct, place[numbers]


def check_words(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise an InputError unless all tokens are words of the vocabulary."""
    words = range(vocab_size)
    for token in tokens:
        if token not in words:
            raise InputError(f"token {describe(token)} is outside the vocabulary (0 to {vocab_size - 1})")
