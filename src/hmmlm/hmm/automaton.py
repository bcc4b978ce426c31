"""Deterministic automata over tokens: which sequences are wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmmlm.errors import InputError

LARGEST = 4096  # states of a product: the table has as many rows, a column a word


class Automaton:
    """`next` [S, V] is the state after each token, `accepting` [S] whether a sequence may end there; it begins in 0.

    It stays on the CPU; `Guide` takes along what a model on another device needs.
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
            raise InputError(f"next must hold states, 0 to {next.shape[0] - 1}")

    @property
    def states(self) -> int:
        return self.next.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.next.shape[1]

    def read(self, tokens: Sequence[int], state: int = 0) -> int:
        """The state after `tokens`."""
        _check(tokens, self.vocab_size)
        for token in tokens:
            state = int(self.next[state, token])
        return state

    def accepts(self, tokens: Sequence[int]) -> bool:
        return bool(self.accepting[self.read(tokens)])

    def hopeful(self) -> Tensor:
        """[S] whether anything that follows is accepted."""
        hopeful = self.accepting
        while True:
            more = hopeful | hopeful[self.next].any(1)
            if bool((more == hopeful).all()):
                return hopeful
            hopeful = more

    def settled(self) -> Tensor:
        """[S] whether everything that follows is accepted, because the state stays."""
        return self.accepting & (self.next == torch.arange(self.states)[:, None]).all(1)

    def complement(self) -> Automaton:
        """All other sequences."""
        return Automaton(self.next, ~self.accepting)

    def __and__(self, other: Automaton) -> Automaton:
        """What both accept. Its states are the pairs that can be reached, those without hope taken together."""
        if self.vocab_size != other.vocab_size:
            raise InputError(f"automata over {self.vocab_size} and {other.vocab_size} words cannot be joined")
        ours, theirs = self.hopeful(), other.hopeful()
        lost = -1
        start = 0 if bool(ours[0] & theirs[0]) else lost
        numbers = {start: 0}  # a pair as one number
        rows: list[Tensor] = []
        for pair in (todo := [start]):  # grows as it is read
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
                raise InputError(f"more than {LARGEST} combinations of what has been said: ask for fewer phrases")
            rows.append(torch.tensor([numbers[code] for code in distinct.tolist()])[which])
        accepting = [
            pair != lost and bool(self.accepting[pair // other.states] & other.accepting[pair % other.states])
            for pair in todo
        ]
        return Automaton(torch.stack(rows), torch.tensor(accepting))

    def __or__(self, other: Automaton) -> Automaton:
        """What either accepts."""
        return (self.complement() & other.complement()).complement()

    def until(self, end: int, ended: bool = True) -> Automaton:
        """A sequence that this accepts, then `end`, which is in none of them; whatever comes afterwards.

        Unless it must have `ended`, a sequence that this accepts is also accepted without.
        """
        done, lost = self.states, self.states + 1
        rows = torch.cat([self.next, torch.tensor([[done], [lost]]).expand(-1, self.vocab_size)])
        rows[: self.states, end] = torch.where(self.accepting, done, lost)
        before = self.accepting & (not ended)
        return Automaton(rows, torch.cat([before, torch.tensor([True, False])]))

    def without(self, token: int) -> Automaton:
        """No `token` until everything is accepted anyway. States keep their numbers; one is added, that of no hope."""
        lost = torch.full((1, self.vocab_size), self.states)
        rows = torch.cat([self.next, lost])
        rows[: self.states, token] = torch.where(self.settled(), rows[: self.states, token], self.states)
        return Automaton(rows, torch.cat([self.accepting, torch.tensor([False])]))


def anything(vocab_size: int) -> Automaton:
    return Automaton(torch.zeros(1, vocab_size, dtype=torch.long), torch.ones(1, dtype=torch.bool))


def containing(phrase: Sequence[int], vocab_size: int) -> Automaton:
    """Sequences in which the tokens of `phrase` stand in a row (Knuth, Morris and Pratt)."""
    if not len(phrase):
        raise InputError("a phrase needs at least one token")
    _check(phrase, vocab_size)
    length = len(phrase)
    rows = torch.zeros(length + 1, vocab_size, dtype=torch.long)
    border = 0  # the state in which the phrase without its first token ends
    for place, token in enumerate(phrase):
        rows[place] = rows[border]
        rows[place, token] = place + 1
        if place:
            border = int(rows[border, token])
    rows[length] = length
    return Automaton(rows, torch.arange(length + 1) == length)


def spelling(phrase: str, pieces: Sequence[str]) -> Automaton:
    """Texts in which `phrase` stands as whole words, however tokens write it; pieces[v] is what token v adds to one.

    Read by characters: where the phrase begins (ends) with a letter, digit or underscore, none may stand before
    (after) it.
    """
    if not phrase:
        raise InputError("a phrase needs at least one character")
    own = sorted(set(phrase))
    other_word, other, nothing = len(own), len(own) + 1, len(own) + 2  # kinds of characters beyond those
    kind_of = {character: number for number, character in enumerate(own)}
    in_words = [*map(_in_words, own), True, False]
    length, found = len(phrase), frozenset([-1])

    def step(begun: frozenset[int], kind: int) -> frozenset[int]:
        """How much of the phrase has been written, in every place where it may have begun."""
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
    """� is a part of a character, which is nearly always a letter."""
    return character.isalnum() or character in "_\ufffd"


def _check(tokens: Sequence[int], vocab_size: int) -> None:
    for token in tokens:
        if token not in range(vocab_size):
            raise InputError(f"token {token} is outside the vocabulary (0 to {vocab_size - 1})")
