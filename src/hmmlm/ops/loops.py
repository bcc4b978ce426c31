"""Recursions of small dense HMMs on a CPU as compiled loops (numba, the extra `fast`).

With few states a step takes less time than the calls of a tensor library for it. The functions take NumPy arrays and
write their results into arrays; shapes as in `hmmlm.ops.scan.scaled`, longest sequence first. They are compiled at
the first call, and the compiled code is cached on disk.

A tile of ROWS sequences runs through all its steps, so that what it multiplies stays in the cache. Rows of matrices are
padded to W numbers, whole vectors (`hmmlm.ops.lanes`). Single elements are assigned because a view or a slice takes
longer than a row of few states.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from hmmlm.ops import lanes
from hmmlm.ops.lanes import LANES

ROWS = 8  # sequences of a tile
LEAST_PRODUCT = 1e-200  # of the scales of several steps, whose logarithm is taken at once


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile a function: sums may be reordered and products fused; infinities and NaN keep their meaning."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package nor the home directory can be written to
        return njit(**options)(function)


@_compiled
def _multiply(values, matrix, out):  # type: ignore[no-untyped-def]
    """Compute out = values @ matrix for values [ROWS, …] and matrix [Z, W], with W a multiple of LANES.

    The sums of ROWS × LANES cells stay in registers: eight independent ones, which hides the latency of additions.
    """
    nothing = lanes.repeat(matrix.dtype.type(0))
    for j in range(0, matrix.shape[1], LANES):
        p = q = r = s = u = v = w = x = nothing
        for i in range(len(matrix)):
            part = lanes.load(matrix, i, j)
            p = lanes.add_product(p, values[0, i], part)
            q = lanes.add_product(q, values[1, i], part)
            r = lanes.add_product(r, values[2, i], part)
            s = lanes.add_product(s, values[3, i], part)
            u = lanes.add_product(u, values[4, i], part)
            v = lanes.add_product(v, values[5, i], part)
            w = lanes.add_product(w, values[6, i], part)
            x = lanes.add_product(x, values[7, i], part)
        lanes.store(out, 0, j, p)
        lanes.store(out, 1, j, q)
        lanes.store(out, 2, j, r)
        lanes.store(out, 3, j, s)
        lanes.store(out, 4, j, u)
        lanes.store(out, 5, j, v)
        lanes.store(out, 6, j, w)
        lanes.store(out, 7, j, x)


@_compiled
def _add_products(before, after, out):  # type: ignore[no-untyped-def]
    """Add beforeᵀ @ after to out [Z, W], for before and after [ROWS, W] with W a multiple of LANES."""
    for j in range(0, out.shape[1], LANES):
        p, q, r, s = lanes.load(after, 0, j), lanes.load(after, 1, j), lanes.load(after, 2, j), lanes.load(after, 3, j)
        u, v, w, x = lanes.load(after, 4, j), lanes.load(after, 5, j), lanes.load(after, 6, j), lanes.load(after, 7, j)
        for i in range(len(out)):
            near = lanes.add_product(lanes.load(out, i, j), before[0, i], p)
            near = lanes.add_product(near, before[1, i], q)
            near = lanes.add_product(near, before[2, i], r)
            near = lanes.add_product(near, before[3, i], s)
            near = lanes.add_product(near, before[4, i], u)
            near = lanes.add_product(near, before[5, i], v)
            near = lanes.add_product(near, before[6, i], w)
            lanes.store(out, i, j, lanes.add_product(near, before[7, i], x))


@_compiled
def _log(value):  # type: ignore[no-untyped-def]
    """Compute log(value) in float64; −inf for zero."""
    return -np.inf if value == 0 else math.log(np.float64(value))


@_compiled
def _index_words(tokens, size, vocabulary, words):  # type: ignore[no-untyped-def]
    """Write the distinct tokens, sorted, to `vocabulary`, their indices to words [T, B]; return how many there are."""
    (batch, steps), row = tokens.shape, np.zeros(size + 1, np.int32)
    for b in range(batch):
        for t in range(steps):
            if tokens[b, t] < -1 or tokens[b, t] >= size:
                raise IndexError("token outside the vocabulary")
            row[tokens[b, t] + 1] = 1
    count = 0
    for v in range(size + 1):
        if row[v]:
            vocabulary[count] = v - 1
            row[v] = count
            count += 1
    for b in range(batch):
        for t in range(steps):
            words[t, b] = row[tokens[b, t] + 1]
    return count


@_compiled
def _gather_scores(log_emission, vocabulary, lowest, relative, log_peak):  # type: ignore[no-untyped-def]
    """Write the scores of the words in `vocabulary` [U], relative to their largest, and the largest.

    The scores are log p(word | z), in relative [U, ≥ Z]: −inf if they are below `lowest` and in further columns, zero
    for a missing token. The largest, in log_peak [U], is zero if all are −inf.
    """
    states, width, dtype = len(log_emission), relative.shape[1], log_emission.dtype
    for first in range(0, width, LANES):  # few rows at a time, which are read from left to right
        for u in range(len(vocabulary)):
            for z in range(first, first + LANES):
                if z >= states:
                    relative[u, z] = -np.inf
                elif vocabulary[u] < 0:
                    relative[u, z] = 0
                else:
                    relative[u, z] = log_emission[z, vocabulary[u]]
    for u in range(len(vocabulary)):
        most = lanes.load(relative, u, 0)
        for z in range(LANES, width, LANES):
            most = lanes.maximum(most, lanes.load(relative, u, z))
        peak = lanes.largest(most)
        log_peak[u] = dtype.type(0) if peak == -np.inf else peak
        for z in range(0, width, LANES):
            part = lanes.add_number(lanes.load(relative, u, z), -log_peak[u])
            lanes.store(relative, u, z, lanes.drop_below(part, lowest))


@_compiled
def prepare_chain(  # type: ignore[no-untyped-def]
    tokens, log_start, log_transition, log_emission, lowest, table, log_peak, vocabulary, words
):
    """Write the logarithms of a chain to its table: those below `lowest`, and further columns, are −inf.

    Args:
        tokens: [B, T].
        table: [1 + Z + n, W] the start distribution, the transition matrix and the emissions of the words that occur
            (see `_gather_scores`), with W = padded_width(Z) and n the least of B·T and V + 1.
        log_peak, vocabulary: [n] of the words; see `_gather_scores`, `_index_words`.
        words: [T, B] index in `vocabulary` of each token.

    Returns:
        The number of words that occur, and the largest difference between two entries of a column of log_transition:
        infinite if only some entries are −inf.
    """
    states, width = len(log_start), table.shape[1]
    count = _index_words(tokens, log_emission.shape[1], vocabulary, words)
    _gather_scores(log_emission, vocabulary[:count], lowest, table[1 + states :], log_peak)
    low, high = np.full(states, np.inf, table.dtype), np.full(states, -np.inf, table.dtype)
    for i in range(1 + states):
        for z in range(states):
            score = log_transition[i - 1, z] if i else log_start[z]
            table[i, z] = -np.inf if score < lowest else score
            if i:
                low[z], high[z] = min(low[z], score), max(high[z], score)
        for z in range(states, width):
            table[i, z] = -np.inf
    log_ratio = 0.0
    for z in range(states):
        if high[z] > -np.inf:  # otherwise no transition leads to the state, which has no mass to lose
            log_ratio = max(log_ratio, high[z] - low[z])
    return count, log_ratio


@_compiled
def spread_words(by_word, vocabulary, out):  # type: ignore[no-untyped-def]
    """Write by_word [U, Z] to the columns `vocabulary` [U] of out [Z, V], and zero to the others; −1 is no column."""
    first = 1 if vocabulary[0] < 0 else 0
    for z in range(len(out)):
        for v in range(out.shape[1]):
            out[z, v] = 0
        for u in range(first, len(vocabulary)):
            out[z, vocabulary[u]] = by_word[u, z]


@_compiled
def run_filter(  # type: ignore[no-untyped-def]
    table, log_peak, words, lengths, initial, restart, floor, tiny, alpha, scale, final, log_likelihood
):
    """Run the filter, normalized at every step; values below `floor` become zero.

    Args:
        table: [1 + Z + U, W] probabilities; see `prepare_chain`.
        lengths: [B], longest first.
        initial: [B, Z], or [0, Z] if the chains start at position 0.
        restart: [T, B], or [0, B].
        alpha: [T·B, W] with W = padded_width(Z), or [0, W] if it is not kept.
        final: [B, Z] the filtered distribution of the last step.
        log_likelihood: [B] in float64.

    Returns:
        The least scale; NaN if one is NaN.
    """
    (batch, states), width, dtype = final.shape, table.shape[1], table.dtype
    zero, one, least = dtype.type(0), dtype.type(1), dtype.type(1)
    matrix, seen = table[1 : 1 + states], 1 + states
    here, guess = np.zeros((ROWS, width), dtype), np.zeros((ROWS, width), dtype)
    likelihood = np.empty(ROWS)
    for first in range(0, batch, ROWS):
        n = min(ROWS, batch - first)
        for b in range(n):
            likelihood[b] = 1.0
            log_likelihood[first + b] = 0.0
            if len(initial):
                for z in range(states):
                    here[b, z] = initial[first + b, z]
        for t in range(lengths[first]):
            while lengths[first + n - 1] <= t:
                n -= 1
            if t or len(initial):
                _multiply(here, matrix, guess)
            for b in range(n):
                row, word = first + b, words[t, first + b]
                begins = (t == 0 and len(initial) == 0) or (len(restart) > 0 and restart[t, row])
                if begins:
                    for z in range(0, width, LANES):
                        lanes.store(guess, b, z, lanes.load(table, 0, z))
                sums = lanes.repeat(zero)
                for z in range(0, width, LANES):
                    part = lanes.multiply(lanes.load(guess, b, z), lanes.load(table, seen + word, z))
                    sums = lanes.add(sums, part)
                    lanes.store(here, b, z, part)
                mass = lanes.total(sums)
                scale[t, row] = mass
                if mass < least or mass != mass:
                    least = mass
                log_likelihood[row] += log_peak[word]
                product = likelihood[b] * mass
                if product < LEAST_PRODUCT or lengths[row] == t + 1:
                    log_likelihood[row] += _log(likelihood[b]) + _log(mass)
                    product = 1.0
                likelihood[b] = product
                factor = lanes.repeat(one / max(mass, tiny))
                for z in range(0, width, LANES):
                    part = lanes.multiply(lanes.load(here, b, z), factor)
                    lanes.store(here, b, z, lanes.zero_below(part, part, floor))
                if len(alpha):
                    for z in range(0, width, LANES):
                        lanes.store(alpha, t * batch + row, z, lanes.load(here, b, z))
                if lengths[row] == t + 1:
                    for z in range(states):
                        final[row, z] = here[b, z]
    return least


@_compiled
def run_backward(  # type: ignore[no-untyped-def]
    table, words, lengths, initial, restart, seed, floor, tiny, alpha, scale, entering, starts, transitions, by_word
):
    """Add up the posteriors of starts, transitions and words, with the weights w_t of `scaled.backward`.

    Args:
        table, lengths, initial, restart, alpha, scale: as in `run_filter`.
        seed: [B] the weight of each sequence.
        entering: [B, W] is set to w_0, zero where the chain starts at position 0.
        starts: [1, W] Σ w_t over the positions where a chain starts.
        transitions: [Z, W] Σ α_t−1(i) w_t(j) over the others.
        by_word: [U, W] the posteriors predicted_t w_t, which are α_t times the message from the next step.
    """
    batch, (states, width), dtype = words.shape[1], transitions.shape, table.dtype
    zero, one, seen, reverse = dtype.type(0), dtype.type(1), 1 + states, np.zeros((states, width), dtype)
    for i in range(states):
        for j in range(states):
            reverse[j, i] = table[1 + i, j]
    before, here = np.zeros((ROWS, width), dtype), np.zeros((ROWS, width), dtype)
    message = np.zeros((ROWS, width), dtype)
    for first in range(0, batch, ROWS):
        most, n = min(ROWS, batch - first), 0
        here[:] = zero
        before[:] = zero
        for t in range(lengths[first] - 1, -1, -1):
            if n:
                _multiply(here, reverse, message)
            while n < most and lengths[first + n] > t:
                n += 1
            for b in range(n):
                row, word = first + b, words[t, first + b]
                last = lengths[row] == t + 1 or (len(restart) > 0 and restart[t + 1, row])
                begins = (t == 0 and len(initial) == 0) or (len(restart) > 0 and restart[t, row])
                factor = lanes.repeat(one / max(scale[t, row], tiny))
                for z in range(0, width, LANES):
                    arrived = lanes.repeat(seed[row]) if last else lanes.load(message, b, z)
                    filtered = lanes.load(alpha, t * batch + row, z)
                    posterior = lanes.zero_below(lanes.multiply(filtered, arrived), filtered, floor)
                    lanes.store(by_word, word, z, lanes.add(lanes.load(by_word, word, z), posterior))
                    weight = lanes.multiply(lanes.multiply(lanes.load(table, seen + word, z), factor), arrived)
                    weight = lanes.zero_below(weight, filtered, floor)
                    if begins:
                        lanes.store(starts, 0, z, lanes.add(lanes.load(starts, 0, z), weight))
                        weight = lanes.repeat(zero)
                    elif t:
                        lanes.store(before, b, z, lanes.load(alpha, (t - 1) * batch + row, z))
                    lanes.store(here, b, z, weight)
                    if t == 0:
                        lanes.store(entering, row, z, weight)
                if t == 0 and len(initial):
                    for z in range(states):
                        before[b, z] = initial[row, z]
            if t or len(initial):
                _add_products(before, here, transitions)


@_compiled
def _multiply_max(values, log_matrix, out):  # type: ignore[no-untyped-def]
    """Compute out[b, j] = max_i values[b, i] + log_matrix[i, j]; shapes as in `_multiply`."""
    nothing = lanes.repeat(log_matrix.dtype.type(-np.inf))
    for j in range(0, log_matrix.shape[1], LANES):
        p = q = r = s = u = v = w = x = nothing
        for i in range(len(log_matrix)):
            part = lanes.load(log_matrix, i, j)
            p = lanes.maximum(p, lanes.add_number(part, values[0, i]))
            q = lanes.maximum(q, lanes.add_number(part, values[1, i]))
            r = lanes.maximum(r, lanes.add_number(part, values[2, i]))
            s = lanes.maximum(s, lanes.add_number(part, values[3, i]))
            u = lanes.maximum(u, lanes.add_number(part, values[4, i]))
            v = lanes.maximum(v, lanes.add_number(part, values[5, i]))
            w = lanes.maximum(w, lanes.add_number(part, values[6, i]))
            x = lanes.maximum(x, lanes.add_number(part, values[7, i]))
        lanes.store(out, 0, j, p)
        lanes.store(out, 1, j, q)
        lanes.store(out, 2, j, r)
        lanes.store(out, 3, j, s)
        lanes.store(out, 4, j, u)
        lanes.store(out, 5, j, v)
        lanes.store(out, 6, j, w)
        lanes.store(out, 7, j, x)


@_compiled
def find_best_paths(  # type: ignore[no-untyped-def]
    table, log_peak, words, lengths, shift, lowest, path, log_prob
):
    """Run Viterbi's algorithm: write the states to path [B, T] and their log-probability to log_prob [B] (float64).

    Args:
        table: [1 + Z + U, W] logarithms; see `prepare_chain`.
        lengths: [B], longest first.
        shift: number of steps after which the largest score is subtracted, so that float32 suffices.
        lowest: the least finite number.
    """
    batch, states, width = words.shape[1], len(table) - 1 - len(log_peak), table.shape[1]
    matrix, seen = table[1 : 1 + states], 1 + states
    kept = np.full((lengths[0], ROWS, width), -np.inf, table.dtype)
    into = matrix[:, :states].T.copy()
    for first in range(0, batch, ROWS):
        n = min(ROWS, batch - first)
        for b in range(n):
            log_prob[first + b] = 0.0
        for t in range(lengths[first]):
            while lengths[first + n - 1] <= t:
                n -= 1
            here = kept[t]
            if t:
                _multiply_max(kept[t - 1], matrix, here)
            for b in range(n):
                word = words[t, first + b]
                for z in range(0, width, LANES):
                    part = lanes.load(here, b, z) if t else lanes.load(table, 0, z)
                    lanes.store(here, b, z, lanes.add(part, lanes.load(table, seen + word, z)))
                log_prob[first + b] += log_peak[word]
                if t % shift == 0:
                    peak = lowest
                    for z in range(states):
                        peak = max(peak, here[b, z])
                    log_prob[first + b] += peak
                    for z in range(states):
                        here[b, z] -= peak
        for b in range(min(ROWS, batch - first)):
            following = 0
            for t in range(lengths[first + b] - 1, -1, -1):
                last = t == lengths[first + b] - 1
                best, state = -np.inf, 0
                for z in range(states):
                    score = kept[t, b, z] if last else kept[t, b, z] + into[following, z]
                    if score > best:
                        best, state = score, z
                if last:
                    log_prob[first + b] += best
                path[first + b, t] = following = state
