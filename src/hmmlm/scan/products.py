"""The recursions of a dense HMM in products of probabilities, where these are provably as accurate as log space.

Each step is one product of scaled probabilities. Its sums are checked after the last step, all at once: if underflow
cannot have changed any of them (the bound of `LogMatrix.product`), the logarithms of all steps are taken together.
Otherwise the functions return None, and the recursion has to run in log space.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hmmlm.emissions import Categorical
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.numerics.semirings import LOG
from hmmlm.ops.pieces import fits
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.ops.scan.api import refusal
from hmmlm.ops.scan.scaled import GROUPS, ScaledChain, distinct, scaled_filter
from hmmlm.ops.underflow import flush, least_sum
from hmmlm.scan.composition import matrices
from hmmlm.scan.lattice import Lattice, Packed, SortedBatch, Supports, endings
from hmmlm.transitions import Dense

if TYPE_CHECKING:
    from hmmlm.scan.composition import Composition

_LOOP_STEPS = 1024  # of a text for which compiled loops pay: to load them takes 0.1 GB
_LEAST_CARRIED = 1e-20  # probability of a state of a carry that compiled loops may start from


class Observations(NamedTuple):
    """The emission scores of a batch, longest sequence first."""

    scores: Tensor  # [U, Z] log p(word | z) of each distinct token
    row: Tensor  # [T, B] the row of `scores` of each token
    active: list[int]  # number of rows in step t; the results of other rows are undefined

    def at(self, rows: Tensor) -> Tensor:
        """Return rows [U, …] as [T, B, …]."""
        return rows.index_select(0, self.row.flatten()).view(*self.row.shape, *rows.shape[1:])


class BulkFilter(NamedTuple):
    """The forward recursion of all steps at once."""

    given: Observations
    log_filtered: Tensor  # [T, B, Z]
    by_loops: bool  # whether compiled loops served


def filter_dense(
    hmm: Composition, batch: SortedBatch, log_initial: Tensor | None, log_missing: Tensor | None
) -> Lattice | None:
    """Run the filter of an HMM of two matrices; None for others, for long texts, and where log space has to decide."""
    steps, (transition, emission) = len(batch.active), (hmm.transition, hmm.emission)
    if not (isinstance(transition, Dense) and isinstance(emission, Categorical)) or hmm.requires_grad:
        return None
    if not fits(steps * len(batch.tokens) * hmm.num_states, 2**25):
        return None
    words, index = distinct(batch.tokens[:, :steps].t() + 1, hmm.vocab_size + 1)
    words -= 1
    given = Observations(emission.score(words, bool(words[0] < 0), log_missing)[1], index, batch.active)
    scores = given.at(given.scores)
    result = None if log_missing is not None else _filter_loops(hmm, batch, log_initial)
    by_loops = result is not None
    if result is None:
        first = hmm.log_start.expand(len(batch.tokens), -1)
        if log_initial is not None:
            first = transition.forward_step(LOG, log_initial)
        result = filter_products(transition.matrix().probs, first, given, scores)
    if result is None:
        return None
    log_filtered, log_scales, rows = (_active_rows(values, batch) for values in (*result, scores))
    bulk = BulkFilter(given, result[0], by_loops)
    return Lattice(batch, Supports(batch, None), rows, log_filtered, log_scales, bulk)


def _filter_loops(hmm: Composition, batch: SortedBatch, log_initial: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Compute what `filter_products` does in compiled loops; None where these do not serve, or are not accurate."""
    parameters, carry = matrices(hmm), None if log_initial is None else log_initial.double()
    evidence = Evidence(batch.tokens[:, : len(batch.active)], None, carry)
    if parameters is None or hmm.impl not in ("auto", "compiled") or len(batch.active) < _LOOP_STEPS:
        return None
    if refusal(parameters, evidence, hmm.dtype, "compiled"):
        return None
    if carry is not None and not bool(carry.amin() > math.log(_LEAST_CARRIED)):
        return None
    inside = _inside(batch)
    found = _run_loops(parameters, evidence._replace(lengths=inside.sum(0)), inside)
    return None if found is None else (found[0].log_(), found[1])


def _message_loops(hmm: Composition, batch: SortedBatch) -> Tensor | None:
    """Compute what `message_products` does in compiled loops: the filter of the reversed chain, and one step more."""
    parameters, inside = matrices(hmm), _inside(batch)
    assert parameters is not None
    lengths, steps = inside.sum(0), torch.arange(len(inside))
    back = (lengths[:, None] - 1 - steps).clamp(min=0)  # [B, T]
    transition = parameters.log_transition.t().contiguous()
    chain = parameters._replace(log_start=torch.zeros_like(parameters.log_start), log_transition=transition)
    found = _run_loops(chain, Evidence(batch.tokens.gather(1, back), lengths), inside)
    if found is None:
        return None
    ahead = found[0][(lengths - 2 - steps[:, None]).clamp(min=0), torch.arange(len(lengths))]  # of the token after each
    sums = ahead @ transition.exp()
    if not bool(sums.amin() >= least_sum(hmm.num_states, hmm.dtype)):
        return None
    return sums.log_().masked_fill_((steps[:, None] == lengths - 1)[..., None], 0.0)


def _inside(batch: SortedBatch) -> Tensor:
    """Return a mask [T, B] that is True until a sequence ends."""
    return torch.tensor(batch.active)[:, None] > torch.arange(len(batch.tokens))


def _run_loops(parameters: Parameters, evidence: Evidence, inside: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compute p(z_t | x_1..t) [T, B, Z] and log p(x_t | x_1..t−1) [T, B]; None if underflow may have changed a value.

    A sum of predictions may lack Z·FLOOR, and is at least the filtered value times the mass of the step.
    """
    from hmmlm.ops.scan import compiled  # needs numba

    states, dtype = len(parameters.log_start), parameters.log_start.dtype
    chain = compiled.make_chain(parameters, evidence, dtype)
    result = compiled.forward(chain)
    filtered = torch.from_numpy(result.alpha).view(1 + len(inside), -1, result.alpha.shape[1])[1:, :, :states]
    scale = torch.from_numpy(result.scale)
    sums = torch.where(inside, filtered.amin(2) * scale, 1.0)
    if not bool(sums.amin() >= least_sum(states, dtype)):  # or NaN
        return None
    peaks = torch.from_numpy(chain.log_peak)[torch.from_numpy(chain.words)]
    return filtered.contiguous(), scale.log() + peaks


def messages_dense(hmm: Composition, lattice: Lattice) -> Packed | None:
    """Return the messages to a lattice of `filter_dense`; None where log space has to decide."""
    stacked, transition = lattice.stacked, hmm.transition
    assert isinstance(stacked, BulkFilter) and isinstance(transition, Dense)
    messages = _message_loops(hmm, lattice.batch) if stacked.by_loops else None
    if messages is None:
        messages = message_products(transition.matrix(forward=False), stacked.given)
    if messages is None:
        return None
    messages.sub_((stacked.log_filtered + messages).logsumexp(2, keepdim=True))
    return _active_rows(messages, lattice.batch)


def _active_rows(values: Tensor, batch: SortedBatch) -> Packed:
    """Return the active rows of each step of values [T, B, …]."""
    return Packed(batch, values.flatten(0, 1) if batch.is_even else values[batch.step, batch.row])


def filter_products(
    transition: Tensor, log_first: Tensor, given: Observations, scores: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Compute log p(z_t | x_1..t) [T, B, Z] and log p(x_t | x_1..t−1) [T, B], by the filter of the likelihood.

    Args:
        transition: probabilities [Z, Z].
        log_first: [B, Z] log p(z_1).
        scores: [T, B, Z] of the tokens.
    """
    top, factor = _relative(given.scores)
    peak, first = _relative(log_first)
    chain = ScaledChain(first, transition, factor, top, given.row, top, given.active, None, None, None)
    for group in GROUPS:
        sums = torch.ones_like(scores)
        result, least = scaled_filter(chain, True, group, sums=sums)
        sums[0] = 1.0  # not a sum
        if bool(sums.amin() * least >= least_sum(len(transition), scores.dtype)):  # or NaN
            log_scale = result.scale.log_()
            log_mass = log_scale.clone()  # since the last normalization
            for t in range(1, group):
                log_mass[t::group] += log_mass[t - 1 :: group][: len(log_mass[t::group])]
            peaks = given.at(top)
            log_filtered = sums.log_().add_(scores).sub_((log_mass + peaks)[..., None])
            log_filtered[0] = log_first - peak[:, None] + scores[0] - (log_mass[0] + peaks[0])[:, None]
            log_scale[0] += peak
            return log_filtered, log_scale + peaks
    return None


def message_products(matrix: LogMatrix, given: Observations) -> Tensor | None:
    """Compute log p(x_t+1.. | z_t) [T, B, Z], each up to a constant; zero at the last token of a sequence.

    Args:
        matrix: the transposed transition matrix.
    """
    factors = given.at(_relative(given.scores + matrix.peak)[1])
    for t, ended in endings(given.active):
        factors[t, ended] = _relative(given.scores.index_select(0, given.row[t, ended]))[1]
    for group in GROUPS:
        sums, masses = torch.ones_like(factors), torch.ones_like(factors[..., 0])
        totals = sums.unbind()
        for t in range(len(given.active) - 1, 0, -1):
            rows = given.active[t]
            values = (totals[t] * factors[t])[:rows]
            if t % group == 0:
                masses[t - 1, :rows] = mass = values.amax(1)
                values = flush(values / mass[:, None])
            torch.mm(values, matrix.scaled, out=totals[t - 1][:rows])
        sure = sums.amin(2) * masses.clamp(max=1.0) >= least_sum(sums.shape[2], sums.dtype)
        if bool(sure.all()):  # a NaN, of an impossible sequence, is not
            messages = sums.log_().add_(matrix.peak)
            for t, ended in endings(given.active):
                messages[t, ended] = 0.0
            return messages
    return None


def _relative(log_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row [...] and exp(log_values) [..., Z] relative to it."""
    top = log_values.amax(-1).clamp_min(torch.finfo(log_values.dtype).min)
    return top, flush((log_values - top[..., None]).exp_())
