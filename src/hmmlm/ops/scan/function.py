"""The log-likelihood as a differentiable function: the gradient is the expected counts, in closed form."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.ops.choice import kernels
from hmmlm.ops.results import Scan
from hmmlm.ops.scan import naive
from hmmlm.ops.scan import torch as scaled
from hmmlm.ops.scan.naive import Evidence, Parameters

LOG_SPACE_CELLS = 2**25  # largest [rows, Z, Z] intermediate of the log-space recursion
KERNEL_CELLS = 2**30  # largest [T, B, Z] that the triton kernels make room for


def wide_chunks(parameters: Parameters, evidence: Evidence, rows: Tensor) -> tuple[Parameters, list[Evidence]]:
    """The sequences at `rows`, for log space: in float64, and in pieces that fit in memory."""
    wide = Parameters(*(p.detach().double() for p in parameters))
    size = max(1, LOG_SPACE_CELLS // wide.log_start.shape[0] ** 2)
    pieces = [evidence.rows(piece) for piece in rows.split(size)]
    return wide, [p if p.initial is None else p._replace(initial=p.initial.double()) for p in pieces]


def capturing(reference: Tensor) -> bool:
    """Inside a CUDA graph: nothing may wait for the device."""
    return reference.is_cuda and torch.cuda.is_current_stream_capturing()


def run(
    parameters: Parameters, evidence: Evidence, products: torch.dtype | None = None, keep: bool = True,
    recursions: ModuleType = scaled,
) -> tuple[Any, Any, Tensor]:
    """The scaled filter, and the (original) indices of the sequences it cannot be trusted with.

    `recursions` is the module torch.py or triton.py, and the chain and what comes of it are its own. `keep` what
    gradients and posteriors need.
    """
    with torch.autocast(evidence.tokens.device.type, enabled=False):  # the precision of products is decided by now
        chain = recursions.prepare(parameters, evidence, products or parameters.log_start.dtype)
        result = recursions.forward(chain, keep)
        if capturing(parameters.log_start):
            return chain, result, torch.empty(0, dtype=torch.long, device=chain.start.device)
        doubt = recursions.doubtful(parameters, chain, result)
    return chain, result, chain.unsort(doubt).nonzero().squeeze(1)


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
        recursions: ModuleType,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parameters = Parameters(log_start, log_transition, log_emission)
        evidence = Evidence(tokens, lengths, initial, restart)
        chain, result, doubt = run(parameters, evidence, products, any(ctx.needs_input_grad), recursions)
        log_likelihood, final = chain.unsort(result.log_likelihood).clone(), chain.unsort(result.final)
        if doubt.numel():
            joint = in_log_space(lambda p, e: naive.forward(p, e)[:, -1], parameters, evidence, doubt)
            log_likelihood[doubt] = naive.logsumexp(joint, 1).to(log_likelihood.dtype)
            final = final.index_copy(0, doubt, torch.softmax(joint, 1).nan_to_num(0.0).to(final.dtype))
        # Outside of graphs there are none, by now; but what a graph does is done before, so that all of it is loaded.
        suspect = chain.unsort(recursions.suspicious(result))
        if not capturing(log_start):
            suspect = torch.zeros_like(suspect)
        final = torch.where(suspect[:, None], chain.start, final)  # the next window has to start from something
        ctx.save_for_backward(*parameters)
        # Clones, here and above, because ctx must not hold what is returned.
        ctx.evidence, ctx.chain, ctx.result, ctx.doubt, ctx.suspect = evidence, chain, result, doubt, suspect.clone()
        ctx.recursions = recursions
        ctx.mark_non_differentiable(final, suspect)
        return log_likelihood, final, suspect

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parameters = Parameters(*ctx.saved_tensors)
        evidence, chain, result, doubt = ctx.evidence, ctx.chain, ctx.result, ctx.doubt
        seed = torch.where(ctx.suspect, 0.0, grad)
        if doubt.numel():
            seed = seed.index_fill(0, doubt, 0.0)
        seed = torch.where(result.log_likelihood == naive.NEG_INF, 0.0, chain.sort(seed))
        with torch.autocast(grad.device.type, enabled=False):
            counts, first = ctx.recursions.accumulate(chain, result, seed, parameters.log_emission.shape)
            before = None
            if ctx.needs_input_grad[5]:  # β at the token before position 0
                before = chain.unsort(scaled.move(first.to(grad.dtype), chain.transition.t()))
        start, transition, emission = counts.start, counts.transition, counts.emission
        if doubt.numel():
            wide, pieces = wide_chunks(parameters, evidence, doubt)
            weights = grad[doubt].double().split(pieces[0].tokens.shape[0])
            for piece, weight in zip(pieces, weights, strict=True):
                more = naive.expected_counts(wide, piece, weight)
                start, transition, emission = start + more.start, transition + more.transition, emission + more.emission
            if before is not None:
                scores = in_log_space(naive.initial_gradient, parameters, evidence, doubt)
                before[doubt] = (scores * grad[doubt, None]).to(before.dtype)
        dtype = grad.dtype
        return start.to(dtype), transition.to(dtype), emission.to(dtype), None, None, before, None, None, None


def lacking(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> str:
    """What rules the triton kernels out, or nothing."""
    batch, steps = evidence.tokens.shape
    reasons = {
        "ragged lengths": evidence.lengths is not None,
        "float64": parameters.log_start.dtype != torch.float32,
        "float16 products": products == torch.float16,
        "windows of a single token": steps < 2,
        "room for so much": steps * batch * len(parameters.log_start) > KERNEL_CELLS,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def differentiable_scan(parameters: Parameters, evidence: Evidence, impl: str) -> Scan:
    products = scaled.product_dtype(parameters.log_start)
    recursions = kernels("scan", impl, parameters.log_start, lacking(parameters, evidence, products))
    return Scan(*_Scan.apply(*parameters, *evidence, products, recursions))
