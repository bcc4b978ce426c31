"""Every query answered by listing all Z^T paths, in log space, in extended precision (numpy's long double).

`oracle.py` has the same in float64 for tests with chosen tolerances; this one is the reference of the fuzz.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hmmlm.constrain.automaton import Automaton
from hmmlm.emissions import Blocked, Categorical, Emission, UnionEmission
from hmmlm.hmm import HMM
from hmmlm.transitions import BlockDiagonal, Dense, Factored, LowRank, Monarch, Transition

Array = np.ndarray
LONG = np.longdouble
NEG_INF = LONG(-np.inf)


def log_sum(values: Array, axis: int | None = None) -> Array:
    """Compute log Σ exp(values); −inf where every value is."""
    peak = np.max(values, axis=axis, keepdims=True)
    peak = np.where(peak == NEG_INF, LONG(0), peak)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(values - peak).sum(axis=axis, keepdims=True)) + peak
    return total.squeeze(axis) if axis is not None else total.reshape(())


def widen(values: Tensor) -> Array:
    """Return a tensor in extended precision; values of float32 and float64 are represented exactly."""
    return values.detach().to_dense().double().cpu().numpy().astype(LONG)


class Part(NamedTuple):
    """A transition or an emission as a matrix in extended precision."""

    log_probs: Array  # [Z, Z] or [Z, V]
    magnitude: float  # largest number that a computation of it has to add up: bounds rounding errors


class Truth(NamedTuple):
    """The parameters of a model as log-probabilities in extended precision."""

    start: Array  # [Z]
    transition: Array  # [Z, Z]
    emission: Array  # [Z, V]
    magnitude: float  # the largest of the parts

    @classmethod
    def of(cls, hmm: HMM) -> "Truth":
        start, transition, emission = widen(hmm.log_start), part_of(hmm.transition), part_of(hmm.emission)
        magnitude = max(_largest(start), transition.magnitude, emission.magnitude)
        return cls(start, transition.log_probs, emission.log_probs, magnitude)

    def all_paths(self, tokens: Sequence[int], **options: Array | None) -> "Paths":
        return Paths(self, tokens, **options)


def part_of(given: Transition | Emission) -> Part:
    """Return a transition or an emission as a matrix; a new kind is one more case."""
    match given:
        case BlockDiagonal() | UnionEmission():
            return _union(given)
        case Dense() | Categorical():
            log_probs = widen(given.log_probs)
            return Part(log_probs, _largest(log_probs))
        case Factored():
            u, w, normalizer = (widen(given.tensors()[name]) for name in ("u", "w", "log_normalizer"))
            # Computed logits are rounded relative to their terms, not to their sum.
            terms = float((abs(u) @ abs(w).T).max())
            return Part(u @ w.T - normalizer[:, None], _largest(normalizer) + terms)
        case LowRank():
            left, right = widen(given.log_left), widen(given.log_right)
            return Part(log_sum(left[:, :, None] + right, 1), _largest(left) + _largest(right))
        case Monarch():  # from (i, j) by k to (i', k)
            left, right = widen(given.log_left), widen(given.log_right)
            joint = left[:, :, None, :] + right.transpose(1, 2, 0)[:, None]
            return Part(joint.reshape(given.num_states, -1), _largest(left) + _largest(right))
        case Blocked():
            scores, k = widen(given.log_probs), given.width
            emission = np.full((given.num_states, given.vocab_size), NEG_INF)
            for word, block in enumerate(given.block_of_word.tolist()):
                emission[block * k : (block + 1) * k, word] = scores[word]
            return Part(emission, _largest(scores))
    raise TypeError(f"what is the matrix of a {given.kind} {given.role}?")


def _union(given: BlockDiagonal | UnionEmission) -> Part:
    """Return block-diagonal transitions, or emissions below each other."""
    parts = [part_of(each) for each in given.parts]
    magnitude = max(part.magnitude for part in parts)
    if isinstance(given, UnionEmission):
        return Part(np.concatenate([part.log_probs for part in parts]), magnitude)
    transition = np.full((given.num_states, given.num_states), NEG_INF)
    for part, size, end in zip(parts, given.sizes, np.cumsum(given.sizes), strict=True):
        transition[end - size : end, end - size : end] = part.log_probs
    return Part(transition, magnitude)


def _largest(*values: Array) -> float:
    finite = np.concatenate([np.abs(v[np.isfinite(v)]).ravel() for v in values])
    return float(finite.max(initial=0))


class Paths:
    """All paths of one sequence, with log p(x, z) of each."""

    def __init__(
        self,
        truth: Truth,
        tokens: Sequence[int],
        carry: Array | None = None,
        restart: Sequence[bool] | None = None,
        missing: Array | None = None,
        allowed: Array | None = None,
    ) -> None:
        """`carry` [Z] is log p(z) before the first, `restart` as in a scan, `missing` [Z] scores a missing one.

        Where `allowed` [T, Z] is False, no path has that state.
        """
        self.truth, self.tokens, self.carry, self.missing = truth, list(tokens), carry, missing
        states = len(truth.start)
        self.paths = np.array(list(itertools.product(range(states), repeat=len(self.tokens))))  # [Z^T, T]
        first = truth.start if carry is None else log_sum(carry[:, None] + truth.transition, 0)
        self.starts = [
            restart[t] if restart is not None and restart[t] else t == 0 and carry is None for t in range(len(tokens))
        ]
        entered, emitted = [], []
        for t, token in enumerate(self.tokens):
            here = self.paths[:, t]
            if self.starts[t]:
                entered.append(truth.start[here])
            else:
                entered.append(truth.transition[self.paths[:, t - 1], here] if t else first[here])
            emitted.append(self._score(token)[here])
            if allowed is not None:
                emitted[t] = np.where(allowed[t][here], emitted[t], NEG_INF)
        self.emitted, self.total = np.array(emitted), np.array(entered).sum(0)
        self.prefixes = [np.array(entered[: t + 1]).sum(0) + self.emitted[: t + 1].sum(0) for t in range(len(tokens))]
        self.log_joint = self.prefixes[-1]

    def labelled(self, allowed: Array) -> "Paths":
        """Return those of the paths whose states are allowed [T, Z]."""
        return Paths(self.truth, self.tokens, allowed=allowed)

    def _score(self, token: int) -> Array:
        if token >= 0:
            return self.truth.emission[:, token]
        return np.zeros_like(self.truth.start) if self.missing is None else self.missing

    def log_likelihood(self) -> Array:
        return log_sum(self.log_joint)

    def impossible_at(self) -> int | None:
        """Return the position of the first token that has probability zero given those before it."""
        return next((t for t, prefix in enumerate(self.prefixes) if log_sum(prefix) == NEG_INF), None)

    def probabilities(self) -> Array:
        """Return p(z | x) [Z^T]; all zero if x is impossible."""
        total = self.log_likelihood()
        return np.exp(self.log_joint - total) if total > NEG_INF else np.zeros_like(self.log_joint)

    def _by_state(self, weights: Array, t: int) -> Array:
        result = np.zeros(len(self.truth.start), dtype=LONG)
        np.add.at(result, self.paths[:, t], weights)
        return result

    def posterior(self) -> Array:
        """Return p(z_t | x) [T, Z]."""
        weight = self.probabilities()
        return np.array([self._by_state(weight, t) for t in range(len(self.tokens))])

    def filtered(self) -> Array:
        """Return p(z_t | x_1..t) [T, Z]; zero from the first impossible token on."""
        rows = []
        for t, prefix in enumerate(self.prefixes):
            # every path of the prefix occurs once for each of its continuations, with the same weight
            total = log_sum(prefix)
            rows.append(self._by_state(np.exp(prefix - total) if total > NEG_INF else np.zeros_like(prefix), t))
        return np.array(rows)

    def log_carry(self) -> Array:
        """Return log p(z_T | x) [Z]; all −inf if x is impossible."""
        last, total = self.paths[:, -1], self.log_likelihood()
        rows = [log_sum(self.log_joint[last == z]) for z in range(len(self.truth.start))]
        return np.array(rows) - (total if total > NEG_INF else LONG(0))

    def counts(self) -> tuple[Array, Array, Array]:
        """Return the expected counts of starts [Z], transitions [Z, Z] and emissions [Z, V]."""
        weight = self.probabilities()
        start, transition, emission = (np.zeros_like(p) for p in self.truth[:3])
        for t, token in enumerate(self.tokens):
            here = self.paths[:, t]
            if self.starts[t]:
                np.add.at(start, here, weight)
            elif t:
                np.add.at(transition, (self.paths[:, t - 1], here), weight)
            elif self.carry is not None:
                transition += self._before(self._by_state(weight, 0))
            if token >= 0:
                np.add.at(emission, (here, token), weight)
        return start, transition, emission

    def _before(self, posterior: Array) -> Array:
        """Return p(z_0, z_1 | x) [Z, Z] of the state before the first token, given the posterior of the first."""
        assert self.carry is not None
        joint = self.carry[:, None] + self.truth.transition
        total = log_sum(joint, 0)
        return np.where(joint == NEG_INF, 0, np.exp(joint - np.where(total == NEG_INF, 0, total))) * posterior

    def entropy(self) -> Array:
        """Return the entropy of p(z | x) in nats."""
        weight = self.probabilities()
        return -(weight * np.where(weight > 0, np.log(np.where(weight > 0, weight, 1)), 0)).sum()

    def log_joint_of(self, path: Sequence[int]) -> Array:
        """Return log p(x, z) of one path."""
        return self.log_joint[(self.paths == np.array(path)).all(1)][0]

    def predicted(self) -> Array:
        """Return log p(state after the last token | x) [Z]."""
        last = np.full(len(self.truth.start), NEG_INF)
        for z in range(len(last)):
            last[z] = log_sum(self.log_joint[self.paths[:, -1] == z])
        return log_sum(last[:, None] + self.truth.transition, 0) - self.log_likelihood()

    def next_token(self) -> Array:
        """Return log p(next token | x) [V]."""
        return log_sum(self.predicted()[:, None] + self.truth.emission, 0)

    def infill(self) -> Array:
        """Return log p(x_t = v | all other tokens) [T, V]."""
        rows = []
        for t in range(len(self.tokens)):
            others = self.total + np.delete(self.emitted, t, 0).sum(0)
            here = np.array([log_sum(others[self.paths[:, t] == z]) for z in range(len(self.truth.start))])
            rows.append(log_sum(here[:, None] + self.truth.emission, 0) - log_sum(here))
        return np.array(rows)


def infill_blanks(truth: Truth, tokens: Sequence[int], excluded: int) -> Array | None:
    """Return log p(blank = v | all observed tokens, no blank is `excluded`) [blanks, V]; None if impossible."""
    others = np.delete(truth.emission, excluded, 1)
    missing = log_sum(others, 1) if others.shape[1] else np.full_like(truth.start, NEG_INF)
    paths = Paths(truth, tokens, missing=missing)
    if paths.log_likelihood() == NEG_INF:
        return None
    scores = paths.infill()[[t for t, token in enumerate(tokens) if token < 0]]
    scores[:, excluded] = NEG_INF
    return scores - log_sum(scores, 1)[:, None] if len(scores) else scores


def accepted(truth: Truth, automaton: Automaton, prefix: Sequence[int], length: int) -> Array:
    """Return log p(next token = v, prefix and `length` more tokens are accepted | prefix) [V]."""
    words = truth.emission.shape[1]
    result = np.full(words, NEG_INF)
    given = Paths(truth, prefix).log_likelihood() if prefix else LONG(0)
    for more in itertools.product(range(words), repeat=length):
        if automaton.accepts([*prefix, *more]):
            score = Paths(truth, [*prefix, *more]).log_likelihood() - given
            result[more[0]] = np.logaddexp(result[more[0]], score)
    return result
