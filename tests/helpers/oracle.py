"""Brute force: every query answered by listing all Z^T paths, in log space and float64; and random models for it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hmmlm.emissions import Blocked, Emission
from hmmlm.hmm import HMM
from hmmlm.ops.scan import Parameters
from hmmlm.scan import composition
from hmmlm.scan.composition import parameters_of, with_tensors
from hmmlm.transitions import Factored

NEG_INF = -torch.inf


def random_hmm(states: int, words: int, seed: int, sharpness: float = 1.0, zeros: float = 0.0) -> tuple[Tensor, ...]:
    """Return probabilities (start, transition, emission) in float64; a fraction `zeros` of them is exactly zero."""
    generator = np.random.default_rng(seed)

    def rows(*shape: int) -> Tensor:
        values = np.exp(sharpness * generator.normal(size=shape))
        keep = generator.random(shape) >= zeros
        keep[..., generator.integers(shape[-1])] = True
        values = values * keep
        return torch.from_numpy(values / values.sum(-1, keepdims=True))

    return rows(states), rows(states, states), rows(states, words)


def random_blocked_hmm(
    blocks: int,
    states_per_block: int,
    words: int,
    seed: int,
    sharpness: float = 1.0,
    zeros: float = 0.0,
    hidden: int = 3,
) -> HMM:
    """Return an HMM of factored transitions and blocked emissions, in float64; each block has at least one word.

    A fraction `zeros` of the start and emission probabilities is exactly zero; transitions never are.
    """
    generator, states = np.random.default_rng(seed), blocks * states_per_block
    block_of_word = np.concatenate([np.arange(blocks), generator.integers(blocks, size=words - blocks)])
    generator.shuffle(block_of_word)

    def normal(*shape: int) -> np.ndarray:
        return generator.normal(size=shape)

    start, emission = sharpness * normal(states), sharpness * normal(words, states_per_block)
    start[generator.permutation(states)[: int(zeros * states)]] = -np.inf
    for block in range(blocks):
        own = np.flatnonzero(block_of_word == block)
        lost = generator.random((len(own), states_per_block)) < zeros
        lost[generator.integers(len(own))] = False  # every state emits something
        emission[own] = np.where(lost, -np.inf, emission[own])
        emission[own] -= np.logaddexp.reduce(emission[own], 0)
    u, w = (torch.from_numpy(np.sqrt(sharpness) * normal(states, hidden)) for _ in range(2))
    return HMM(
        torch.from_numpy(start).log_softmax(0),
        Factored(u, w, (u @ w.t()).logsumexp(1)),
        Blocked(torch.from_numpy(emission), torch.from_numpy(block_of_word), blocks),
    )


def single_block(hmm: HMM) -> HMM:
    """Return an HMM of two matrices, with transition probabilities above zero, as a blocked one of a single block."""
    log_start, log_transition, log_emission = matrices(hmm)
    return HMM(
        log_start,
        Factored(log_transition, torch.eye(hmm.num_states, dtype=hmm.dtype), torch.zeros_like(log_start)),
        Blocked(log_emission.t().contiguous(), torch.zeros(hmm.vocab_size, dtype=torch.long)),
    )


def matrices(hmm: HMM) -> Parameters:
    """Return the log-probabilities of any HMM as a vector and two matrices."""
    found = composition.matrices(hmm.dense())
    assert found is not None
    return found


def with_gradients(hmm: HMM) -> HMM:
    """Return a copy of a model with parameters that require gradients."""
    return with_tensors(hmm, {name: p.detach().clone().requires_grad_() for name, p in parameters_of(hmm).items()})


def by_state(emission: Emission, counts: Tensor) -> Tensor:
    """Return the counts of a tensor [Z, V], or [V, k] of blocks, as a matrix [Z, V]."""
    if not isinstance(emission, Blocked):
        return counts
    states = emission.block_of_word[:, None] * emission.width + torch.arange(emission.width)
    words = torch.arange(emission.vocab_size)[:, None].expand_as(states)
    return counts.new_zeros(emission.num_states, emission.vocab_size).index_put((states, words), counts)


class Enumeration:
    """All paths of one sequence with their joint log-probabilities log p(x, z)."""

    def __init__(
        self, hmm: HMM, tokens: Sequence[int], initial: Tensor | None = None, restart: Sequence[bool] | None = None
    ) -> None:
        """`initial` [Z] is the filtered distribution at the token before the first, `restart` as in a scan."""
        self.hmm, self.tokens, self.initial = hmm, list(tokens), initial
        log_start, log_transition, log_emission = (p.detach().double() for p in matrices(hmm))
        grid = torch.meshgrid(*[torch.arange(hmm.num_states)] * len(self.tokens), indexing="ij")
        self.paths = torch.stack([states.flatten() for states in grid], 1)  # [Z^T, T]
        self.log_joint = torch.zeros(len(self.paths), dtype=torch.float64)
        for t, token in enumerate(self.tokens):
            here = self.paths[:, t]
            if restart is not None and restart[t]:
                entered = log_start[here]
            elif t:
                entered = log_transition[self.paths[:, t - 1], here]
            elif initial is not None:
                entered = (initial.double().log()[:, None] + log_transition).logsumexp(0)[here]
            else:
                entered = log_start[here]
            self.log_joint += entered if token < 0 else entered + log_emission[here, token]

    def log_likelihood(self) -> Tensor:
        return self.log_joint.logsumexp(0)

    def probabilities(self) -> Tensor:
        """Return p(z | x) [Z^T] of every path."""
        return self.log_joint.softmax(0)

    def posterior(self) -> Tensor:
        """Return p(z_t | x) [T, Z]."""
        weight = self.probabilities()
        columns = [torch.bincount(column, weight, self.hmm.num_states) for column in self.paths.t()]
        return torch.stack(columns)

    def filtered(self) -> Tensor:
        """Return p(z_t | x_1..t) [T, Z]; zero from the first impossible token on."""
        rows = []
        for t in range(len(self.tokens)):
            prefix = Enumeration(self.hmm, self.tokens[: t + 1], self.initial)
            rows.append(prefix.posterior()[-1].nan_to_num(0.0))
        return torch.stack(rows)

    def counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the expected counts of starts [Z], transitions [Z, Z] and emissions [Z, V]."""
        weight, states = self.probabilities(), self.hmm.num_states
        start = torch.bincount(self.paths[:, 0], weight, states)
        transition, emission = torch.zeros(states**2), torch.zeros(states, self.hmm.vocab_size)
        transition, emission = transition.double(), emission.double()
        for t in range(1, len(self.tokens)):
            transition += torch.bincount(self.paths[:, t - 1] * states + self.paths[:, t], weight, states**2)
        for t, token in enumerate(self.tokens):
            if token >= 0:
                emission[:, token] += torch.bincount(self.paths[:, t], weight, states)
        return start, transition.view(states, states), emission

    def entropy(self) -> Tensor:
        """Return the entropy of p(z | x) in nats."""
        weight = self.probabilities()
        return -torch.xlogy(weight, weight).sum()

    def log_joint_of(self, path: Sequence[int]) -> Tensor:
        """Return log p(x, z) of one path."""
        index = (self.paths == torch.tensor(path)).all(1).nonzero().item()
        return self.log_joint[int(index)]

    def next_token(self) -> Tensor:
        """Return log p(next token | x) [V]."""
        longer = [Enumeration(self.hmm, [*self.tokens, word]) for word in range(self.hmm.vocab_size)]
        return torch.stack([each.log_likelihood() for each in longer]) - self.log_likelihood()

    def infill(self) -> Tensor:
        """Return log p(x_t = v | all other tokens) [T, V]."""
        rows = []
        for t in range(len(self.tokens)):
            row = [self._replaced(t, word).log_likelihood() for word in range(self.hmm.vocab_size)]
            rows.append(torch.stack(row) - self._replaced(t, -1).log_likelihood())
        return torch.stack(rows)

    def _replaced(self, position: int, token: int) -> "Enumeration":
        return Enumeration(self.hmm, [token if t == position else x for t, x in enumerate(self.tokens)])
