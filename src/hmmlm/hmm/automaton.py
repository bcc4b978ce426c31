"""Deterministic finite automata over tokens: the sequences that a constraint accepts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmmlm.errors import InputError

LARGEST = 4096  # automaton states of a product: the rows of its table, which has a column per word


class Automaton:
    """A finite automaton with S automaton states, which starts in 0.

    `next` [S, V] is the automaton state after each token; `accepting` [S] is True where a sequence may end. Both stay
    on the CPU; `Guide` copies what it needs to the device of its model.
    """

    def __init__(self, next: Tensor, accepting: Tensor) -> None:
        whole = not (next.dtype.is_floating_point or next.dtype.is_complex or next.dtype == torch.bool)
        if next.dim() != 2 or not whole or accepting.shape != next.shape[:1]:
            raise InputError(
                f"an automaton needs integers next [states, words] and accepting [states], not {list(next.shape)} of "
                f"{str(next.dtype).removeprefix('torch.')} and {list(accepting.shape)}"
            )
        self.next, self.accepting = next.cpu().long(), accepting.cpu().bool()
        if not self.next.numel() or bool((self.next < 0).any()) or bool((self.next >= next.shape[0]).any()):
            raise InputError(f"next must contain automaton states from 0 to {next.shape[0] - 1}")

    def __repr__(self) -> str:
        return f"Automaton(states={self.states}, vocab_size={self.vocab_size})"

    @property
    def states(self) -> int:
        return self.next.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.next.shape[1]

    def read(self, tokens: Sequence[int], state: int = 0) -> int:
        """Return the automaton state after `tokens`."""
        _check(tokens, self.vocab_size)
        for token in tokens:
            state = int(self.next[state, token])
        return state

    def accepts(self, tokens: Sequence[int]) -> bool:
        return bool(self.accepting[self.read(tokens)])

    def hopeful(self) -> Tensor:
        """Return a mask [S], True where some continuation is accepted."""
        hopeful = self.accepting
        while True:
            more = hopeful | hopeful[self.next].any(1)
            if bool((more == hopeful).all()):
                return hopeful
            hopeful = more

    def settled(self) -> Tensor:
        """Return a mask [S], True where every continuation is accepted, because the automaton state never changes."""
        return self.accepting & (self.next == torch.arange(self.states)[:, None]).all(1)

    def complement(self) -> Automaton:
        """Return the automaton that accepts all other sequences."""
        return Automaton(self.next, ~self.accepting)

    def __and__(self, other: Automaton) -> Automaton:
        """Return the intersection; its automaton states are the reachable pairs, with all hopeless pairs merged."""
        if self.vocab_size != other.vocab_size:
            raise InputError(
                f"automata over {self.vocab_size} and {other.vocab_size} words cannot be combined: use one vocabulary"
            )
        ours, theirs = self.hopeful(), other.hopeful()
        lost = -1
        start = 0 if bool(ours[0] & theirs[0]) else lost
        numbers = {start: 0}  # by pair, coded as one integer
        rows: list[Tensor] = []
        for pair in (todo := [start]):  # grows during the iteration
            if pair == lost:
                rows.append(torch.full((self.vocab_size,), numbers[lost]))
                continue
            here, there = self.next[pair // other.states], other.next[pair % other.states]
            following = torch.where(ours[here] & theirs[there], here * other.states + there, lost)
            distinct, which = following.unique(return_inverse=True)
            for code in distinct.tolist():
                if code not in numbers:
                    numbers[code] = len(numbers)
                    todo.append(code)
            if len(numbers) > LARGEST:
                raise InputError(f"the constraint needs more than {LARGEST} automaton states: use fewer phrases")
            rows.append(torch.tensor([numbers[code] for code in distinct.tolist()])[which])
        accepting = [
            pair != lost and bool(self.accepting[pair // other.states] & other.accepting[pair % other.states])
            for pair in todo
        ]
        return Automaton(torch.stack(rows), torch.tensor(accepting))

    def __or__(self, other: Automaton) -> Automaton:
        """Return the union."""
        return (self.complement() & other.complement()).complement()

    def until(self, end: int, ended: bool = True) -> Automaton:
        """Return the automaton of a sequence that this one accepts and that has no `end`, then `end`, then anything.

        With ended=False, the sequence is also accepted without `end`.
        """
        done, lost = self.states, self.states + 1
        rows = torch.cat([self.next, torch.tensor([[done], [lost]]).expand(-1, self.vocab_size)])
        rows[: self.states, end] = torch.where(self.accepting, done, lost)
        before = self.accepting & (not ended)
        return Automaton(rows, torch.cat([before, torch.tensor([True, False])]))

    def without(self, token: int) -> Automaton:
        """Forbid `token` until every continuation is accepted; keeps automaton states and adds a hopeless one."""
        lost = torch.full((1, self.vocab_size), self.states)
        rows = torch.cat([self.next, lost])
        rows[: self.states, token] = torch.where(self.settled(), rows[: self.states, token], self.states)
        return Automaton(rows, torch.cat([self.accepting, torch.tensor([False])]))


def anything(vocab_size: int) -> Automaton:
    """Return the automaton that accepts every sequence."""
    return Automaton(torch.zeros(1, vocab_size, dtype=torch.long), torch.ones(1, dtype=torch.bool))


def containing(phrase: Sequence[int], vocab_size: int) -> Automaton:
    """Return the automaton of sequences that contain the tokens of `phrase` in a row (Knuth, Morris and Pratt)."""
    if not len(phrase):
        raise InputError("a phrase needs at least one token")
    _check(phrase, vocab_size)
    length = len(phrase)
    rows = torch.zeros(length + 1, vocab_size, dtype=torch.long)
    border = 0  # the automaton state after the phrase without its first token
    for place, token in enumerate(phrase):
        rows[place] = rows[border]
        rows[place, token] = place + 1
        if place:
            border = int(rows[border, token])
    rows[length] = length
    return Automaton(rows, torch.arange(length + 1) == length)


def spelling(phrase: str, pieces: Sequence[str]) -> Automaton:
    """Return the automaton of texts that contain `phrase` as whole words, however it is tokenized.

    It reads characters: pieces[v] is the text of token v. If the phrase starts (ends) with a letter, digit or
    underscore, no such character may precede (follow) it.
    """
    if not phrase:
        raise InputError("a phrase needs at least one character")
    own = sorted(set(phrase))
    other_word, other, nothing = len(own), len(own) + 1, len(own) + 2  # kinds of the other characters
    kind_of = {character: number for number, character in enumerate(own)}
    in_words = [*map(_in_words, own), True, False]
    length, found = len(phrase), frozenset([-1])

    def step(begun: frozenset[int], kind: int) -> frozenset[int]:
        """Return how many characters of the phrase match after one more, for every place where it may have started."""
        if begun == found or (length in begun and not (in_words[kind] and _in_words(phrase[-1]))):
            return found
        further = {n + 1 for n in begun if n < length and kind == kind_of[phrase[n]]}
        return frozenset(further | ({0} if not in_words[kind] or not _in_words(phrase[0]) else set()))

    start = frozenset([0])
    numbers, table = {start: 0}, []
    for state in (todo := [start]):
        row = []
        for kind in range(nothing):
            reached = step(state, kind)
            if reached not in numbers:
                numbers[reached] = len(numbers)
                todo.append(reached)
            row.append(numbers[reached])
        table.append([*row, numbers[state]])
    kinds = [[kind_of.get(c, other_word if _in_words(c) else other) for c in piece] for piece in pieces]
    longest = max(map(len, kinds))
    written = torch.tensor([row + [nothing] * (longest - len(row)) for row in kinds])  # [V, longest]
    by_kind = torch.tensor(table)
    states = torch.arange(len(todo))[:, None].expand(-1, len(pieces))
    for place in range(longest):
        states = by_kind[states, written[:, place]]
    return Automaton(states, torch.tensor([state == found or length in state for state in todo]))


def _in_words(character: str) -> bool:
    """Return whether a character is part of words. � is a part of a character, nearly always of a letter."""
    return character.isalnum() or character in "_\ufffd"


def _check(tokens: Sequence[int], vocab_size: int) -> None:
    for token in tokens:
        if token not in range(vocab_size):
            raise InputError(f"token {token} is outside the vocabulary (0 to {vocab_size - 1})")
