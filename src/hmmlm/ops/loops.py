"""Recursions of dense HMMs on a CPU as compiled loops (numba, the extra `fast`).

With few states a step takes less time than the calls of a tensor library for it; with more, what a step reads and
writes stays in the cache, and threads do not wait for each other at every step. The functions take NumPy arrays and
write their results into arrays; shapes as in `hmmlm.ops.scan.scaled`, longest sequence first. They are compiled at
the first call, and the compiled code is cached on disk.

A call computes some sequences, columns or words (`first` up to `last`), so that calls in several threads compute all of
them. Rows of matrices are padded to W numbers (`hmmlm.ops.tiles`). Single elements are assigned because a view or a
slice takes longer than a row of few states.
"""

import math

import numpy as np

from hmmlm.ops import lanes
from hmmlm.ops.lanes import LANES, ROWS
from hmmlm.ops.tiles import add_outer_products, compiled, multiply, multiply_max

STEPS = 4  # whose transition counts are added together: fewer passes over the matrix of counts
LEAST_PRODUCT = 1e-200  # of the scales of several steps, whose logarithm is taken at once


@compiled
def _log(value):  # type: ignore[no-untyped-def]
    """Compute log(value) in float64; −inf for zero."""
    return -np.inf if value == 0 else math.log(np.float64(value))


@compiled
def index_words(tokens, size, vocabulary, words):  # type: ignore[no-untyped-def]
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


@compiled
def fill_table(  # type: ignore[no-untyped-def]
    log_start, log_transition, log_emission, vocabulary, first, last, lowest, table, log_peak, low, high
):
    """Write some rows of the table of a chain: logarithms, −inf if they are below `lowest` and in further columns.

    Args:
        vocabulary: [U] the words that occur; the score of −1, a missing token, is zero.
        table: [1 + Z + U, W] the start distribution, the transition matrix and the emissions of those words, relative
            to the largest of each.
        log_peak: [U] that largest score; zero if all are −inf.
        low, high: [Z] least and largest of the transition scores so far, by column.
    """
    states, width, dtype = len(log_start), table.shape[1], table.dtype
    seen = 1 + states
    for row in range(first, min(last, seen)):
        for z in range(states):
            score = log_transition[row - 1, z] if row else log_start[z]
            table[row, z] = score
            if row:
                low[z], high[z] = min(low[z], score), max(high[z], score)
    for left in range(0, states, LANES):  # few rows at a time, which are read from left to right
        for row in range(max(first, seen), last):
            word = vocabulary[row - seen]
            for z in range(left, min(left + LANES, states)):
                table[row, z] = 0 if word < 0 else log_emission[z, word]
    for row in range(first, last):
        for z in range(states, width):
            table[row, z] = -np.inf
        peak = dtype.type(0)
        if row >= seen:
            most = lanes.load(table, row, 0)
            for z in range(LANES, width, LANES):
                most = lanes.maximum(most, lanes.load(table, row, z))
            peak = lanes.largest(most)
            if peak == -np.inf:
                peak = dtype.type(0)
            log_peak[row - seen] = peak
        for z in range(0, width, LANES):
            part = lanes.add_number(lanes.load(table, row, z), -peak)
            lanes.store(table, row, z, lanes.drop_below(part, lowest))


@compiled
def column_ratio(low, high):  # type: ignore[no-untyped-def]
    """Return the largest difference of high and low [parts, Z] over columns, of the extremes of the parts.

    A column of −inf belongs to a state without incoming transitions, which has no mass to lose.
    """
    most = 0.0
    for z in range(low.shape[1]):
        least, largest = low[0, z], high[0, z]
        for part in range(1, len(low)):
            least, largest = min(least, low[part, z]), max(largest, high[part, z])
        if largest > -np.inf:
            most = max(most, largest - least)
    return most


@compiled
def spread_words(by_word, vocabulary, first, last, out):  # type: ignore[no-untyped-def]
    """Write some columns of by_word [U, ≥ Z] to out [Z, V], in the columns `vocabulary` [U]; zero to the others.

    −1 is no column.
    """
    missing = 1 if vocabulary[0] < 0 else 0
    for top in range(first, last, LANES):  # a few rows at a time, while these are in the cache
        end = min(top + LANES, last)
        for z in range(top, end):
            for v in range(out.shape[1]):
                out[z, v] = 0
        for u in range(missing, len(vocabulary)):
            for z in range(top, end):
                out[z, vocabulary[u]] = by_word[u, z]


@compiled
def run_filter(  # type: ignore[no-untyped-def]
    table,
    strips,
    log_peak,
    words,
    lengths,
    initial,
    restart,
    floor,
    tiny,
    first,
    last,
    alpha,
    scale,
    predicted,
    log_likelihood,
):
    """Run the filter over some sequences, normalized at every step; values below `floor` become zero.

    Args:
        table: [1 + Z + U, W] probabilities of starts, transitions and words.
        strips: of the transition matrix.
        lengths: [B], longest first.
        initial: [B, Z], or [0, Z] if the chains start at position 0.
        restart: [T, B], or [0, B].
        alpha: [(1 + T)·B, W], or [0, W] if it is not kept: `initial` or zero, and the distribution after each step;
            not written where a sequence has ended.
        predicted: [B, Z] p(z | all tokens but the last) of the state at the last one.
        log_likelihood: [B] in float64.
    """
    (batch, states), width, dtype = predicted.shape, table.shape[1], table.dtype
    zero, one, seen, n = dtype.type(0), dtype.type(1), 1 + states, last - first
    room = -(-n // ROWS) * ROWS
    here, guess, likelihood = np.zeros((room, width + LANES), dtype), np.zeros((room, width), dtype), np.ones(n)
    for b in range(n):
        log_likelihood[first + b] = 0.0
        if len(initial):
            for z in range(states):
                here[b, z] = initial[first + b, z]
        if len(alpha):
            for z in range(0, width, LANES):
                lanes.store(alpha, first + b, z, lanes.load(here, b, z))
    for t in range(lengths[first]):
        while lengths[first + n - 1] <= t:
            n -= 1
        if t or len(initial):
            multiply(here, n, strips, guess)
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
            log_likelihood[row] += log_peak[word]
            product = likelihood[b] * mass
            if product < LEAST_PRODUCT or lengths[row] == t + 1:
                log_likelihood[row] += _log(likelihood[b]) + _log(mass)
                product = 1.0
            likelihood[b] = product
            factor = lanes.repeat(one / max(mass, tiny))
            for z in range(0, width, LANES):
                part = lanes.multiply(lanes.load(here, b, z), factor)
                part = lanes.zero_below(part, part, floor)
                lanes.store(here, b, z, part)
                if len(alpha):
                    lanes.store(alpha, (1 + t) * batch + row, z, part)
            if lengths[row] == t + 1:
                for z in range(states):
                    predicted[row, z] = guess[b, z]


@compiled
def run_backward(  # type: ignore[no-untyped-def]
    table,
    strips,
    words,
    lengths,
    initial,
    restart,
    seed,
    floor,
    tiny,
    first,
    last,
    alpha,
    scale,
    transitions,
    by_word,
):
    """Add up the posteriors of starts, transitions and words of some sequences, with the weights of `scaled.backward`.

    Args:
        table, lengths, initial, restart, alpha, scale: as in `run_filter`; alpha is zero where a sequence has ended.
        strips: of the transposed transition matrix.
        seed: [B] the weight of each sequence.
        transitions: [≥ Z, W] Σ α_t−1(i) w_t(j) over the positions where no chain starts.
        by_word: [1 + U, W] Σ w_t over those where one starts, and for each word Σ predicted_t w_t, the posteriors,
            which are α_t times the message from the next step.
    """
    batch, width, dtype, most = words.shape[1], table.shape[1], table.dtype, last - first
    zero, one, seen, n = dtype.type(0), dtype.type(1), len(table) - len(by_word) + 1, 0
    room = -(-most // ROWS) * ROWS
    weights, message = np.zeros((STEPS, room, width + LANES), dtype), np.zeros((room, width), dtype)
    for t in range(lengths[first] - 1, -1, -1):
        if n:
            multiply(weights[(t + 1) % STEPS], n, strips, message)
        here = weights[t % STEPS]
        while n < most and lengths[first + n] > t:
            n += 1
        for b in range(n):
            row, word = first + b, words[t, first + b]
            ends = lengths[row] == t + 1 or (len(restart) > 0 and restart[t + 1, row])
            begins = (t == 0 and len(initial) == 0) or (len(restart) > 0 and restart[t, row])
            factor, whole = lanes.repeat(one / max(scale[t, row], tiny)), lanes.repeat(seed[row])
            for z in range(0, width, LANES):
                arrived = whole if ends else lanes.load(message, b, z)
                filtered = lanes.load(alpha, (1 + t) * batch + row, z)
                posterior = lanes.zero_below(lanes.multiply(filtered, arrived), filtered, floor)
                lanes.store(by_word, 1 + word, z, lanes.add(lanes.load(by_word, 1 + word, z), posterior))
                weight = lanes.multiply(lanes.multiply(lanes.load(table, seen + word, z), factor), arrived)
                weight = lanes.zero_below(weight, filtered, floor)
                if begins:
                    lanes.store(by_word, 0, z, lanes.add(lanes.load(by_word, 0, z), weight))
                    weight = lanes.repeat(zero)
                lanes.store(here, b, z, weight)
        if t % STEPS == 0:
            count = min(STEPS, lengths[first] - t)
            add_outer_products(alpha, t * batch + first, batch, weights, count, n, transitions)


@compiled
def run_filter_few(  # type: ignore[no-untyped-def]
    table, strips, log_peak, words, lengths, initial, restart, floor, tiny, first, last, alpha, scale, predicted, total
):
    """Run the filter as `run_filter` does, number by number: with few states a vector is mostly padding."""
    (batch, states), dtype = predicted.shape, table.dtype
    here, guess = np.zeros(states, dtype), np.zeros(states, dtype)
    for row in range(first, last):
        total[row], likelihood = 0.0, 1.0
        for z in range(states):
            here[z] = initial[row, z] if len(initial) else 0
            if len(alpha):
                alpha[row, z] = here[z]
        for t in range(lengths[row]):
            word, mass = words[t, row], dtype.type(0)
            begins = (t == 0 and len(initial) == 0) or (len(restart) > 0 and restart[t, row])
            for j in range(states):
                part = table[0, j] if begins else here[0] * table[1, j]
                for i in range(states if begins else 1, states):
                    part += here[i] * table[1 + i, j]
                guess[j] = part
            for j in range(states):
                here[j] = guess[j] * table[1 + states + word, j]
                mass += here[j]
            scale[t, row] = mass
            total[row] += log_peak[word]
            product = likelihood * mass
            if product < LEAST_PRODUCT or lengths[row] == t + 1:
                total[row] += _log(likelihood) + _log(mass)
                product = 1.0
            likelihood = product
            factor = dtype.type(1) / max(mass, tiny)
            for j in range(states):
                here[j] *= factor
                if here[j] < floor:
                    here[j] = 0
                if len(alpha):
                    alpha[(1 + t) * batch + row, j] = here[j]
        for z in range(states):
            predicted[row, z] = guess[z]


@compiled
def run_backward_few(  # type: ignore[no-untyped-def]
    table, strips, words, lengths, initial, restart, seed, floor, tiny, first, last, alpha, scale, transitions, by_word
):
    """Add up posteriors as `run_backward` does, number by number."""
    batch, states, dtype, seen = words.shape[1], len(table) - len(by_word), table.dtype, len(table) - len(by_word) + 1
    weight, message = np.zeros(states, dtype), np.zeros(states, dtype)
    for row in range(first, last):
        for t in range(lengths[row] - 1, -1, -1):
            word, factor = words[t, row], dtype.type(1) / max(scale[t, row], tiny)
            ends = lengths[row] == t + 1 or (len(restart) > 0 and restart[t + 1, row])
            begins = (t == 0 and len(initial) == 0) or (len(restart) > 0 and restart[t, row])
            for j in range(states):
                filtered, arrived = alpha[(1 + t) * batch + row, j], seed[row] if ends else message[j]
                weight[j] = 0
                if filtered >= floor:
                    by_word[1 + word, j] += filtered * arrived
                    weight[j] = table[seen + word, j] * factor * arrived
                if begins:
                    by_word[0, j] += weight[j]
            for i in range(0 if begins else states):
                before, part = alpha[t * batch + row, i], dtype.type(0)
                for j in range(states):
                    transitions[i, j] += before * weight[j]
                    part += table[1 + i, j] * weight[j]
                message[i] = part


@compiled
def find_best_paths(  # type: ignore[no-untyped-def]
    table, strips, into, log_peak, words, lengths, shift, lowest, first, last, path, log_prob
):
    """Run Viterbi's algorithm for some sequences: write their states to path [B, T], and log_prob [B] (float64).

    Args:
        table: [1 + Z + U, W] logarithms of starts, transitions and words.
        strips: of the transition scores.
        into: [Z, Z] the transposed transition scores.
        lengths: [B], longest first.
        shift: number of steps after which the largest score is subtracted, so that float32 suffices.
        lowest: the least finite number.
        log_prob: that of the best paths and their words.
    """
    states, width, seen, n = len(into), table.shape[1], 1 + len(into), last - first
    kept = np.full((lengths[first], -(-n // ROWS) * ROWS, width), -np.inf, table.dtype)
    for b in range(n):
        log_prob[first + b] = 0.0
    for t in range(lengths[first]):
        while lengths[first + n - 1] <= t:
            n -= 1
        here = kept[t]
        if t:
            multiply_max(kept[t - 1], n, strips, here)
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
    for b in range(last - first):
        following = 0
        for t in range(lengths[first + b] - 1, -1, -1):
            final = t == lengths[first + b] - 1
            best, state = -np.inf, 0
            for z in range(states):
                score = kept[t, b, z] if final else kept[t, b, z] + into[following, z]
                if score > best:
                    best, state = score, z
            if final:
                log_prob[first + b] += best
            path[first + b, t] = following = state
