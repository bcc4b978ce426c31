"""Recursions of small dense HMMs on a CPU as compiled loops (numba, the extra `fast`).

With few states a step takes less time than the calls of a tensor library for it. The functions take NumPy arrays and
write their results into arrays; shapes as in `hmmlm.ops.scan.scaled`, longest sequence first. They are compiled at
the first call, and the compiled code is cached on disk.

The innermost loop of a step runs over the sequences of a tile, values [Z, n]: it is long enough to be vectorized.
Single elements are assigned because a view or a slice takes longer than a row of few states.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

TILE = 64  # sequences
LEAST_PRODUCT = 1e-200  # of the scales of several steps, whose logarithm is taken at once


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile a function: sums may be reordered and products fused; infinities and NaN keep their meaning."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package nor the home directory can be written to
        return njit(**options)(function)


@_compiled
def _multiply(matrix, values, out, n):  # type: ignore[no-untyped-def]
    """Compute out[j, :n] = Σ_i matrix[i, j] values[i, :n]; eight terms per pass over a row of `out`."""
    states = len(matrix)
    grouped = states - states % 8
    for j in range(states):
        for b in range(n):
            out[j, b] = 0
        for i in range(0, grouped, 8):
            p, q, r, s = matrix[i, j], matrix[i + 1, j], matrix[i + 2, j], matrix[i + 3, j]
            u, v, w, x = matrix[i + 4, j], matrix[i + 5, j], matrix[i + 6, j], matrix[i + 7, j]
            for b in range(n):
                near = p * values[i, b] + q * values[i + 1, b] + r * values[i + 2, b] + s * values[i + 3, b]
                far = u * values[i + 4, b] + v * values[i + 5, b] + w * values[i + 6, b] + x * values[i + 7, b]
                out[j, b] += near + far
        for i in range(grouped, states):
            p = matrix[i, j]
            for b in range(n):
                out[j, b] += p * values[i, b]


@_compiled
def _log(value):  # type: ignore[no-untyped-def]
    """Compute log(value) in float64; −inf for zero."""
    return -np.inf if value == 0 else math.log(np.float64(value))


@_compiled
def probabilities(log_values, lowest):  # type: ignore[no-untyped-def]
    """Return exp(log_values) [n, m], zero where a logarithm is below `lowest`."""
    result = np.empty_like(log_values)
    for i in range(len(result)):
        for j in range(result.shape[1]):
            score = log_values[i, j]
            result[i, j] = 0 if score < lowest else math.exp(score)
    return result


@_compiled
def prepare_words(tokens, log_emission, lowest):  # type: ignore[no-untyped-def]
    """Return the distinct tokens [U], sorted, the index in them of each token [T, B], and the scores of each.

    The scores are log p(word | z) [U, Z] relative to their largest (−inf if they are below `lowest`), and the largest
    [U] (zero if all are −inf); the scores of a missing token are zero. Tokens are [B, T], log_emission is [Z, V].
    """
    (batch, steps), (states, size), dtype = tokens.shape, log_emission.shape, log_emission.dtype
    row = np.zeros(size + 1, np.int32)
    for b in range(batch):
        for t in range(steps):
            if tokens[b, t] < -1 or tokens[b, t] >= size:
                raise IndexError("token outside the vocabulary")
            row[tokens[b, t] + 1] = 1
    vocabulary = np.empty(row.sum(), np.int64)
    count = 0
    for v in range(size + 1):
        if row[v]:
            vocabulary[count] = v - 1
            row[v] = count
            count += 1
    words = np.empty((steps, batch), np.int64)
    for b in range(batch):
        for t in range(steps):
            words[t, b] = row[tokens[b, t] + 1]
    relative, peak = np.empty((count, states), dtype), np.full(count, -np.inf, dtype)
    for z in range(states):
        for u in range(count):
            score = dtype.type(0) if vocabulary[u] < 0 else log_emission[z, vocabulary[u]]
            relative[u, z] = score
            peak[u] = peak[u] if peak[u] >= score else score  # a NaN stays
    for u in range(count):
        if peak[u] == -np.inf:
            peak[u] = 0
        for z in range(states):
            score = relative[u, z] - peak[u]
            relative[u, z] = -np.inf if score < lowest else score
    return vocabulary, words, relative, peak


@_compiled
def spread_words(by_word, vocabulary, out):  # type: ignore[no-untyped-def]
    """Write by_word [U, Z] to the columns `vocabulary` [U] of out [Z, V]; −1 is not a column."""
    for z in range(len(out)):
        for u in range(len(vocabulary)):
            if vocabulary[u] >= 0:
                out[z, vocabulary[u]] = by_word[u, z]


@_compiled
def run_filter(  # type: ignore[no-untyped-def]
    start, transition, emission, log_peak, words, lengths, initial, restart, floor, tiny,
    alpha, predicted, scale, final, log_likelihood,
):  # fmt: skip
    """Run the filter, normalized at every step; values below `floor` become zero.

    Args:
        initial: [B, Z], or [0, Z] if the chains start at position 0.
        restart: [T, B], or [0, B].
        alpha, predicted: [T, B, Z], or [0, B, Z] if they are not kept.
        final: [B, Z] the filtered distribution of the last step.
        log_likelihood: [B] in float64.
    """
    states, kept, zero, one = len(start), len(alpha) > 0, start.dtype.type(0), start.dtype.type(1)
    here, guess = np.empty((states, TILE), start.dtype), np.empty((states, TILE), start.dtype)
    mass, likelihood = np.empty(TILE, start.dtype), np.empty(TILE)
    for first in range(0, words.shape[1], TILE):
        n = min(TILE, words.shape[1] - first)
        for b in range(n):
            likelihood[b] = 1.0
            log_likelihood[first + b] = 0.0
            if len(initial):
                for z in range(states):
                    here[z, b] = initial[first + b, z]
        for t in range(lengths[first]):
            while lengths[first + n - 1] <= t:
                n -= 1
            if t or len(initial):
                _multiply(transition, here, guess, n)
            for b in range(n):
                if (t == 0 and len(initial) == 0) or (len(restart) and restart[t, first + b]):
                    for z in range(states):
                        guess[z, b] = start[z]
                word = words[t, first + b]
                for z in range(states):
                    here[z, b] = guess[z, b] * emission[word, z]
                mass[b] = zero
                log_likelihood[first + b] += log_peak[word]
            for z in range(states):
                for b in range(n):
                    mass[b] += here[z, b]
            for b in range(n):
                scale[t, first + b] = mass[b]
                product = likelihood[b] * mass[b]
                if product < LEAST_PRODUCT or lengths[first + b] == t + 1:
                    log_likelihood[first + b] += _log(likelihood[b]) + _log(mass[b])
                    product = 1.0
                likelihood[b] = product
                mass[b] = one / max(mass[b], tiny)
            for z in range(states):
                for b in range(n):
                    share = here[z, b] * mass[b]
                    here[z, b] = zero if share < floor else share
            if kept:
                for b in range(n):
                    for z in range(states):
                        alpha[t, first + b, z] = here[z, b]
                        predicted[t, first + b, z] = guess[z, b]
            for b in range(n):
                if lengths[first + b] == t + 1:
                    for z in range(states):
                        final[first + b, z] = here[z, b]


@_compiled
def run_backward(  # type: ignore[no-untyped-def]
    reverse, emission, words, lengths, restart, seed, floor, tiny, alpha, predicted, scale, weights, by_word
):
    """Compute the weights w_t [T, B, Z] of `scaled.backward`, and add the posteriors to by_word [U, Z].

    Args:
        reverse: [Z, Z] the transposed transition matrix.
        seed: [B] the weight of each sequence.
    """
    states, zero, one = len(reverse), seed.dtype.type(0), seed.dtype.type(1)
    here, message = np.empty((states, TILE), seed.dtype), np.empty((states, TILE), seed.dtype)
    for first in range(0, words.shape[1], TILE):
        most, n = min(TILE, words.shape[1] - first), 0
        for t in range(lengths[first] - 1, -1, -1):
            if n:
                _multiply(reverse, here, message, n)
            while n < most and lengths[first + n] > t:
                n += 1
            for b in range(n):
                row = first + b
                if lengths[row] == t + 1 or (len(restart) and restart[t + 1, row]):
                    for z in range(states):
                        message[z, b] = seed[row]
                word, factor = words[t, row], one / max(scale[t, row], tiny)
                for z in range(states):
                    weight = zero if alpha[t, row, z] < floor else emission[word, z] * factor * message[z, b]
                    here[z, b] = weight
                    weights[t, row, z] = weight
                    by_word[word, z] += predicted[t, row, z] * weight


@_compiled
def largest_log_ratio(log_transition):  # type: ignore[no-untyped-def]
    """Return the largest difference between two entries of a column; infinite if only some entries are −inf."""
    result = 0.0
    for j in range(log_transition.shape[1]):
        low, high = np.inf, -np.inf
        for i in range(len(log_transition)):
            low, high = min(low, log_transition[i, j]), max(high, log_transition[i, j])
        if high > -np.inf:
            result = max(result, high - low)
    return result


@_compiled
def _multiply_max(log_matrix, values, out, n):  # type: ignore[no-untyped-def]
    """Compute out[j, :n] = max_i log_matrix[i, j] + values[i, :n]; four terms per pass over a row of `out`."""
    states = len(log_matrix)
    grouped = states - states % 4
    for j in range(states):
        for b in range(n):
            out[j, b] = -np.inf
        for i in range(0, grouped, 4):
            p, q, r, s = log_matrix[i, j], log_matrix[i + 1, j], log_matrix[i + 2, j], log_matrix[i + 3, j]
            for b in range(n):
                near, far = p + values[i, b], q + values[i + 1, b]
                near = near if near > far else far
                last, far = r + values[i + 2, b], s + values[i + 3, b]
                last = last if last > far else far
                near = near if near > last else last
                out[j, b] = near if near > out[j, b] else out[j, b]
        for i in range(grouped, states):
            p = log_matrix[i, j]
            for b in range(n):
                near = p + values[i, b]
                out[j, b] = near if near > out[j, b] else out[j, b]


@_compiled
def find_best_paths(  # type: ignore[no-untyped-def]
    log_start, log_transition, relative, log_peak, words, lengths, shift, lowest, path, log_prob
):
    """Run Viterbi's algorithm: write the states to path [B, T] and their log-probability to log_prob [B] (float64).

    Args:
        relative, log_peak, words: see `prepare_words`.
        shift: number of steps after which the largest score is subtracted, so that float32 suffices.
        lowest: the least finite number.
    """
    states = len(log_start)
    kept = np.empty((lengths[0], states, TILE), log_start.dtype)
    for first in range(0, words.shape[1], TILE):
        n = min(TILE, words.shape[1] - first)
        for b in range(n):
            log_prob[first + b] = 0.0
        for t in range(lengths[first]):
            while lengths[first + n - 1] <= t:
                n -= 1
            if t:
                _multiply_max(log_transition, kept[t - 1], kept[t], n)
            for b in range(n):
                word = words[t, first + b]
                for z in range(states):
                    kept[t, z, b] = (kept[t, z, b] if t else log_start[z]) + relative[word, z]
                log_prob[first + b] += log_peak[word]
                if t % shift == 0:
                    peak = lowest
                    for z in range(states):
                        peak = max(peak, kept[t, z, b])
                    log_prob[first + b] += peak
                    for z in range(states):
                        kept[t, z, b] -= peak
        for b in range(min(TILE, words.shape[1] - first)):
            following = 0
            for t in range(lengths[first + b] - 1, -1, -1):
                last = t == lengths[first + b] - 1
                best, state = -np.inf, 0
                for z in range(states):
                    score = kept[t, z, b] if last else kept[t, z, b] + log_transition[z, following]
                    if score > best:
                        best, state = score, z
                if last:
                    log_prob[first + b] += best
                path[first + b, t] = following = state
