"""The recursions with scaled probabilities: one matrix product a step, memory O(B·T·Z), portable.

Each word's emissions are divided by their largest value over states, and each step's joint by its sum, so that nothing
overflows. What can still go wrong is that paths which matter later are flushed to zero; `doubtful` finds the sequences
for which that cannot be excluded, and the callers in `__init__.py` do those again in log space.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.scan.naive import NEG_INF, Evidence, Parameters

# Filtered probabilities below this are treated as lost. It keeps the backward messages finite: α_t(z) β_t(z) is a
# posterior, so β_t(z) ≤ 1 / FLOOR wherever α_t(z) is kept.
FLOOR = {torch.float32: 1e-36, torch.float64: 1e-300}
# Relative mass that may be lost without the sequence being done again.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Chain(NamedTuple):
    """A batch ready for the recursions: time-major, longest first, so that step t concerns rows [:active[t]]."""

    start: Tensor  # [Z] probabilities
    transition: Tensor  # [Z, Z] probabilities, in the dtype the products are done in
    emission: Tensor  # [U, Z] p(word | z) / max_z p(word | z), a row for each word that occurs (and for "missing")
    log_peak: Tensor  # [U] the log of that maximum
    words: Tensor  # [T, B] row of `emission` for each token
    vocabulary: Tensor  # [U] token of each row of `emission`
    active: list[int]  # sequences that reach step t
    order: Tensor | None  # [B] original index of each row; None: as given
    initial: Tensor | None  # [B, Z]
    restart: Tensor | None  # [T, B]

    def unsort(self, values: Tensor, dim: int = 0) -> Tensor:
        """Rows along `dim` back in the order in which they were given."""
        return values if self.order is None else values.index_select(dim, torch.argsort(self.order))


class Forward(NamedTuple):
    alpha: Tensor  # [T, B, Z] filtered distributions (zero where inactive); [1, B, Z], the last ones, if not kept
    scale: Tensor  # [T, B] p(x_t | x_1..t-1) / peak of x_t; one where inactive
    log_likelihood: Tensor  # [B]
    final: Tensor  # [B, Z]


def product_dtype(parameter: Tensor) -> torch.dtype:
    """Autocast's dtype for matrix products if autocast is on, otherwise the parameters' own."""
    if parameter.dtype == torch.float32 and torch.is_autocast_enabled(parameter.device.type):
        return torch.get_autocast_dtype(parameter.device.type)
    return parameter.dtype


def prepare(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> Chain:
    log_start, log_transition, log_emission = parameters
    tokens, lengths, initial, restart = evidence
    order, (batch, steps) = None, tokens.shape
    active = [batch] * steps
    if lengths is not None:
        order = torch.argsort(lengths, descending=True, stable=True)
        tokens, sizes = tokens[order], lengths[order]
        initial = None if initial is None else initial[order]
        restart = None if restart is None else restart[order]
        active = (sizes > torch.arange(steps, device=sizes.device)[:, None]).sum(1).tolist()
    if tokens.device.type == "cpu":  # only the words that occur; elsewhere that would cost a synchronisation
        vocabulary, words = torch.unique(tokens, return_inverse=True)
    else:
        vocabulary = torch.arange(-1, log_emission.shape[1], device=tokens.device)
        words = tokens + 1
    rows = log_emission.index_select(1, vocabulary.clamp(min=0)).t()
    rows = torch.where((vocabulary < 0)[:, None], 0.0, rows)
    log_peak = rows.amax(1)
    log_peak = torch.where(log_peak == NEG_INF, 0.0, log_peak)
    emission = (rows - log_peak[:, None]).exp_().contiguous()
    restart = None if restart is None else restart.t().contiguous()
    return Chain(
        log_start.exp(), log_transition.exp().to(products), emission, log_peak,
        words.t().contiguous(), vocabulary, active, order, initial, restart,
    )


def move(probs: Tensor, transition: Tensor) -> Tensor:
    """probs [n, Z] one step along `transition`, in the dtype of `transition`, summed in float32 or better."""
    return (probs.to(transition.dtype) @ transition).to(probs.dtype)


def predict(chain: Chain, t: int, previous: Tensor | None, rows: int) -> Tensor:
    """p(z_t | x_1..t-1) [rows, Z]."""
    if previous is None:
        return chain.start.expand(rows, -1)
    moved = move(previous[:rows], chain.transition)
    return moved if chain.restart is None else torch.where(chain.restart[t, :rows, None], chain.start, moved)


def forward(chain: Chain, keep: bool = True, floor: float = 0.0) -> Forward:
    """Filter. With `floor`, everything positive is raised to at least that: an upper bound on the likelihood."""
    steps, batch = chain.words.shape
    states, dtype = chain.start.shape[0], chain.start.dtype
    ragged = chain.active[-1] < batch
    alpha = chain.start.new_zeros(steps, batch, states) if keep and ragged else chain.start.new_empty(
        steps if keep else 1, batch, states)
    scale = chain.start.new_ones(steps, batch)
    tiny = torch.finfo(dtype).tiny
    final = chain.start.new_empty(batch, states) if ragged else None
    previous = chain.initial
    for t, rows in enumerate(chain.active):
        predicted = predict(chain, t, previous, rows)
        if floor:
            predicted = raised(predicted, floor)
        here = alpha[t if keep else 0, :rows]
        torch.mul(predicted, chain.emission.index_select(0, chain.words[t, :rows]), out=here)
        total = here.sum(1)
        scale[t, :rows] = total
        here.div_(total.clamp_min(tiny)[:, None])
        if floor:
            here.copy_(raised(here, floor))
        ending = chain.active[t + 1] if t + 1 < steps else 0
        if final is not None and ending < rows:
            final[ending:rows] = here[ending:]
        previous = here
    assert previous is not None
    peaks = chain.log_peak[chain.words]
    if ragged:
        inside = torch.arange(batch, device=peaks.device) < torch.tensor(chain.active, device=peaks.device)[:, None]
        peaks = torch.where(inside, peaks, 0.0)
    log_likelihood = (scale.log() + peaks).sum(0, dtype=torch.float64).to(dtype)
    return Forward(alpha, scale, log_likelihood, previous.clone() if final is None else final)


def raised(values: Tensor, floor: float) -> Tensor:
    return torch.where(values > 0, values.clamp_min(floor), 0.0)


def backward(chain: Chain, result: Forward, seed: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """From the last step to the first: (t, β_t [n, Z], w_t [n, Z]), both times seed [B].

    β_t(z) = p(x_t+1.. | z_t = z) / p(x_t+1.. | x_1..t), so that Σ_z α_t(z) β_t(z) = 1, and
    w_t(z) = p(x_t | z) β_t(z) / p(x_t | x_1..t-1): the expected count of a transition i → j into step t is
    α_t-1(i) A(i, j) w_t(j), that of a start in z is π(z) w_t(z).
    """
    steps, _ = chain.words.shape
    reverse, floor, tiny = chain.transition.t(), FLOOR[chain.start.dtype], torch.finfo(chain.start.dtype).tiny
    weight: Tensor | None = None
    for t in range(steps - 1, -1, -1):
        rows, ahead = chain.active[t], chain.active[t + 1] if t + 1 < steps else 0
        beta = seed[:rows, None].expand(-1, chain.start.shape[0])
        if weight is None:
            beta = beta.clone()
        else:
            moved = move(weight, reverse)
            if chain.restart is not None:
                moved = torch.where(chain.restart[t + 1, :ahead, None], beta[:ahead], moved)
            beta = moved if ahead == rows else torch.cat([moved, beta[ahead:]])
        beta.masked_fill_(result.alpha[t, :rows] < floor, 0.0)
        weight = chain.emission.index_select(0, chain.words[t, :rows]).mul_(beta)
        weight.div_(result.scale[t, :rows].clamp_min(tiny)[:, None])
        yield t, beta, weight


def doubtful(parameters: Parameters, chain: Chain, result: Forward) -> Tensor:
    """[B] (sorted rows) True where mass flushed to zero might matter, so that only log space can tell.

    First a cheap argument. If no column of the transition matrix varies by more than a factor ρ, then after one step
    whatever was flushed is at most Z·FLOOR·ρ of every state's mass, and stays so; nothing to fear while each step's
    scale is well above that. Where this says nothing (zeros or peaks in the matrix), run the filter again with
    everything possible raised to a floor: if that upper bound agrees with the result, nothing was lost.
    """
    dtype, states = chain.start.dtype, chain.start.shape[0]
    log_transition = parameters.log_transition
    # A column of zeros (NaN here) is a state that nothing leads to: it can lose nothing.
    log_ratio = (log_transition.amax(0) - log_transition.amin(0)).nan_to_num(nan=0.0, posinf=float("inf")).amax()
    margin = torch.log(chain.start.new_tensor(FLOOR[dtype] * states / TOLERANCE[dtype])) + log_ratio
    suspect = result.scale.amin(0).log() < margin
    if not bool(suspect.any()):
        return suspect
    if chain.transition.dtype != dtype:  # the rounding of low precision would hide what is looked for
        chain = chain._replace(transition=log_transition.exp())
        result = forward(chain, keep=False)
    upper = forward(raised_chain(parameters, chain), keep=False, floor=FLOOR[dtype] ** 0.5)
    slack = TOLERANCE[dtype] * 10 + torch.finfo(dtype).eps * 4 * chain.words.shape[0]
    both_impossible = upper.log_likelihood == NEG_INF
    agrees = (upper.log_likelihood - result.log_likelihood).abs() <= slack
    return suspect & ~agrees & ~both_impossible


def raised_chain(parameters: Parameters, chain: Chain) -> Chain:
    """The chain with every probability that is not exactly zero raised to a floor whose square does not underflow."""
    floor = FLOOR[chain.start.dtype] ** 0.5
    possible = parameters.log_emission.index_select(1, chain.vocabulary.clamp(min=0)).t() > NEG_INF
    possible = possible | (chain.vocabulary < 0)[:, None]
    return chain._replace(
        start=torch.where(parameters.log_start > NEG_INF, chain.start.clamp_min(floor), 0.0),
        transition=torch.where(parameters.log_transition > NEG_INF, chain.transition.clamp_min(floor), 0.0),
        emission=torch.where(possible, chain.emission.clamp_min(floor), 0.0),
    )
