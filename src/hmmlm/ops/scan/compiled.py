"""The scaled recursions of `scaled.py` as compiled loops, for few states on a CPU (`hmmlm.ops.loops`).

Every step is normalized, so the bounds on what underflow can lose are those of `scaled` with groups of one step.
"""

import math

import numpy as np
import torch
from torch import Tensor

from hmmlm.ops import loops
from hmmlm.ops.common import FLOOR
from hmmlm.ops.scan import scaled
from hmmlm.ops.scan.naive import Evidence, Parameters
from hmmlm.ops.scan.scaled import ScaledChain, ScaledForward, sort_by_length, transition_counts

STEPS_PER_SHIFT = 16  # of Viterbi, between two subtractions of the largest score: float32 then suffices for any length


def make_chain(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> ScaledChain:
    """Convert parameters to probabilities; see `scaled.make_chain`. Products are in the dtype of the parameters."""
    log_start, log_transition, log_emission = parameters
    (tokens, _, initial, restart), active, order = sort_by_length(evidence, log_start.dtype)
    lowest = math.log(FLOOR[log_start.dtype])
    words = loops.prepare_words(*_arrays(tokens, log_emission), lowest)
    vocabulary, index, relative, log_peak = (torch.from_numpy(array) for array in words)
    matrices = _arrays(log_start[None], log_transition)
    start, transition = (torch.from_numpy(loops.probabilities(matrix, lowest)) for matrix in matrices)
    emission = relative.exp_()
    return ScaledChain(start[0], transition, emission, log_peak, index, vocabulary, active, order, initial, restart)


def forward(chain: ScaledChain, keep: bool = True) -> ScaledForward:
    """Run the filter; see `scaled.forward`."""
    (steps, batch), like = chain.words.shape, chain.start
    make = like.new_zeros if chain.active[-1] < batch else like.new_empty
    alpha, predicted = (make(steps if keep else 0, batch, like.shape[0]) for _ in range(2))
    scale, final = like.new_ones(steps, batch), like.new_empty(batch, like.shape[0])
    log_likelihood = np.empty(batch)
    loops.run_filter(
        *_arrays(chain.start, chain.transition, chain.emission, chain.log_peak, chain.words),
        _lengths(chain.active),
        *_optional(chain),
        *_bounds(like),
        *_arrays(alpha, predicted, scale, final),
        log_likelihood,
    )
    total = torch.from_numpy(log_likelihood).to(like.dtype)
    kept = (alpha, predicted) if keep else (None, None)
    return ScaledForward(kept[0], kept[1], scale, total, final, FLOOR[like.dtype])


def doubtful(parameters: Parameters, chain: ScaledChain, result: ScaledForward) -> Tensor:
    """Return a mask [B] as `scaled.doubtful`, whose cheap bound decides for most batches."""
    states, dtype = chain.start.shape[0], chain.start.dtype
    log_ratio = loops.largest_log_ratio(*_arrays(parameters.log_transition))
    margin = math.log(scaled.least_mass(result.floor, states, dtype)) + log_ratio
    least = float(result.scale.amin())
    if least > 0 and math.log(least) >= margin:
        return torch.zeros(result.scale.shape[1], dtype=torch.bool)
    return scaled.doubtful(parameters, chain, result)


def accumulate(chain: ScaledChain, result: ScaledForward, seed: Tensor, shape: torch.Size) -> tuple[Parameters, Tensor]:
    """Compute the expected counts; see `scaled.accumulate`."""
    assert result.alpha is not None and result.predicted is not None
    ragged = chain.active[-1] < chain.words.shape[1]
    weights = torch.zeros_like(result.alpha) if ragged else torch.empty_like(result.alpha)
    by_word = torch.zeros_like(chain.emission)
    loops.run_backward(
        *_arrays(chain.transition.t().contiguous(), chain.emission, chain.words),
        _lengths(chain.active),
        _optional(chain)[1],
        seed.numpy(),
        *_bounds(seed),
        *_arrays(result.alpha, result.predicted, result.scale, weights, by_word),
    )
    start, transition = transition_counts(chain, result.alpha, weights)
    emission = by_word.new_zeros(shape)
    loops.spread_words(*_arrays(by_word, chain.vocabulary, emission))
    return Parameters(start, transition, emission), weights[0]


def best_paths(parameters: Parameters, tokens: Tensor, active: list[int]) -> tuple[Tensor, Tensor]:
    """Return the most likely states [B, T] (−1 beyond a length) and their log-probability with the tokens [B], float64.

    Args:
        tokens: [B, T], longest sequence first.
        active: number of sequences at each step.
    """
    log_start, log_transition, log_emission = parameters
    _, words, relative, log_peak = loops.prepare_words(*_arrays(tokens, log_emission), -math.inf)
    path, log_prob = np.full(tokens.shape, -1), np.empty(tokens.shape[0])
    lowest = _bounds(log_start, torch.finfo(log_start.dtype).min)
    loops.find_best_paths(
        *_arrays(log_start, log_transition),
        relative,
        log_peak,
        words,
        _lengths(active),
        STEPS_PER_SHIFT,
        *lowest,
        path,
        log_prob,
    )
    return torch.from_numpy(path), torch.from_numpy(log_prob)


def _arrays(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    return tuple(tensor.detach().contiguous().numpy() for tensor in tensors)


def _lengths(active: list[int]) -> np.ndarray:
    """Return the number of steps of each sequence [B], longest first, from the number of sequences at each step."""
    ended = np.asarray(active) - np.asarray([*active[1:], 0])
    return np.repeat(np.arange(1, len(active) + 1), ended)[::-1].copy()


def _optional(chain: ScaledChain) -> tuple[np.ndarray, np.ndarray]:
    """Return `initial` [B, Z] and `restart` [T, B], each without rows if there is none."""
    dtype = chain.start.numpy().dtype
    initial, restart = np.empty((0, chain.start.shape[0]), dtype), np.empty((0, chain.words.shape[1]), np.bool_)
    if chain.initial is not None:
        (initial,) = _arrays(chain.initial)
    if chain.restart is not None:
        (restart,) = _arrays(chain.restart)
    return initial, restart


def _bounds(like: Tensor, *values: float) -> tuple[np.generic, ...]:
    """Return values (by default FLOOR and the least normal number) in the dtype of `like`: the loops stay in it."""
    scalar = like.numpy().dtype.type
    return tuple(scalar(value) for value in values or (FLOOR[like.dtype], torch.finfo(like.dtype).tiny))
