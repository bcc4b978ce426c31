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
from hmmlm.hmm.checks import check_whole
from hmmlm.hmm.constraints import Guide, Position


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


def say_accepted(guide: Guide, position: Position, end: int, choice: Choice) -> list[int]:
    """What follows until `end`, which is not given back, given that the guide's automaton accepts it."""
    generator, said = choice.generator(), []
    while (token := choice.draw(guide.next_token(position).exp(), generator)) != end:
        said.append(token)
        position = guide.advance(position, token)
    return said
