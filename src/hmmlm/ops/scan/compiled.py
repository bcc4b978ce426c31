"""The scaled recursions of `scaled.py` as compiled loops, for few states on a CPU (`hmmlm.ops.loops`).

Every step is normalized, so the bounds on what underflow can lose are those of `scaled` with groups of one step.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.ops import loops
from hmmlm.ops.common import FLOOR
from hmmlm.ops.lanes import padded_width
from hmmlm.ops.scan import scaled
from hmmlm.ops.scan.naive import Evidence, Parameters
from hmmlm.ops.scan.scaled import ScaledForward, sort_by_length

STEPS_PER_SHIFT = 16  # of Viterbi, between two subtractions of the largest score: float32 then suffices for any length


class CompiledChain(NamedTuple):
    """A batch prepared for the loops: time-major, longest sequence first, rows padded to W numbers."""

    table: np.ndarray  # [1 + Z + U, W] start, transition and emissions: see `loops.prepare_chain`
    log_peak: np.ndarray  # [U] log max_z p(word | z)
    words: np.ndarray  # [T, B] row of the emissions for each token
    vocabulary: np.ndarray  # [U] token of each row of the emissions
    lengths: np.ndarray  # [B]
    initial: np.ndarray  # [B, Z], or [0, Z]
    restart: np.ndarray  # [T, B], or [0, B]
    log_ratio: float  # largest difference between two entries of a column of the transition matrix
    order: Tensor | None  # [B] original index of each row; None: not sorted
    evidence: Evidence

    @property
    def start(self) -> Tensor:
        """Return the start distribution [Z]."""
        return torch.from_numpy(self.table[0, : self.initial.shape[1]])

    @property
    def transition(self) -> Tensor:
        """Return the transition matrix [Z, Z]."""
        states = self.initial.shape[1]
        return torch.from_numpy(self.table[1 : 1 + states, :states])

    def sort(self, values: Tensor) -> Tensor:
        """Return `values` with rows in the order of the chain."""
        return values if self.order is None else values[self.order]

    def unsort(self, values: Tensor) -> Tensor:
        """Return `values` with rows in their original order."""
        return values if self.order is None else values[torch.argsort(self.order)]


class CompiledForward(NamedTuple):
    """Result of the filter."""

    alpha: np.ndarray  # [T·B, W] p(z_t | x_1..t), or [0, W]; not set where a sequence has ended
    scale: np.ndarray  # [T, B] p(x_t | x_1..t−1) / peak of x_t, one where a sequence has ended
    least: float  # smallest scale
    log_likelihood: Tensor  # [B]
    final: Tensor  # [B, Z]


def make_chain(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> CompiledChain:
    """Convert parameters to probabilities; see `scaled.make_chain`. Products are in the dtype of the parameters."""
    dtype = parameters.log_start.dtype
    ordered, _, order = sort_by_length(evidence, dtype)
    table, log_peak, vocabulary, words, log_ratio = _make_table(parameters, ordered.tokens, math.log(FLOOR[dtype]))
    np.exp(table, out=table)  # in this thread: torch's exp was slower beside other processes
    (steps, batch), states = words.shape, parameters.log_start.shape[0]
    lengths = np.full(batch, steps) if ordered.lengths is None else _array(ordered.lengths)
    initial = np.empty((0, states), table.dtype) if ordered.initial is None else _array(ordered.initial)
    restart = np.empty((0, batch), np.bool_) if ordered.restart is None else _array(ordered.restart)
    return CompiledChain(table, log_peak, words, vocabulary, lengths, initial, restart, log_ratio, order, evidence)


def forward(chain: CompiledChain, keep: bool = True) -> CompiledForward:
    """Run the filter; see `scaled.forward`."""
    (steps, batch), states, dtype = chain.words.shape, chain.initial.shape[1], chain.table.dtype
    alpha = np.empty((steps * batch if keep else 0, chain.table.shape[1]), dtype)
    scale, final, log_likelihood = np.ones((steps, batch), dtype), np.empty((batch, states), dtype), np.empty(batch)
    least = loops.run_filter(
        chain.table,
        chain.log_peak,
        chain.words,
        chain.lengths,
        chain.initial,
        chain.restart,
        *_bounds(dtype),
        alpha,
        scale,
        final,
        log_likelihood,
    )
    return CompiledForward(alpha, scale, least, torch.from_numpy(log_likelihood.astype(dtype)), torch.from_numpy(final))


def doubtful(parameters: Parameters, chain: CompiledChain, result: CompiledForward) -> Tensor:
    """Return a mask [B] as `scaled.doubtful`, whose cheap bound decides for most batches."""
    (states,), dtype = parameters.log_start.shape, parameters.log_start.dtype
    floor = FLOOR[dtype]
    margin = math.log(scaled.least_mass(floor, states, dtype)) + chain.log_ratio
    if result.least > 0 and math.log(result.least) >= margin:
        return torch.zeros(chain.words.shape[1], dtype=torch.bool)
    scale = torch.from_numpy(result.scale)
    found = ScaledForward(None, scale, result.log_likelihood, result.final, floor)
    return scaled.doubtful(parameters, scaled.make_chain(parameters, chain.evidence, dtype), found)


def accumulate(
    chain: CompiledChain, result: CompiledForward, seed: Tensor, shape: torch.Size
) -> tuple[Parameters, Tensor]:
    """Compute the expected counts; see `scaled.accumulate`."""
    states, width, dtype = shape[0], chain.table.shape[1], chain.table.dtype
    rows = chain.words.shape[1], 1, states, len(chain.vocabulary)
    entering, starts, transitions, by_word = (np.zeros((n, width), dtype) for n in rows)
    loops.run_backward(
        chain.table,
        chain.words,
        chain.lengths,
        chain.initial,
        chain.restart,
        _array(seed),
        *_bounds(dtype),
        result.alpha,
        result.scale,
        entering,
        starts,
        transitions,
        by_word,
    )
    emission = seed.new_empty(shape)
    loops.spread_words(by_word, chain.vocabulary, emission.numpy())
    start, transition = starts[0] * chain.table[0], transitions * chain.table[1 : 1 + states]
    counts = Parameters(
        torch.from_numpy(start[:states]), torch.from_numpy(transition)[:, :states].contiguous(), emission
    )
    return counts, torch.from_numpy(entering)[:, :states]


def best_paths(parameters: Parameters, tokens: Tensor, active: list[int]) -> tuple[Tensor, Tensor]:
    """Return the most likely states [B, T] (−1 beyond a length) and their log-probability with the tokens [B], float64.

    Args:
        tokens: [B, T], longest sequence first.
        active: number of sequences at each step.
    """
    table, log_peak, _, words, _ = _make_table(parameters, tokens, -math.inf)
    path, log_prob = np.full(tokens.shape, -1), np.empty(tokens.shape[0])
    lowest = table.dtype.type(np.finfo(table.dtype).min)
    loops.find_best_paths(table, log_peak, words, _lengths(active), STEPS_PER_SHIFT, lowest, path, log_prob)
    return torch.from_numpy(path), torch.from_numpy(log_prob)


def _make_table(
    parameters: Parameters, tokens: Tensor, lowest: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """Return table, log_peak, vocabulary and words of `loops.prepare_chain`, and the log ratio."""
    arrays = [_array(log_probs) for log_probs in parameters]
    (states, size), (batch, steps), dtype = arrays[2].shape, tokens.shape, arrays[0].dtype
    least = dtype.type(lowest)
    most = min(batch * steps, size + 1)
    table, log_peak = np.empty((1 + states + most, padded_width(states)), dtype), np.empty(most, dtype)
    vocabulary, words = np.empty(most, np.int64), np.empty((steps, batch), np.int64)
    count, log_ratio = loops.prepare_chain(_array(tokens), *arrays, least, table, log_peak, vocabulary, words)
    return table[: 1 + states + count], log_peak[:count], vocabulary[:count], words, log_ratio


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _lengths(active: list[int]) -> np.ndarray:
    """Return the number of steps of each sequence [B], longest first, from the number of sequences at each step."""
    if active[-1] == active[0]:
        return np.full(active[0], len(active))
    ended = np.asarray(active) - np.asarray([*active[1:], 0])
    return np.repeat(np.arange(1, len(active) + 1), ended)[::-1].copy()


def _bounds(dtype: np.dtype) -> tuple[np.generic, np.generic]:
    """Return FLOOR and the least normal number in `dtype`: the loops stay in it."""
    floor = FLOOR[torch.float32 if dtype == np.float32 else torch.float64]
    return dtype.type(floor), dtype.type(np.finfo(dtype).tiny)
