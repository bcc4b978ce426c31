"""Tokens that follow others, drawn exactly; freely, or given that an automaton accepts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import AnyHMM
from hmmlm.hmm.automaton import Automaton
from hmmlm.hmm.constraints import Guide


@dataclass(frozen=True)
class Choice:
    """How many tokens are drawn, and how."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    seed: int | None

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 0)
        if not (isinstance(self.temperature, Real) and self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature must be a number of 0 or more, not {self.temperature!r}")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1)
        if self.seed is not None and not (isinstance(self.seed, Integral) and -(2**63) <= self.seed < 2**64):
            raise InputError(f"seed must be a whole number of at most 64 bits, not {self.seed!r}")

    def generator(self) -> torch.Generator:
        """On the CPU, so that a seed means the same text on every device."""
        generator = torch.Generator()
        generator.manual_seed(int(self.seed)) if self.seed is not None else generator.seed()
        return generator

    def draw(self, probs: Tensor, generator: torch.Generator) -> int:
        """A token from probs [V]."""
        probs = probs.cpu()
        if self.temperature == 0:
            return int(probs.argmax())
        candidates = torch.arange(len(probs))
        if self.top_k is not None and self.top_k < len(probs):
            probs, candidates = probs.topk(self.top_k)
        # The largest is 1 before the power: a low temperature underflows the others, never all of them.
        weights = (probs.double() / probs.max()) ** (1 / self.temperature)
        return int(candidates[torch.multinomial(weights, 1, generator=generator)])


@torch.no_grad()
def say(hmm: AnyHMM, heard: Sequence[int], end: int, choice: Choice, excluded: int | None) -> list[int]:
    """What follows `heard` until `end`, which is not given back; every token given that it is not `excluded`."""
    generator, said = choice.generator(), []
    state = hmm.begin()
    for token in heard:
        state = hmm.advance(state, token)
    for _ in range(choice.max_new_tokens):
        probs = hmm.emit(state).exp()
        if excluded is not None:
            probs[excluded] = 0
            if not bool(probs.any()):
                raise InputError("nothing but <unk> can follow here: leave unknown words allowed")
        token = choice.draw(probs, generator)
        if token == end:
            break
        said.append(token)
        state = hmm.advance(state, token)
    return said


def say_accepted(
    hmm: AnyHMM, automaton: Automaton, heard: Sequence[int], line: Sequence[int], end: int, choice: Choice
) -> list[int]:
    """What follows `heard` until `end`, given that the automaton accepts `line`, the last part of `heard`, with it."""
    guide, generator, said = Guide(hmm, automaton, max(choice.max_new_tokens, 1)), choice.generator(), []
    position = guide.begin(heard)._replace(automaton=automaton.read(line), remaining=choice.max_new_tokens)
    if guide.chance(position) == -math.inf:
        raise InputError(
            f"nothing of at most {choice.max_new_tokens} tokens that the model can say here has all that it must and "
            "none of what it must not: allow more tokens, or ask for less"
        )
    while (token := choice.draw(guide.next_token(position).exp(), generator)) != end:
        said.append(token)
        position = guide.advance(position, token)
    return said


def check_whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise InputError(f"{name} must be {least} or more, not {value}")
