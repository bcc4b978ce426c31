"""The scaled recursions over states that are divided among the processes of a run.

Every process has some sequences and R = Z / processes rows of A and O. All processes compute all sequences, each over
its own states, so that no process has all of A or O. Forward, Σ_i α(i) A(i, ·) is summed over processes, and each gets
the sum for its states. Backward, Σ_j A(·, j) w(j) needs the w of all states. So a token takes one message of [Z, B]
in each direction. Tensors are state-major, because messages are divided by rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.ops.common import FLOOR, NEG_INF, Carry, Scan, product_dtype, without_autocast
from hmmlm.ops.scan import scaled
from hmmlm.ops.scan.naive import Evidence, Parameters
from hmmlm.ops.scan.scaled import ScaledChain
from hmmlm.ranks import world


def divided_scan(own: Parameters, evidence: Evidence) -> Scan:
    """Compute `scan` of the sequences of this process; all processes call it together.

    The gradient of a process's rows is that of the sum of all processes' likelihoods. That of the start distribution is
    the part of its own states, zero elsewhere. If the mass of a sequence may have underflowed, the batch is computed
    again in float64.

    Args:
        own: log_start [Z], and the rows [R, Z] and [R, V] of this process.
        evidence: with `initial` [B, Z] over all states.
    """
    batch = len(evidence.tokens)
    shared = _share(evidence)
    products = product_dtype(own.log_start)
    log_likelihood, final = _DividedScan.apply(*own, shared, products)
    return Scan(log_likelihood[:batch], Carry(final[:batch].double().log()))


def _share(evidence: Evidence) -> Evidence:
    """Return the sequences of all processes, in the order of these; `initial` has the states of this process only.

    Processes may have different numbers of sequences and lengths: all are padded with missing tokens, which nobody
    reads.
    """
    tokens, lengths, initial, restart = evidence
    (batch, steps), device = tokens.shape, tokens.device
    shapes = world().gather((batch, steps, lengths is not None))
    rows, width = (max(shape[i] for shape in shapes) for i in (0, 1))
    ragged = any(shape != (rows, width, False) for shape in shapes)
    if ragged and lengths is None:
        lengths = torch.full((batch,), steps, device=device)

    def join(values: Tensor | None, fill: float) -> Tensor | None:
        if values is None:
            return None
        whole = values.new_full((rows, width) if values.dim() == 2 else (rows,), fill)
        whole[tuple(map(slice, values.shape))] = values
        return world().join_rows(whole)

    if initial is not None:
        padded = initial.new_zeros(rows, initial.shape[1])
        padded[:batch] = initial
        initial = world().join_rows(padded)[:, world().own_rows(initial.shape[1])]
    joined = join(tokens, -1)
    assert joined is not None
    restart = None if restart is None else join(restart.to(torch.uint8), 0)
    return Evidence(joined, join(lengths, 1), initial, None if restart is None else restart.bool())


class _Filtered(NamedTuple):
    """Result of the filter over all sequences and the states of this process."""

    chain: ScaledChain
    alpha: Tensor  # [T, R, B] p(z_t | x_1..t)
    predicted: Tensor  # [T, R, B] p(z_t | x_1..t−1)
    scale: Tensor  # [T, B] p(x_t | x_1..t−1) / peak of x_t; one where a sequence has ended
    inside: Tensor  # [T, B] whether a sequence has not ended


def _run_filter(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> _Filtered:
    """Run the filter, in float64 if the mass of some sequence may underflow otherwise."""
    result = _filter(parameters, evidence, products)
    dtype, states = result.scale.dtype, len(parameters.log_start)
    if dtype == torch.float64:
        return result
    least = scaled.least_mass(FLOOR[dtype], states, dtype) * scaled.SURE_RATIO
    if not world().any(not bool(result.scale.amin() >= least)):  # masses may differ between processes by rounding
        return result
    return _filter(Parameters(*(p.double() for p in parameters)), evidence, torch.float64)


def _filter(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> _Filtered:
    own = parameters._replace(log_start=parameters.log_start[world().own_rows(len(parameters.log_start))])
    chain = scaled.make_chain(own, evidence, products, world().max_)
    (steps, batch), rows, tiny = chain.words.shape, len(chain.start), torch.finfo(chain.start.dtype).tiny
    active = torch.tensor(chain.active, device=chain.words.device)
    inside = torch.arange(batch, device=active.device) < active[:, None]
    alpha, predicted = (chain.start.new_empty(steps, rows, batch) for _ in range(2))
    mass = chain.start.new_ones(steps, batch)
    previous = None if chain.initial is None else chain.initial.t()
    for t in range(steps):
        guess = chain.start[:, None].expand(-1, batch)
        if previous is not None:
            guess, total = _move(chain, previous)
            if t > 0:
                mass[t - 1] = total
                guess = guess / total.clamp_min(tiny)
            if chain.restart is not None:
                guess = torch.where(chain.restart[t], chain.start[:, None], guess)
        predicted[t] = guess
        torch.mul(predicted[t], chain.emission.index_select(0, chain.words[t]).t(), out=alpha[t])
        previous = alpha[t].mul_(inside[t])
    mass[-1] = alpha[-1].sum(0)
    world().sum_([mass[-1]])
    alpha.div_(mass.clamp_min(tiny)[:, None])
    return _Filtered(chain, alpha, predicted, mass.masked_fill_(~inside, 1.0), inside)


def _move(chain: ScaledChain, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_i own(i) A(i, j) [R, B] over the i of all processes for the j of this one, and Σ_i own(i) [B]."""
    count, (rows, batch) = world().count, own.shape
    moved = (chain.transition.t() @ own.to(chain.transition.dtype)).to(own.dtype).view(count, rows, batch)
    # The sum is one more row for each process.
    message = torch.cat([moved, own.sum(0).expand(count, 1, batch)], 1)
    received = world().sum_own_rows(message.flatten(0, 1))
    return received[:rows], received[rows]


def _accumulate(result: _Filtered, seed: Tensor, words: int) -> Parameters:
    """Compute the expected counts of all sequences for the rows of this process, weighted by seed [B]; start is [R].

    See `scaled.backward` for the weights w.
    """
    chain, alpha, predicted, scale, inside = result
    steps, rows, _ = alpha.shape
    tiny, floor = torch.finfo(seed.dtype).tiny, FLOOR[seed.dtype]
    start, by_word = torch.zeros_like(chain.start), torch.zeros_like(chain.emission)
    transition = alpha.new_zeros(chain.transition.shape)
    arrived = seed.expand(rows, -1)
    for t in reversed(range(steps)):
        emission = chain.emission.index_select(0, chain.words[t]).t()
        weights = emission / scale[t].clamp_min(tiny) * arrived
        weights = torch.where((alpha[t] >= floor) & inside[t], weights, 0.0)
        by_word.index_add_(0, chain.words[t], (predicted[t] * weights).t())
        before = alpha[t - 1] if t else None if chain.initial is None else chain.initial.t()
        begins = torch.full_like(inside[t], before is None)
        if chain.restart is not None:
            begins = begins | chain.restart[t]
        start += (weights * begins).sum(1)
        if before is None:
            break
        whole = world().join_rows(weights.masked_fill_(begins, 0.0)).to(chain.transition.dtype)
        transition += before.to(whole.dtype) @ whole.t()
        arrived = (chain.transition @ whole).to(seed.dtype)
        arrived = torch.where(begins | ~inside[t], seed, arrived)
    emitted = scaled.emission_counts(chain, by_word, torch.Size((rows, words)))
    return Parameters(start * chain.start, transition.mul_(chain.transition), emitted)


class _DividedScan(torch.autograd.Function):
    """Log-likelihoods [B] and final distributions [B, Z] of the sequences of this process, padded."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        log_start: Tensor,
        log_transition: Tensor,
        log_emission: Tensor,
        evidence: Evidence,
        products: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        parameters = Parameters(log_start, log_transition, log_emission)
        with without_autocast(log_start):
            result = _run_filter(parameters, evidence, products)
        ctx.result, ctx.words, ctx.states = result, log_emission.shape[1], len(log_start)
        chain, last = result.chain, result.inside.sum(0) - 1
        log_likelihood = chain.unsort(scaled.log_likelihood(chain, result.scale)).to(log_start.dtype)
        ctx.impossible = log_likelihood == NEG_INF
        final = result.alpha[last, :, torch.arange(len(last), device=last.device)].t().to(log_start.dtype)
        final = chain.unsort(world().join_rows(final).t())  # [B, Z]
        own = world().own_rows(len(log_likelihood))
        ctx.mark_non_differentiable(final := final[own].contiguous())
        return log_likelihood[own].clone(), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        seed = torch.where(ctx.impossible, 0.0, world().join_rows(grad))
        chain = ctx.result.chain
        with without_autocast(grad):
            counts = _accumulate(ctx.result, chain.sort(seed).to(chain.start.dtype), ctx.words)
        start = counts.log_start.new_zeros(ctx.states)
        start[world().own_rows(ctx.states)] = counts.log_start
        return *(count.to(grad.dtype) for count in counts._replace(log_start=start)), None, None
