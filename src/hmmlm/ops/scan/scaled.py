"""Recursions with scaled probabilities: one matrix product per step, O(B·T·Z) memory, any device.

Values below FLOOR are lost. This keeps the backward messages finite: α_t(z) β_t(z) is a posterior, so β_t(z) ≤ 1 /
FLOOR wherever α_t(z) is kept.

Each word's emissions are divided by their maximum over states, and each step's joint by its sum, so nothing overflows.
Paths that matter later may still be flushed to zero. `find_suspect` finds the sequences for which this cannot be
excluded, which are computed again in log space.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.common import NEG_INF, capturing, log_normalize
from hmmlm.ops.pieces import at_once
from hmmlm.ops.scan.problem import Evidence, Parameters
from hmmlm.ops.underflow import FLOOR, TOLERANCE, exp, least_sum

GROUPS = (4, 1)  # steps between two normalizations: first several, which is faster; then one, which is more accurate
LEAST = {torch.float32: 1e-12, torch.float64: 1e-100}  # mass below which every step is normalized
LARGEST_RATIO = 1e8  # max/min ratio of a transition column up to which `guess_suspect` is a proof
_STATES = 32  # whose counts of words are written at once


class ScaledChain(NamedTuple):
    """A batch prepared for the recursions: time-major, longest sequence first, so step t uses rows [:active[t]]."""

    start: Tensor  # [Z] probabilities, or [B, Z] of each sequence
    transition: Tensor  # [Z, Z] probabilities, in the dtype of products
    emission: Tensor  # [U, Z] p(word | z) / max_z p(word | z), one row per entry of `vocabulary`
    log_peak: Tensor  # [U] log max_z p(word | z)
    words: Tensor  # [T, B] row of `emission` for each token
    vocabulary: Tensor  # [U] token of each row of `emission`: those that occur (not on the CPU: −1 and all words)
    active: list[int]  # number of sequences that reach step t
    order: Tensor | None  # [B] original index of each row; None: not sorted
    initial: Tensor | None  # [B, Z]
    restart: Tensor | None  # [T, B]
    future: Tensor | None = None  # [B, Z] p(later tokens | z) / p(later tokens | all tokens so far)

    def sort(self, values: Tensor) -> Tensor:
        """Return `values` with rows in the order of the chain."""
        return values if self.order is None else values[self.order]

    def unsort(self, values: Tensor) -> Tensor:
        """Return `values` with rows in their original order."""
        return values if self.order is None else values[torch.argsort(self.order)]


class ScaledForward(NamedTuple):
    """Result of the filter; [T, B, …] is zero (scale: one) where a sequence has ended."""

    alpha: Tensor | None  # [T, B, Z] p(z_t | x_1..t), if kept
    scale: Tensor  # [T, B] p(x_t | x_1..t−1) / peak of x_t
    log_likelihood: Tensor  # [B]
    predicted: Tensor  # [B, Z] p(z | all tokens but the last) of the state at the last one, times any factor
    floor: float  # values below this share of a step's mass may have been lost
    carry: Tensor | None = None  # see `log_carry`, if it is computed


def make_chain(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> ScaledChain:
    """Convert parameters to probabilities, and the batch to time-major order sorted by length."""
    log_start, log_transition, log_emission = parameters
    (tokens, _, carry, restart, future), active, order = sort_by_length(evidence)
    words = tokens.t().contiguous() + 1
    if tokens.device.type == "cpu":  # only the words that occur; on a GPU, finding them would synchronize
        vocabulary, words = distinct(words, log_emission.shape[1] + 1)
        vocabulary -= 1
        missing = bool(vocabulary[0] < 0)
    else:
        vocabulary, missing = torch.arange(-1, log_emission.shape[1], device=tokens.device), True
    rows = log_emission.t().index_select(0, vocabulary.clamp(min=0) if missing else vocabulary)  # [U, Z]
    if missing:
        rows[0] = 0.0
    log_peak = rows.amax(1)
    log_peak = torch.where(log_peak == NEG_INF, 0.0, log_peak)
    emission = exp(rows.sub_(log_peak[:, None]))
    return ScaledChain(
        exp(log_start),
        exp(log_transition).to(products),
        emission,
        log_peak,
        words,
        vocabulary,
        active,
        order,
        None if carry is None else carried_probs(carry, log_start.dtype),
        restart,
        None if future is None else future.exp().to(log_start.dtype).clamp_max(1 / FLOOR[log_start.dtype]),
    )


def carried_probs(carry: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the probabilities of a carry [B, Z]; what is possible is not zero."""
    return torch.where(carry > NEG_INF, carry.exp().to(dtype).clamp_min(FLOOR[dtype]), 0.0)


def sort_by_length(evidence: Evidence) -> tuple[Evidence, list[int], Tensor | None]:
    """Return the evidence with the longest sequence first, the number of sequences at each step, and the order [B].

    `restart` is [T, B]. The order is None if there are no lengths.
    """
    tokens, lengths, carry, restart, future = evidence
    order, (batch, steps) = None, tokens.shape
    active = [batch] * steps
    if lengths is not None:
        order = torch.argsort(lengths, descending=True, stable=True)
        tokens, lengths = tokens[order], lengths[order]
        carry = None if carry is None else carry[order]
        restart = None if restart is None else restart[order]
        future = None if future is None else future[order]
        active = (lengths > torch.arange(steps, device=lengths.device)[:, None]).sum(1).tolist()
    restart = None if restart is None else restart.t().contiguous()
    return Evidence(tokens, lengths, carry, restart, future), active, order


def distinct(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the distinct values [U], sorted, and the index of each value in them; values are in 0 … size − 1.

    This is `torch.unique`, but without a sort.
    """
    flat = values.flatten()
    found = torch.zeros(size, dtype=torch.long, device=values.device).index_fill_(0, flat, 1)
    return found.nonzero().squeeze(1), (found.cumsum(0) - 1).index_select(0, flat).view(values.shape)


def move(probs: Tensor, transition: Tensor) -> Tensor:
    """Compute probs [n, Z] @ transition in the dtype of `transition`, accumulated in float32 or wider."""
    return (probs.to(transition.dtype) @ transition).to(probs.dtype)


def forward(chain: ScaledChain, keep: bool = True) -> ScaledForward:
    """Run the filter: one product and one multiplication per step, everything else in bulk.

    Steps are normalized in groups, which removes most of the overhead of small models. If the mass of a group comes
    close to underflow, the filter runs again with groups of one step.
    """
    if capturing(chain.start):  # a graph cannot branch on `least`
        return scaled_filter(chain, keep, 1)[0]
    result, least = scaled_filter(chain, keep, GROUPS[0])
    return result if bool(least >= LEAST[chain.start.dtype]) else scaled_filter(chain, keep, 1)[0]


def scaled_filter(
    chain: ScaledChain, keep: bool, group: int, least_prob: float | None = None, sums: Tensor | None = None
) -> tuple[ScaledForward, Tensor]:
    """Run the filter with groups of `group` steps; also return the least mass of any step before normalization.

    Args:
        least_prob: to which everything possible is raised, before and after each product: an upper bound.
        sums: [T, B, Z] is overwritten by p(z_t | x_1..t−1) times the mass since the last normalization.
    """
    steps, batch = chain.words.shape
    like, states, tiny = chain.start, len(chain.transition), torch.finfo(chain.start.dtype).tiny
    span = steps if keep else max(1, min(steps, at_once(batch * states, 2**22)))
    scale = like.new_ones(steps, batch)
    inside = _inside(chain)
    alpha, mass, least = like.new_empty(0), like.new_ones(1, batch), like.new_ones(())
    # p(z_t | x_1..t−1) times the mass since the last normalization; rows that have ended keep their last one.
    predicted = like.new_empty(batch, states)
    previous, same = chain.initial, like.dtype == chain.transition.dtype
    for first in range(0, steps, span):
        end = min(first + span, steps)
        before = mass[-1:]
        # The emissions become the joint in place: fresh memory of this size costs more than the products of few states.
        alpha = chain.emission.index_select(0, chain.words[first:end].reshape(-1)).view(-1, batch, states)
        for t, (rows, here) in enumerate(zip(chain.active[first:end], alpha.unbind(), strict=True), first):
            guess = predicted if sums is None else sums[t]
            if rows < batch:
                here[rows:] = 0.0
                here, guess = here[:rows], guess[:rows]
                previous = None if previous is None else previous[:rows]
            if previous is None:
                guess.copy_(chain.start.expand(rows, -1))
            else:
                if t % group == 0 and t > 0:
                    previous = previous / previous.sum(1, keepdim=True).clamp_min_(tiny)
                    previous = previous if least_prob is None else raised(previous, least_prob)
                if same:
                    torch.mm(previous, chain.transition, out=guess)
                else:
                    guess.copy_(move(previous, chain.transition))
                if chain.restart is not None:
                    guess.copy_(torch.where(chain.restart[t, :rows, None], chain.start, guess))
            if least_prob is not None:
                guess.copy_(raised(guess, least_prob))
            previous = here.mul_(guess)
        # Convert masses relative to the last normalized step to p(x_t | x_1..t−1), and normalize the distributions.
        mass = alpha.sum(2)
        if inside is not None:
            mass = torch.where(inside[first:end], mass, 1.0)
        least = torch.minimum(least, mass.amin())
        fresh = (torch.arange(first, end, device=mass.device) % group == 0)[:, None]
        if chain.restart is not None:
            fresh = fresh | chain.restart[first:end]
        base = torch.where(fresh, 1.0, torch.cat([before, mass[:-1]]).clamp_min(tiny))
        torch.div(mass, base, out=scale[first:end])
        if inside is not None:
            scale[first:end].masked_fill_(~inside[first:end], 1.0)
        alpha.div_(mass.clamp_min(tiny)[..., None])
        previous, mass = (alpha[-1, : chain.active[end - 1]], torch.ones_like(mass))
    floor = FLOOR[like.dtype] / (LEAST[like.dtype] if group > 1 else 1.0)
    return ScaledForward(alpha if keep else None, scale, log_likelihood(chain, scale), predicted, floor), least


def log_likelihood(chain: ScaledChain, scale: Tensor) -> Tensor:
    """Compute log p(x) [B] from scale [T, B], which is one where a sequence has ended."""
    peaks, inside = chain.log_peak.take(chain.words), _inside(chain)
    if inside is not None:
        peaks = torch.where(inside, peaks, 0.0)
    return (scale.log() + peaks).sum(0, dtype=torch.float64).to(scale.dtype)


def _inside(chain: ScaledChain) -> Tensor | None:
    """Return a mask [T, B] that is True until a sequence ends; None if all have full length."""
    batch = chain.words.shape[1]
    if chain.active[-1] == batch:
        return None
    active = torch.tensor(chain.active, device=chain.words.device)
    return torch.arange(batch, device=chain.words.device) < active[:, None]


def backward(chain: ScaledChain, result: ScaledForward, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the backward weights w and the posteriors p(z_t | x), both [T, B, Z], times seed [B] (sorted rows).

    w_t(z) = p(x_t.. | z_t = z) / p(x_t.. | x_1..t−1), so the expected count of a transition i → j into step t is
    α_t−1(i) A(i, j) w_t(j), that of a start in z π(z) w_t(z), and the posterior α_t(z) Σ_j A(z, j) w_t+1(j).
    States with a filtered probability below FLOOR are removed: their messages could overflow and do not matter.
    """
    assert result.alpha is not None
    (steps, batch), states = chain.words.shape, chain.start.shape[0]
    tiny = torch.finfo(seed.dtype).tiny
    weights = chain.emission.index_select(0, chain.words.reshape(-1)).view(steps, batch, states)
    weights.div_(result.scale.clamp_min(tiny)[..., None])
    messages, reverse = torch.empty_like(weights), chain.transition.t().contiguous()  # products with a view are slower
    same = reverse.dtype == weights.dtype
    floor, lost = FLOOR[seed.dtype], None
    ends = seed[:, None] if chain.future is None else seed[:, None] * chain.future
    if capturing(seed) or not bool(result.alpha.amin() >= floor):
        lost = result.alpha < floor
        weights.masked_fill_(lost, 0.0)
    following = weights[-1]
    for t, (here, message) in reversed(list(enumerate(zip(weights.unbind(), messages.unbind(), strict=True)))):
        rows, ahead = chain.active[t], chain.active[t + 1] if t + 1 < steps else 0
        if ahead < batch:
            message[ahead:rows] = ends[ahead:rows]
            message[rows:] = 0.0
        if ahead:
            arrived = message if ahead == batch else message[:ahead]
            if same:
                torch.mm(following if ahead == batch else following[:ahead], reverse, out=arrived)
            else:
                arrived.copy_(move(following[:ahead], reverse))
            if chain.restart is not None:
                arrived.copy_(torch.where(chain.restart[t + 1, :ahead, None], seed[:ahead, None], arrived))
        following = here.mul_(message)
    if lost is not None:
        messages.masked_fill_(lost, 0.0)
    return weights, messages.mul_(result.alpha)


def accumulate(chain: ScaledChain, result: ScaledForward, seed: Tensor, shape: torch.Size) -> Parameters:
    """Compute the expected counts of all sequences, weighted by seed [B]; `shape` is that of the emission matrix."""
    assert result.alpha is not None
    weights, posterior = backward(chain, result, seed)
    start, transition = transition_counts(chain, result.alpha, weights)
    by_word = torch.zeros_like(chain.emission)
    by_word.index_add_(0, chain.words.reshape(-1), posterior.view(-1, posterior.shape[2]))
    return Parameters(start, transition, emission_counts(chain, by_word, shape))


def emission_counts(chain: ScaledChain, by_word: Tensor, shape: torch.Size) -> Tensor:
    """Return expected emission counts of the words that occur, by_word [U, Z], as a matrix of `shape` [Z, V]."""
    if chain.vocabulary.shape[0] == shape[1] + 1:  # every word has a row; row 0 is "missing"
        return by_word[1:].t().contiguous()
    missing = int(chain.vocabulary[0] < 0)
    result, counts = by_word.new_empty(shape), by_word[missing:].t()
    for part, some in zip(result.split(_STATES), counts.split(_STATES), strict=True):  # while they are in the cache
        part.zero_().index_copy_(1, chain.vocabulary[missing:], some)
    return result


def transition_counts(chain: ScaledChain, alpha: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the expected counts of starts [Z] and transitions [Z, Z]; set weights to zero where a chain starts.

    Args:
        alpha: [T, B, Z] of the filter.
        weights: [T, B, Z] of `backward`.
    """
    states, dtype = chain.start.shape[0], chain.transition.dtype
    start = torch.zeros_like(chain.start)
    if chain.initial is None:
        start = weights[0].sum(0)
        weights[0] = 0.0
    if chain.restart is not None:
        start = start + (weights * chain.restart[..., None]).sum((0, 1))
        weights.masked_fill_(chain.restart[..., None], 0.0)
    before, after = alpha[:-1].reshape(-1, states).to(dtype), weights[1:].reshape(-1, states).to(dtype)
    transition = (before.t() @ after).to(alpha.dtype)
    if chain.initial is not None:
        transition += (chain.initial.to(dtype).t() @ weights[0].to(dtype)).to(alpha.dtype)
    return start * chain.start, transition * chain.transition


def suspect_by_ratio(parameters: Parameters, scale: Tensor, floor: float) -> Tensor:
    """Return a mask [B] (sorted rows): True where a cheap bound does not exclude that mass flushed to zero matters.

    If no column of the transition matrix varies by more than a factor ρ, the mass flushed so far is, one step later,
    at most Z·floor·ρ of every state's mass, and stays so. The loss is negligible if every scale is well above that.
    """
    log_transition = parameters.log_transition
    margin = math.log(least_sum(len(log_transition), log_transition.dtype, floor)) + log_column_ratio(log_transition)
    return scale.amin(0).log() < margin


def log_column_ratio(log_transition: Tensor) -> Tensor:
    """Compute log ρ []: the largest ratio of two entries of a column of the transition matrix."""
    # A column of zeros (NaN here) belongs to a state without incoming transitions, which has no mass to lose.
    return (log_transition.amax(0) - log_transition.amin(0)).nan_to_num(nan=0.0, posinf=math.inf).amax()


def guess_suspect(result: ScaledForward) -> Tensor:
    """Return a mask [B] (sorted rows): True where mass was probably lost; does not synchronize with the device.

    This is the bound of `suspect_by_ratio` for ρ = LARGEST_RATIO, a proof up to that ratio. Beyond it, where every
    sequence of a peaked but sound model would be suspect, it is a heuristic: the mass of a step is so small that the
    states which explain its word must have been lost (or no state explains it).
    """
    dtype, states = result.scale.dtype, result.predicted.shape[1]
    return ~(result.scale.amin(0) >= least_sum(states, dtype, result.floor) * LARGEST_RATIO)  # negated: NaN is suspect


def find_suspect(parameters: Parameters, chain: ScaledChain, result: ScaledForward) -> Tensor:
    """Return a mask [B] (sorted rows): True where mass flushed to zero may matter and log space must decide.

    Where the bound of `suspect_by_ratio` is inconclusive (zeros or peaks in the matrix), the filter runs again with
    everything possible raised to a floor. If that upper bound agrees with the result, nothing was lost.
    """
    dtype = chain.start.dtype
    suspect = suspect_by_ratio(parameters, result.scale, result.floor)
    if not bool(suspect.any()):
        return suspect
    if chain.transition.dtype != dtype:  # low-precision rounding would hide the difference
        chain = chain._replace(transition=exp(parameters.log_transition))
        result = forward(chain, keep=False)
    upper = upper_bound(parameters, chain).log_likelihood
    slack = TOLERANCE[dtype] * 10 + torch.finfo(dtype).eps * 4 * chain.words.shape[0]
    both_impossible = upper == NEG_INF
    agrees = (upper - result.log_likelihood).abs() <= slack
    return suspect & ~agrees & ~both_impossible


def log_carry(parameters: Parameters, evidence: Evidence, predicted: Tensor) -> Tensor:
    """Return log p(z | x) [B, Z] of the last tokens in float64, from predictions of their states times any factor.

    The last step is taken in log space, so that no emission underflows.
    """
    tokens = evidence.tokens[:, -1:]
    if evidence.lengths is not None:
        tokens = evidence.tokens.gather(1, evidence.lengths[:, None] - 1)
    scores = parameters.log_emission.index_select(1, tokens[:, 0].clamp(min=0)).t()
    return log_normalize((predicted.log() + torch.where(tokens < 0, 0.0, scores)).double())


def suspect_in_carry(parameters: Parameters, evidence: Evidence, predicted: Tensor, floor: float) -> Tensor:
    """Return a mask [B]: True where a state that is possible may have lost its share of `predicted` [B, Z]."""
    dtype = predicted.dtype
    least = least_sum(predicted.shape[1], dtype, floor)
    low = ~(predicted >= least * predicted.sum(1, keepdim=True))
    if bool(low.any()):
        chain = make_chain(parameters, evidence, dtype)
        low &= chain.unsort(upper_bound(parameters, chain).predicted) > 0
    return low.any(1)


def upper_bound(parameters: Parameters, chain: ScaledChain) -> ScaledForward:
    """Run the filter with everything possible raised to at least a floor, whose square does not underflow.

    Predictions are zero only where a state is impossible.
    """
    floor = FLOOR[chain.start.dtype] ** 0.5
    possible = parameters.log_emission.index_select(1, chain.vocabulary.clamp(min=0)).t() > NEG_INF
    possible = possible | (chain.vocabulary < 0)[:, None]
    chain = chain._replace(
        start=torch.where(parameters.log_start > NEG_INF, chain.start.clamp_min(floor), 0.0),
        transition=torch.where(parameters.log_transition > NEG_INF, chain.transition.clamp_min(floor), 0.0),
        emission=torch.where(possible, chain.emission.clamp_min(floor), 0.0),
        initial=None if chain.initial is None else raised(chain.initial, floor),
    )
    return scaled_filter(chain, keep=False, group=1, least_prob=floor)[0]


def raised(values: Tensor, floor: float) -> Tensor:
    """Return `values` with positive entries raised to at least `floor`."""
    return torch.where(values > 0, values.clamp_min(floor), 0.0)
