"""Deterministic automata over tokens: which sequences are wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hmmlm.errors import InputError

LARGEST = 4096  # states of a product: the table has as many rows, a column a word


class Automaton:
    """`next` [S, V] is the state after each token, `accepting` [S] whether a sequence may end there; it begins in 0."""

    def __init__(self, next: Tensor, accepting: Tensor) -> None:
        if next.dim() != 2 or next.dtype.is_floating_point or accepting.shape != next.shape[:1]:
            raise InputError(
                f"an automaton needs integers next [states, words] and accepting [states], not {list(next.shape)} of "
                f"{str(next.dtype).removeprefix('torch.')} and {list(accepting.shape)}"
            )
        if not next.numel() or bool((next < 0).any()) or bool((next >= next.shape[0]).any()):
            raise InputError(f"next must hold states, 0 to {next.shape[0] - 1}")
        self.next, self.accepting = next, accepting.bool()

    @property
    def states(self) -> int:
        return self.next.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.next.shape[1]

    def read(self, tokens: Sequence[int], state: int = 0) -> int:
        """The state after `tokens`."""
        for token in tokens:
            state = int(self.next[state, token])
        return state

    def accepts(self, tokens: Sequence[int]) -> bool:
        return bool(self.accepting[self.read(tokens)])

    def complement(self) -> Automaton:
        """All other sequences."""
        return Automaton(self.next, ~self.accepting)

    def __and__(self, other: Automaton) -> Automaton:
        """What both accept. Its states are the pairs that can be reached."""
        if self.vocab_size != other.vocab_size:
            raise InputError(f"automata over {self.vocab_size} and {other.vocab_size} words cannot be joined")
        pairs = {(0, 0): 0}
        rows: list[Tensor] = []
        for here, there in (todo := [(0, 0)]):  # grows as it is read
            codes, which = (self.next[here] * other.states + other.next[there]).unique(return_inverse=True)
            numbers = []
            for code in codes.tolist():
                pair = divmod(code, other.states)
                if pair not in pairs:
                    pairs[pair] = len(pairs)
                    todo.append(pair)
                numbers.append(pairs[pair])
            if len(pairs) > LARGEST:
                raise InputError(f"more than {LARGEST} combinations of what has been said: ask for fewer phrases")
            rows.append(torch.tensor(numbers, device=which.device)[which])
        accepting = [bool(self.accepting[here] and other.accepting[there]) for here, there in todo]
        return Automaton(torch.stack(rows), torch.tensor(accepting, device=self.next.device))

    def until(self, end: int) -> Automaton:
        """A sequence that this accepts, then `end`, which is in none of them; whatever comes afterwards."""
        done, never = self.states, self.states + 1
        rows = torch.cat([self.next, torch.full((2, self.vocab_size), done).to(self.next)])
        rows[: self.states, end] = torch.where(self.accepting, done, never)
        rows[never] = never
        accepting = torch.zeros(self.states + 2, dtype=torch.bool, device=rows.device)
        accepting[done] = True
        return Automaton(rows, accepting)


def anything(vocab_size: int) -> Automaton:
    return Automaton(torch.zeros(1, vocab_size, dtype=torch.long), torch.ones(1, dtype=torch.bool))


def containing(phrase: Sequence[int], vocab_size: int) -> Automaton:
    """Sequences in which the tokens of `phrase` stand in a row (Knuth, Morris and Pratt)."""
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
    accepting = torch.zeros(length + 1, dtype=torch.bool)
    accepting[length] = True
    return Automaton(rows, accepting)


def avoiding(phrase: Sequence[int], vocab_size: int) -> Automaton:
    """Sequences in which the tokens of `phrase` nowhere stand in a row."""
    return containing(phrase, vocab_size).complement()


def _check(phrase: Sequence[int], vocab_size: int) -> None:
    if not len(phrase):
        raise InputError("a phrase needs at least one token")
    for token in phrase:
        if not 0 <= token < vocab_size:
            raise InputError(f"token {token} of a phrase is outside the vocabulary (0 to {vocab_size - 1})")
