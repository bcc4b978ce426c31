"""The log-likelihood as a differentiable function: the gradient is the expected counts, in closed form."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.ops.results import Counts, Scan
from hmmlm.ops.scan import naive
from hmmlm.ops.scan import torch as scaled
from hmmlm.ops.scan.naive import Evidence, Parameters

LOG_SPACE_CELLS = 2**25  # largest [rows, Z, Z] intermediate of the log-space recursion


def wide_chunks(parameters: Parameters, evidence: Evidence, rows: Tensor) -> tuple[Parameters, list[Evidence]]:
    """The sequences at `rows`, for log space: in float64, and in pieces that fit in memory."""
    wide = Parameters(*(p.detach().double() for p in parameters))
    size = max(1, LOG_SPACE_CELLS // wide.log_start.shape[0] ** 2)
    pieces = [evidence.rows(piece) for piece in rows.split(size)]
    return wide, [p if p.initial is None else p._replace(initial=p.initial.double()) for p in pieces]


def run(
    parameters: Parameters, evidence: Evidence, products: torch.dtype | None = None, keep: bool = True
) -> tuple[scaled.Chain, scaled.Forward, Tensor]:
    """The scaled filter, and the (original) indices of the sequences it cannot be trusted with."""
    with torch.autocast(evidence.tokens.device.type, enabled=False):  # the precision of products is decided by now
        chain = scaled.prepare(parameters, evidence, products or parameters.log_start.dtype)
        result = scaled.forward(chain, keep)
        if chain.start.is_cuda and torch.cuda.is_current_stream_capturing():
            return chain, result, torch.empty(0, dtype=torch.long, device=chain.start.device)
        doubt = scaled.doubtful(parameters, chain, result)
    return chain, result, chain.unsort(doubt).nonzero().squeeze(1)


def accumulate(chain: scaled.Chain, result: scaled.Forward, seed: Tensor, shape: torch.Size) -> tuple[Counts, Tensor]:
    """Expected counts of all sequences, each times seed [B]; `shape` is that of the emission matrix.

    Also β at the token before position 0, [B, Z]: the gradient with respect to `initial`.
    """
    assert result.alpha is not None and result.predicted is not None
    weights = scaled.backward(chain, result, seed)
    states, dtype = chain.start.shape[0], chain.transition.dtype
    posterior = result.predicted * weights
    by_word = torch.zeros_like(chain.emission)
    by_word.index_add_(0, chain.words.reshape(-1), posterior.view(-1, states))
    if chain.vocabulary.shape[0] == shape[1] + 1:  # every word has a row, "missing" is row 0
        emission = by_word[1:].t().contiguous()
    else:
        observed = chain.vocabulary >= 0
        emission = by_word.new_zeros(shape).index_copy_(1, chain.vocabulary[observed], by_word[observed].t())

    start = torch.zeros_like(chain.start)
    if chain.initial is None:
        start = weights[0].sum(0)
        weights[0] = 0.0
    if chain.restart is not None:
        start = start + (weights * chain.restart[..., None]).sum((0, 1))
        weights.masked_fill_(chain.restart[..., None], 0.0)
    before, after = result.alpha[:-1].reshape(-1, states).to(dtype), weights[1:].reshape(-1, states).to(dtype)
    transition = (before.t() @ after).to(seed.dtype)
    if chain.initial is not None:
        transition += (chain.initial.to(dtype).t() @ weights[0].to(dtype)).to(seed.dtype)
    beta_before = scaled.move(weights[0], chain.transition.t())
    counts = Counts(start * chain.start, transition * chain.transition, emission, result.log_likelihood.sum())
    return counts, beta_before


def in_log_space(
    function: Callable[[Parameters, Evidence], Tensor], parameters: Parameters, evidence: Evidence, rows: Tensor
) -> Tensor:
    """function(parameters, evidence) [rows, ...] of the log-space recursions, for the sequences at `rows`."""
    wide, pieces = wide_chunks(parameters, evidence, rows)
    return torch.cat([function(wide, piece) for piece in pieces])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, log_start: Tensor, log_transition: Tensor, log_emission: Tensor, tokens: Tensor,
        lengths: Tensor | None, initial: Tensor | None, restart: Tensor | None, products: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        parameters = Parameters(log_start, log_transition, log_emission)
        evidence = Evidence(tokens, lengths, initial, restart)
        chain, result, doubt = run(parameters, evidence, products, keep=any(ctx.needs_input_grad))
        # Clones, because outputs must not be held by ctx.
        log_likelihood, final = chain.unsort(result.log_likelihood).clone(), chain.unsort(result.final).clone()
        if doubt.numel():
            joint = in_log_space(lambda p, e: naive.forward(p, e)[:, -1], parameters, evidence, doubt)
            log_likelihood[doubt] = naive.logsumexp(joint, 1).to(log_likelihood.dtype)
            final[doubt] = torch.softmax(joint, 1).nan_to_num(0.0).to(final.dtype)
        ctx.save_for_backward(*parameters)
        ctx.evidence, ctx.chain, ctx.result, ctx.doubt = evidence, chain, result, doubt
        ctx.mark_non_differentiable(final)
        return log_likelihood, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parameters = Parameters(*ctx.saved_tensors)
        evidence, chain, result, doubt = ctx.evidence, ctx.chain, ctx.result, ctx.doubt
        seed = grad.clone()
        seed[doubt] = 0.0
        seed = seed if chain.order is None else seed[chain.order]
        seed = torch.where(result.log_likelihood == naive.NEG_INF, 0.0, seed)
        counts, before = accumulate(chain, result, seed, parameters.log_emission.shape)
        start, transition, emission = counts.start, counts.transition, counts.emission
        before = chain.unsort(before)
        if doubt.numel():
            wide, pieces = wide_chunks(parameters, evidence, doubt)
            weights = grad[doubt].double().split(pieces[0].tokens.shape[0])
            for piece, weight in zip(pieces, weights, strict=True):
                more = naive.expected_counts(wide, piece, weight)
                start, transition, emission = start + more.start, transition + more.transition, emission + more.emission
            if evidence.initial is not None:
                scores = in_log_space(naive.initial_gradient, parameters, evidence, doubt)
                before[doubt] = (scores * grad[doubt, None]).to(before.dtype)
        dtype = grad.dtype
        d_initial = before if ctx.needs_input_grad[5] else None
        return start.to(dtype), transition.to(dtype), emission.to(dtype), None, None, d_initial, None, None


def differentiable_scan(parameters: Parameters, evidence: Evidence) -> Scan:
    return Scan(*_Scan.apply(*parameters, *evidence, scaled.product_dtype(parameters.log_start)))
