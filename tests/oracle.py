"""Brute force: every question answered by listing all Z^T paths (and all V completions of missing tokens)."""

import itertools
import math

import numpy as np
import torch
from torch import Tensor


def random_hmm(states: int, words: int, seed: int, sharpness: float = 1.0, zeros: float = 0.0) -> tuple[Tensor, ...]:
    """Probabilities (start, transition, emission) in float64; a share `zeros` of the entries is exactly zero."""
    generator = np.random.default_rng(seed)

    def rows(*shape: int) -> Tensor:
        values = np.exp(sharpness * generator.normal(size=shape))
        keep = generator.random(shape) >= zeros
        keep[..., generator.integers(shape[-1])] = True
        values = values * keep
        return torch.from_numpy(values / values.sum(-1, keepdims=True))

    return rows(states), rows(states, states), rows(states, words)


class Enumeration:
    """All paths of one sequence with their joint probabilities p(z, x)."""

    def __init__(self, start: Tensor, transition: Tensor, emission: Tensor, tokens: list[int],
                 initial: Tensor | None = None) -> None:
        states = start.shape[0]
        self.emission, self.tokens = emission, tokens
        self.paths = list(itertools.product(range(states), repeat=len(tokens)))
        first = start if initial is None else initial @ transition
        self.joint = []
        for path in self.paths:
            p = 1.0
            for t, (z, x) in enumerate(zip(path, tokens, strict=True)):
                p *= float(first[z] if t == 0 else transition[path[t - 1], z])
                p *= 1.0 if x < 0 else float(emission[z, x])
            self.joint.append(p)
        self.total = math.fsum(self.joint)
        self.states = states

    def log_likelihood(self) -> float:
        return math.log(self.total) if self.total > 0 else -math.inf

    def posterior(self) -> Tensor:
        result = torch.zeros(len(self.tokens), self.states, dtype=torch.float64)
        for path, p in zip(self.paths, self.joint, strict=True):
            for t, z in enumerate(path):
                result[t, z] += p / self.total
        return result

    def counts(self, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        start, transition, emission = (torch.zeros(shape, dtype=torch.float64) for shape in (
            (self.states,), (self.states, self.states), (self.states, vocab_size)))
        for path, p in zip(self.paths, self.joint, strict=True):
            start[path[0]] += p / self.total
            for t, z in enumerate(path):
                if t:
                    transition[path[t - 1], z] += p / self.total
                if self.tokens[t] >= 0:
                    emission[z, self.tokens[t]] += p / self.total
        return start, transition, emission

    def entropy(self) -> float:
        return -math.fsum(p / self.total * math.log(p / self.total) for p in self.joint if p > 0)

    def best(self) -> float:
        return math.log(max(self.joint))

    def probability(self, path: tuple[int, ...]) -> float:
        return self.joint[self.paths.index(path)] / self.total
