"""Exact sampling of continuations: unconstrained, or given that an automaton accepts them.

Without temperature, top-k or an excluded token, a continuation is drawn as the model defines it: a state, its token,
the next state. This is a sample of the predictive distributions too, at the cost of one row of the transition matrix
and one of the emission matrix per token. Otherwise each token is drawn from its predictive distribution, which takes a
product with both matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import HiddenMarkovModel
from hmmlm.hmm.checks import check_count
from hmmlm.hmm.constraints import Guide, Position
from hmmlm.ops.common import NEG_INF

_CELLS = 2**22  # largest table of probabilities: samples × words or states
_STEPS = 32  # tokens for which random numbers are drawn at once
_CHUNK = 256  # probabilities of a row that are first summed


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling: number of tokens, temperature, top-k, seed of the first sample, number of samples."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    num: int = 1

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 0)
        check_count("num", self.num, 1)
        if not (isinstance(self.temperature, Real) and self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature must be a number of at least 0, not {self.temperature!r}")
        if self.top_k is not None:
            check_count("top_k", self.top_k, 1)
        if self.seed is not None and not (
            isinstance(self.seed, Integral) and -(2**63) <= self.seed < 2**64 - self.num + 1
        ):
            raise InputError(f"seed must be an integer of at most 64 bits, not {self.seed!r}")

    def choose(self, log_probs: Tensor, uniform: Tensor) -> Tensor:
        """Draw a token from each row of log_probs [n, V], by uniform numbers [n]."""
        if self.temperature == 0:
            return log_probs.argmax(1)
        log_probs = log_probs.double()
        log_probs = log_probs - log_probs.amax(1, keepdim=True)  # at a very low temperature all would be −inf
        if self.top_k is not None and self.top_k < log_probs.shape[1]:
            best = log_probs.topk(self.top_k)
            log_probs = torch.full_like(log_probs, NEG_INF).scatter(1, best.indices, best.values)
        return invert(log_probs / self.temperature, uniform)


def invert(log_weights: Tensor, uniform: Tensor) -> Tensor:
    """Return, for each row of log_weights [n, m], the index at which its cumulative sum exceeds `uniform` [n] of it.

    A chunk of each row is found by the sums of chunks, then the index within it.
    """
    # The largest weight is 1: at a low temperature the others may underflow, but never all.
    weights = (log_weights - log_weights.amax(1, keepdim=True)).exp_()
    chunks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _CHUNK)).unflatten(1, (-1, _CHUNK))
    sums = chunks.sum(2).cumsum(1, dtype=torch.float64)
    chunk, rest = _find(sums, uniform * sums[:, -1])
    inside = chunks[torch.arange(len(chunks), device=chunks.device), chunk].cumsum(1, dtype=torch.float64)
    return chunk * _CHUNK + _find(inside, rest)[0]


def _find(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index at which cumulative sums [n, m] exceed targets [n], and the targets from there."""
    total = sums[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # rounding may have reached it
    index = torch.searchsorted(sums, target[:, None], right=True)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, index)[:, 0]
    return index[:, 0], target - before


@torch.no_grad()
def sample_continuations(
    hmm: HiddenMarkovModel, context: Sequence[int], end: int, options: SamplingOptions, excluded: int | None
) -> list[list[int]]:
    """Sample tokens after `context` until `end`, which is not returned; each given that it is not `excluded`."""
    model, log_state = hmm.detach(), hmm.begin()
    for token in context:
        log_state = hmm.advance(log_state, token)
    top_k = hmm.vocab_size if options.top_k is None else options.top_k
    ancestral = options.temperature == 1 and top_k >= hmm.vocab_size and excluded is None
    size = max(1, _CELLS // max(hmm.states, hmm.vocab_size))
    sampled: list[list[int]] = []
    for first in range(0, options.num, size):
        rows = _Rows(options, range(first, min(first + size, options.num)), end, hmm.device)
        if ancestral:
            _sample_states(model, log_state, rows)
        else:
            _sample_predictive(model, log_state, rows, excluded)
        sampled += rows.tokens
    return sampled


def _sample_states(hmm: HiddenMarkovModel, log_state: Tensor, rows: _Rows) -> None:
    """Draw a state, its token, the next state, …, from log p(state) [Z]."""
    log_states = log_state.expand(len(rows.index), -1)
    for uniform in rows.steps():
        states = invert(log_states, uniform[:, 0])
        words, log_probs = hmm.emissions_from(states)
        going = rows.add(words.gather(1, invert(log_probs, uniform[:, 1])[:, None])[:, 0])
        log_states = hmm.transitions_from(states[going])


def _sample_predictive(hmm: HiddenMarkovModel, log_state: Tensor, rows: _Rows, excluded: int | None) -> None:
    """Draw each token from its predictive distribution, from log p(state) [Z]."""
    log_states = log_state.repeat(len(rows.index), 1)
    for uniform in rows.steps():
        log_probs = hmm.emit(log_states)
        if excluded is not None:
            log_probs[:, excluded] = NEG_INF
            if bool((log_probs.amax(1) == NEG_INF).any()):
                raise InputError("only <unk> can follow here: allow unknown words")
        tokens = rows.options.choose(log_probs, uniform[:, 1])
        going = rows.add(tokens)
        if bool(going.any()):
            log_states = hmm.advance(log_states[going], tokens[going])


class _Rows:
    """Some of the samples, and which of them have not ended; sample i has the random numbers of seed + i.

    They are drawn on the CPU, so that a seed gives the same text on every device, alone or with other samples.
    """

    def __init__(self, options: SamplingOptions, samples: range, end: int, device: torch.device) -> None:
        self.options, self._end, self._generators = options, end, list[torch.Generator]()
        for i in samples:
            generator = torch.Generator()
            generator.seed() if options.seed is None else generator.manual_seed(int(options.seed) + i)
            self._generators.append(generator)
        self.tokens: list[list[int]] = [[] for _ in samples]
        self.index = torch.arange(len(samples), device=device)

    def steps(self) -> Iterator[Tensor]:
        """Yield random numbers [n, 2] in [0, 1) for each step, of the samples that have not ended, while there are any.

        They are drawn for several steps at once, always as many, so that they do not depend on max_new_tokens.
        """
        drawn = torch.zeros(len(self.tokens), _STEPS, 2, dtype=torch.float64)
        for step in range(self.options.max_new_tokens):
            if not len(self.index):
                return
            if step % _STEPS == 0:
                for row in self.index.tolist():
                    drawn[row] = torch.rand(_STEPS, 2, dtype=torch.float64, generator=self._generators[row])
                here = drawn.to(self.index.device)
            yield here[self.index, step % _STEPS]

    def add(self, tokens: Tensor) -> Tensor:
        """Add the next token of each sample that has not ended; return which of them continue, as a mask."""
        for row, token in zip(self.index.tolist(), tokens.tolist(), strict=True):
            if token != self._end:
                self.tokens[row].append(token)
        going = tokens != self._end
        self.index = self.index[going]
        return going


def sample_accepted(guide: Guide, position: Position, end: int, options: SamplingOptions) -> list[list[int]]:
    """Sample tokens until `end`, which is not returned, given that the guide's automaton accepts them."""
    rows, positions = _Rows(options, range(options.num), end, guide.hmm.device), [position] * options.num
    for uniform in rows.steps():
        tokens = options.choose(guide.next_tokens(positions), uniform[:, 1])
        going = rows.add(tokens).tolist()
        pairs = zip(positions, tokens.tolist(), going, strict=True)
        positions = [guide.advance(before, token) for before, token, on in pairs if on]
    return rows.tokens
