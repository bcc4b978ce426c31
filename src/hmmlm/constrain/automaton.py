"""Deterministic finite automata over tokens: the sequences that a constraint accepts.

Tokens with the same transitions from every automaton state form one class, so an automaton is a small table over
classes and the class of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments, describe
from hmmlm.checks import check_count
from hmmlm.errors import InputError
from hmmlm.ops.pieces import at_once

LARGEST = 2**14  # automaton states of a product
LARGEST_TABLE = 2**28  # automaton states × classes of a product
_CELLS = 2**22  # pairs that are expanded together


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
        automaton._set(by_class.int(), class_of, accepting)
        return automaton

    def _set(self, by_class: Tensor, class_of: Tensor, accepting: Tensor) -> None:
        self.by_class, merged = _merge_columns(by_class)
        self.class_of, self.accepting = merged[class_of], accepting

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
        codes = torch.arange(self.num_states)[:, None] * self.num_states + self.by_class
        distinct, of_cell = codes.unique(return_inverse=True)
        return Edges(distinct // self.num_states, distinct % self.num_states, of_cell)

    def hopeful(self) -> Tensor:
        """Return a mask [S], True where some continuation is accepted."""
        return self._to(self.accepting) < self.num_states

    def _to(self, wanted: Tensor) -> Tensor:
        """Return the least number of tokens [S] that lead to one of the automaton states `wanted` [S]; S if none do."""
        return _distances(wanted, self.edges.target, self.edges.source)

    def _longest(self) -> Tensor:
        """Return the largest number of tokens [S] of an accepted continuation; S if it has no limit, −1 if none is."""
        hopeful = self.hopeful()
        inside = hopeful[self.edges.source] & hopeful[self.edges.target]
        source, target = self.edges.source[inside], self.edges.target[inside]
        into, first = _grouped(target, source, self.num_states)
        open_edges = torch.bincount(source, minlength=self.num_states).numpy()
        found, length = torch.where(hopeful, self.num_states, -1).numpy(), 0
        frontier = (hopeful.numpy() & (open_edges == 0)).nonzero()[0]
        while len(frontier):
            found[frontier] = length
            length += 1
            before = into[_places(first, frontier)]
            np.subtract.at(open_edges, before, 1)
            before = np.unique(before)
            frontier = before[open_edges[before] == 0]
        return torch.from_numpy(found)

    def settled(self) -> Tensor:
        """Return a mask [S], True where every continuation is accepted."""
        return ~(~self).hopeful()

    def complement(self) -> Automaton:
        """Return the automaton that accepts all other sequences; also written ~automaton."""
        return Automaton.of_classes(self.by_class, self.class_of, ~self.accepting)

    __invert__ = complement

    @check_arguments
    def __and__(self, other: Automaton) -> Automaton:
        """Return the intersection; its automaton states are the reachable pairs, with all hopeless pairs merged."""
        if self.vocab_size != other.vocab_size:
            raise InputError(
                f"automata over {self.vocab_size} and {other.vocab_size} words cannot be combined: use one vocabulary"
            )
        codes, class_of = (self.class_of * other.classes + other.class_of).unique(return_inverse=True)
        left, right = self.by_class[:, codes // other.classes], other.by_class[:, codes % other.classes]
        ours, theirs = self.hopeful(), other.hopeful()
        lost = -1
        start = 0 if bool(ours[0] & theirs[0]) else lost
        numbers = {start: 0}  # by pair, coded as one integer
        rows: list[Tensor] = []
        todo, done = [start], 0
        while done < len(todo):
            pairs = torch.tensor(todo[done : done + at_once(len(codes), _CELLS)])
            done += len(pairs)
            here, there = left[pairs // other.num_states], right[pairs % other.num_states]
            following = torch.where(ours[here] & theirs[there], here.long() * other.num_states + there, lost)
            following[pairs == lost] = lost
            distinct, which = following.unique(return_inverse=True)
            for code in distinct.tolist():
                if code not in numbers:
                    numbers[code] = len(numbers)
                    todo.append(code)
            if len(numbers) > LARGEST or len(numbers) * len(codes) > LARGEST_TABLE:
                most = min(LARGEST, len(numbers) - 1)
                raise InputError(f"the constraint needs more than {most:,} automaton states: simplify it")
            rows.append(torch.tensor([numbers[code] for code in distinct.tolist()], dtype=torch.int32)[which])
        reached = torch.tensor(todo)
        accepting = self.accepting[reached // other.num_states] & other.accepting[reached % other.num_states]
        return Automaton.of_classes(torch.cat(rows), class_of, accepting & (reached != lost))

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

    def minimized(self) -> Automaton:
        """Return the automaton with the fewest automaton states that accepts the same sequences."""
        start = torch.arange(self.num_states) == 0
        reached = _distances(start, self.edges.source, self.edges.target) < self.num_states
        # Automaton states that count something are told apart at once; refining would take a round for each.
        facts = torch.stack([self._to(self.accepting), self._to(~self.accepting), self._longest()])
        block = _merge_columns(facts)[1]
        blocks = 0
        while True:  # refine the blocks until automaton states of a block lead to the same blocks (Moore)
            table = torch.cat([block[None], block[self.by_class.long()].t()])[:, reached]
            signatures, which = _merge_columns(table)
            block[reached] = which
            if signatures.shape[1] == blocks:
                break
            blocks = signatures.shape[1]
        first = torch.zeros(blocks, dtype=torch.long).scatter_(0, block[reached], reached.nonzero()[:, 0])
        return Automaton.of_classes(block[self.by_class[first].long()], self.class_of, self.accepting[first])


def anything(vocab_size: int) -> Automaton:
    """Return the automaton that accepts every sequence."""
    return Automaton(torch.zeros(1, vocab_size, dtype=torch.long), torch.ones(1, dtype=torch.bool))


def containing(phrase: Sequence[int], vocab_size: int) -> Automaton:
    """Return the automaton of sequences that contain the tokens of `phrase` in a row (Knuth, Morris and Pratt)."""
    if not len(phrase):
        raise InputError("a phrase needs at least one token")
    check_words(phrase, vocab_size)
    own = sorted(set(phrase))
    class_of = torch.full((vocab_size,), len(own))
    class_of[own] = torch.arange(len(own))
    length = len(phrase)
    rows = torch.zeros(length + 1, len(own) + 1, dtype=torch.long)
    border = 0  # the automaton state after the phrase without its first token
    for place, token in enumerate(class_of[list(phrase)].tolist()):
        rows[place] = rows[border]
        rows[place, token] = place + 1
        if place:
            border = int(rows[border, token])
    rows[length] = length
    return Automaton.of_classes(rows, class_of, torch.arange(length + 1) == length)


def at_least(count: int, vocab_size: int) -> Automaton:
    """Return the automaton of sequences of at least `count` tokens."""
    following = (torch.arange(count + 1) + 1).clamp(max=count)
    return Automaton.of_classes(
        following[:, None], torch.zeros(vocab_size, dtype=torch.long), torch.arange(count + 1) == count
    )


def _distances(begins: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return the number of edges [S] from one of the automaton states `begins` [S] to each; S if none lead there."""
    count = len(begins)
    targets, first = _grouped(source, target, count)
    frontier, found, distance = begins.nonzero()[:, 0].numpy(), np.full(count, count), 0
    found[frontier] = 0
    while len(frontier):
        distance += 1
        reached = targets[_places(first, frontier)]
        frontier = np.unique(reached[found[reached] == count])
        found[frontier] = distance
    return torch.from_numpy(found)


def _grouped(source: Tensor, target: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets in the order of their sources, and where those of each source begin [count + 1]."""
    order = source.argsort()
    return target[order].numpy(), torch.searchsorted(source[order], torch.arange(count + 1)).numpy()


def _places(first: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the places of all edges of the `chosen` sources."""
    sizes = first[chosen + 1] - first[chosen]
    return np.repeat(first[chosen] - sizes.cumsum() + sizes, sizes) + np.arange(sizes.sum())


def _merge_columns(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct columns of a table [S, n], in the order of their first place, and the number of each [n]."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.zeros(table.shape[1], dtype=torch.long)
    for rows in table.split(at_once(table.shape[1], _CELLS)):
        factors = torch.randint(-(2**62), 2**62, (len(rows), 1), generator=generator)
        keys += (rows * (2 * factors + 1)).sum(0)  # modulo 2⁶⁴
    merged, which = _first_places(table, keys.unique(return_inverse=True)[1])
    if not all(torch.equal(m[:, which], t) for m, t in zip(merged.split(64), table.split(64), strict=True)):
        return _first_places(table, table.unique(dim=1, return_inverse=True)[1])  # two columns had one key
    return merged, which


def _first_places(table: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column of each number in `which` [n], and `which` renumbered by the order of these columns."""
    columns = torch.arange(len(which))
    first = torch.full((int(which.max()) + 1,), len(which)).scatter_reduce(0, which, columns, "amin")
    first, order = first.sort()
    return table[:, first], order.argsort()[which]


def check_words(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise an InputError unless all tokens are words of the vocabulary."""
    words = range(vocab_size)
    for token in tokens:
        if token not in words:
            raise InputError(f"token {describe(token)} is outside the vocabulary (0 to {vocab_size - 1})")
