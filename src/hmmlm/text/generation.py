"""Exact sampling of continuations: unconstrained, or given that an automaton accepts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import HiddenMarkovModel
from hmmlm.hmm.checks import check_count
from hmmlm.hmm.constraints import Guide, Position


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling: number of tokens, temperature, top-k and seed."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    seed: int | None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 0)
        if not (isinstance(self.temperature, Real) and self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature must be a number of at least 0, not {self.temperature!r}")
        if self.top_k is not None:
            check_count("top_k", self.top_k, 1)
        if self.seed is not None and not (isinstance(self.seed, Integral) and -(2**63) <= self.seed < 2**64):
            raise InputError(f"seed must be an integer of at most 64 bits, not {self.seed!r}")

    def generator(self) -> torch.Generator:
        """Return a generator on the CPU, so that a seed gives the same text on every device."""
        generator = torch.Generator()
        generator.manual_seed(int(self.seed)) if self.seed is not None else generator.seed()
        return generator

    def draw(self, probs: Tensor, generator: torch.Generator) -> int:
        """Draw a token from probs [V]."""
        probs = probs.cpu()
        if self.temperature == 0:
            return int(probs.argmax())
        candidates = torch.arange(len(probs))
        if self.top_k is not None and self.top_k < len(probs):
            probs, candidates = probs.topk(self.top_k)
        # The largest weight is 1, so that at a low temperature the others may underflow, but never all.
        weights = (probs.double() / probs.max()) ** (1 / self.temperature)
        return int(candidates[torch.multinomial(weights, 1, generator=generator)])


@torch.no_grad()
def sample_continuation(
    hmm: HiddenMarkovModel, context: Sequence[int], end: int, options: SamplingOptions, excluded: int | None
) -> list[int]:
    """Sample tokens after `context` until `end`, which is not returned; each given that it is not `excluded`."""
    generator, sampled = options.generator(), list[int]()
    log_state = hmm.begin()
    for token in context:
        log_state = hmm.advance(log_state, token)
    for _ in range(options.max_new_tokens):
        probs = hmm.emit(log_state).exp()
        if excluded is not None:
            probs[excluded] = 0
            if not bool(probs.any()):
                raise InputError("only <unk> can follow here: allow unknown words")
        token = options.draw(probs, generator)
        if token == end:
            break
        sampled.append(token)
        log_state = hmm.advance(log_state, token)
    return sampled


def sample_accepted(guide: Guide, position: Position, end: int, options: SamplingOptions) -> list[int]:
    """Sample tokens until `end`, which is not returned, given that the guide's automaton accepts them."""
    generator, sampled = options.generator(), list[int]()
    while (token := options.draw(guide.next_token(position).exp(), generator)) != end:
        sampled.append(token)
        position = guide.advance(position, token)
    return sampled
