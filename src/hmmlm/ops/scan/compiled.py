"""The scaled recursions of `scaled.py` as compiled loops on a CPU (`hmmlm.ops.loops`), sequences divided among threads.

Every step is normalized, so the bounds on what underflow can lose are those of `scaled` with groups of one step.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.ops import loops
from hmmlm.ops.lanes import LANES, ROWS
from hmmlm.ops.pieces import at_once
from hmmlm.ops.scan import scaled
from hmmlm.ops.scan.problem import Evidence, Parameters
from hmmlm.ops.scan.scaled import ScaledForward, sort_by_length
from hmmlm.ops.threads import run_parts
from hmmlm.ops.tiles import pack, packed_shape, padded_width
from hmmlm.ops.underflow import FLOOR, least_sum

STEPS_PER_SHIFT = 16  # of Viterbi, between two subtractions of the largest score: float32 then suffices for any length
FEW = 4  # states at most whose steps are computed number by number
MOST_ROWS = 64  # sequences that go through a step together: what they share is read once
THREAD_WORK = 2**24  # products of two numbers that take some times as long as a thread to start
CELL_WORK = 128  # products in the time of a cell of the table


class CompiledChain(NamedTuple):
    """A batch prepared for the loops: time-major, longest sequence first, rows padded to W numbers."""

    table: np.ndarray  # [1 + Z + U, W] start, transition and emissions: see `loops.fill_table`
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
    def batch(self) -> tuple[np.ndarray, ...]:
        """What the loops take of the batch."""
        return self.words, self.lengths, self.initial, self.restart


class CompiledForward(NamedTuple):
    """Result of the filter."""

    alpha: np.ndarray  # [(1 + T)·B, W] p(z_t | x_1..t), zero where a sequence has ended, or [0, W]
    scale: np.ndarray  # [T, B] p(x_t | x_1..t−1) / peak of x_t, one where a sequence has ended
    log_likelihood: Tensor  # [B]
    predicted: Tensor  # [B, Z] as in `scaled`
    floor: float
    carry: Tensor | None = None


def make_chain(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> CompiledChain:
    """Convert parameters to probabilities; see `scaled.make_chain`. Products are in the dtype of the parameters."""
    dtype = parameters.log_start.dtype
    ordered, _, order = sort_by_length(evidence)
    table, log_peak, vocabulary, words, log_ratio = _make_table(
        parameters, ordered.tokens, math.log(FLOOR[dtype]), to_probs=True
    )
    (steps, batch), states = words.shape, parameters.log_start.shape[0]
    lengths = np.full(batch, steps) if ordered.lengths is None else _array(ordered.lengths)
    initial = np.empty((0, states), table.dtype)
    if ordered.carry is not None:
        initial = _array(scaled.carried_probs(ordered.carry, dtype))
    restart = np.empty((0, batch), np.bool_) if ordered.restart is None else _array(ordered.restart)
    return CompiledChain(table, log_peak, words, vocabulary, lengths, initial, restart, log_ratio, order, evidence)


def forward(chain: CompiledChain, keep: bool = True) -> CompiledForward:
    """Run the filter; see `scaled.forward`."""
    (steps, batch), states, dtype = chain.words.shape, chain.initial.shape[1], chain.table.dtype
    # Where a sequence has ended, the distributions are zero: products with them must be finite.
    allocate = np.empty if chain.lengths[-1] == steps else np.zeros
    alpha = allocate(((1 + steps) * batch if keep else 0, chain.table.shape[1] + LANES), dtype)
    scale, predicted, log_likelihood = np.ones((steps, batch), dtype), np.empty((batch, states), dtype), np.empty(batch)
    strips, groups = _strips(chain.table, states), _groups(chain.lengths, steps, states)
    run_filter = loops.run_filter_few if states <= FEW else loops.run_filter

    def run(part: int) -> None:
        for group in groups[part]:
            given = chain.table, strips, chain.log_peak, *chain.batch, *_bounds(dtype)
            run_filter(*given, *group, alpha, scale, predicted, log_likelihood)

    run_parts(run, len(groups))
    likelihood, last = torch.from_numpy(log_likelihood.astype(dtype)), torch.from_numpy(predicted)
    return CompiledForward(alpha, scale, likelihood, last, FLOOR[last.dtype])


def find_suspect(parameters: Parameters, chain: CompiledChain, result: CompiledForward) -> Tensor:
    """Return a mask [B] as `scaled.find_suspect`, whose cheap bound decides for most batches."""
    (states,), dtype = parameters.log_start.shape, parameters.log_start.dtype
    floor = FLOOR[dtype]
    margin = math.log(least_sum(states, dtype, floor)) + chain.log_ratio
    least = float(result.scale.min())  # NaN if one is
    if least > 0 and math.log(least) >= margin:
        return torch.zeros(chain.words.shape[1], dtype=torch.bool)
    scale = torch.from_numpy(result.scale)
    found = ScaledForward(None, scale, result.log_likelihood, result.predicted, floor)
    return scaled.find_suspect(parameters, scaled.make_chain(parameters, chain.evidence, dtype), found)


def accumulate(chain: CompiledChain, result: CompiledForward, seed: Tensor, shape: torch.Size) -> Parameters:
    """Compute the expected counts; see `scaled.accumulate`."""
    steps, states, width = len(chain.words), shape[0], chain.table.shape[1]
    dtype, weights = chain.table.dtype, _array(seed)
    strips, groups = _strips(chain.table, states, transposed=True), _groups(chain.lengths, steps, states)
    run_backward = loops.run_backward_few if states <= FEW else loops.run_backward

    def run(part: int) -> tuple[np.ndarray, np.ndarray]:
        transitions = np.zeros((-(-states // ROWS) * ROWS, width), dtype)
        by_word = np.zeros((1 + len(chain.vocabulary), width), dtype)
        for group in groups[part]:
            given = chain.table, strips, *chain.batch, weights, *_bounds(dtype)
            run_backward(*given, *group, result.alpha, result.scale, transitions, by_word)
        return transitions, by_word

    (transitions, by_word), *others = run_parts(run, len(groups))
    for other in others:
        transitions += other[0]
        by_word += other[1]
    emission = seed.new_empty(shape)
    share = _shares(states, len(groups))
    run_parts(lambda k: loops.spread_words(by_word[1:], chain.vocabulary, *share[k], emission.numpy()), len(share))
    start, transition = by_word[0] * chain.table[0], transitions[:states] * chain.table[1 : 1 + states]
    return Parameters(torch.from_numpy(start[:states]), torch.from_numpy(transition)[:, :states].contiguous(), emission)


def best_paths(parameters: Parameters, tokens: Tensor, active: list[int]) -> tuple[Tensor, Tensor]:
    """Return the most likely states [B, T] (−1 beyond a length) and their log-probability with the tokens [B], float64.

    Args:
        tokens: [B, T], longest sequence first.
        active: number of sequences at each step.
    """
    table, log_peak, _, words, _ = _make_table(parameters, tokens, -math.inf, to_probs=False)
    path, log_prob = np.full(tokens.shape, -1), np.empty(tokens.shape[0])
    lengths = (np.asarray(active)[:, None] > np.arange(len(tokens))).sum(0)
    lowest, states = table.dtype.type(np.finfo(table.dtype).min), len(parameters.log_start)
    into, strips = table[1 : 1 + states, :states].T.copy(), _strips(table, states)
    most = max(ROWS, min(MOST_ROWS, at_once(len(active) * table.shape[1]) // ROWS * ROWS))
    groups = _groups(lengths, len(active), states, most)

    def run(part: int) -> None:
        for group in groups[part]:
            loops.find_best_paths(
                table, strips, into, log_peak, words, lengths, STEPS_PER_SHIFT, lowest, *group, path, log_prob
            )

    run_parts(run, len(groups))
    return torch.from_numpy(path), torch.from_numpy(log_prob)


def _make_table(
    parameters: Parameters, tokens: Tensor, lowest: float, to_probs: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """Return table, log_peak, vocabulary, words and log_ratio of a chain.

    The table has logarithms, or with `to_probs` probabilities; those below `lowest` are zero.
    """
    arrays = [_array(log_probs) for log_probs in parameters]
    (states, size), (batch, steps), dtype = arrays[2].shape, tokens.shape, arrays[0].dtype
    least, width, most = dtype.type(lowest), padded_width(states, dtype), min(batch * steps, size + 1)
    vocabulary, words = np.empty(most, np.int64), np.empty((steps, batch), np.int64)
    vocabulary = vocabulary[: loops.index_words(_array(tokens), size, vocabulary, words)]
    table, log_peak = np.empty((1 + states + len(vocabulary), width), dtype), np.empty(len(vocabulary), dtype)
    rows = _shares(len(table), _threads(CELL_WORK * table.size, len(table)))
    low, high = np.full((len(rows), states), np.inf, dtype), np.full((len(rows), states), -np.inf, dtype)

    def fill(part: int) -> None:
        loops.fill_table(*arrays, vocabulary, *rows[part], least, table, log_peak, low[part], high[part])
        if to_probs:
            some = table[slice(*rows[part])]
            np.exp(some, out=some)

    run_parts(fill, len(rows))
    return table, log_peak, vocabulary, words, loops.column_ratio(low, high)


def _strips(table: np.ndarray, states: int, transposed: bool = False) -> np.ndarray:
    """Return the transition matrix of a table, or its transpose, in strips; see `tiles.pack`."""
    strips = np.empty(packed_shape(states, table.dtype), table.dtype)
    pack(table[1 : 1 + states], transposed, strips)
    return strips


def _threads(work: int, most: int) -> int:
    """Return the number of threads for some work, at least one and at most `most`."""
    return max(1, min(torch.get_num_threads(), most, work // THREAD_WORK))


def _groups(lengths: np.ndarray, steps: int, states: int, most: int = MOST_ROWS) -> list[list[tuple[int, int]]]:
    """Return, for each thread, the groups of at most `most` sequences that it computes: first and last of each.

    If lengths [B] differ, each thread has groups of long and of short sequences.
    """
    batch = len(lengths)
    threads = _threads(batch * steps * states**2, -(-batch // ROWS))
    rows = -(-batch // threads)
    count = max(-(-rows // most), 1 if lengths[-1] == steps else 2)
    size = -(-rows // count // ROWS) * ROWS
    groups = [(first, min(first + size, batch)) for first in range(0, batch, size)]
    both = 2 * threads
    return [groups[k::both] + groups[both - 1 - k :: both] for k in range(min(threads, len(groups)))]


def _shares(count: int, parts: int) -> list[tuple[int, int]]:
    """Return first and last of about equal parts of `count`."""
    size = -(-count // parts)
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _bounds(dtype: np.dtype) -> tuple[np.generic, np.generic]:
    """Return FLOOR and the least normal number in `dtype`: the loops stay in it."""
    floor = FLOOR[torch.float32 if dtype == np.float32 else torch.float64]
    return dtype.type(floor), dtype.type(np.finfo(dtype).tiny)
