"""Log-likelihood of a dense HMM with softmax emissions, whose log-probabilities and gradient are never stored.

Emissions are the largest matrices of a model, and a batch has few of their columns.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.ops.common import NEG_INF, Carry, Impl, Scan, capturing, choose_kernels, product_dtype, without_autocast
from hmmlm.ops.scan.api import unsupported
from hmmlm.ops.scan.naive import Evidence, Parameters
from hmmlm.ops.softmax_adamw import LogitGradient


@dataclass
class PendingGradient:
    """The gradient of emission logits, from the moment the backward pass has run."""

    value: LogitGradient | None = None


def softmax_scan(
    log_start: Tensor, log_transition: Tensor, logits: Tensor, evidence: Evidence, impl: Impl = "auto"
) -> tuple[Scan, PendingGradient] | None:
    """Compute log p(x) [B] as `scan` does, for emissions softmax(logits [Z, V]).

    The result is differentiable in log_start and log_transition; the backward pass fills the gradient of the logits.
    None if the kernels do not support the problem, or if a sequence has to be recomputed in log space: use `scan`.
    """
    logits = logits.detach()
    parameters = Parameters(log_start.detach(), log_transition.detach(), logits)
    reason = unsupported(parameters, evidence) or ("" if logits.is_contiguous() else "strided logits")
    kernels = choose_kernels("scan", impl, log_start, "scaled", reason)
    if not hasattr(kernels, "accumulate_words"):
        return None
    products = product_dtype(log_start)  # autocast's
    with torch.no_grad(), without_autocast(log_start):
        chain = kernels.make_chain(parameters, evidence, products, normalized=False)
        result = kernels.forward(chain, keep=True)
        final, suspect = result.final, torch.zeros_like(result.suspect)
        if capturing(log_start):
            suspect = result.suspect
        elif bool(kernels.doubtful(parameters._replace(log_emission=logits.log_softmax(1)), chain, result).any()):
            return None
        final = torch.where(suspect[:, None], chain.start, final)
    pending = PendingGradient()
    log_likelihood: Tensor = _SoftmaxScan.apply(log_start, log_transition, kernels, chain, result, suspect, pending)
    return Scan(log_likelihood, Carry(final), suspect), pending


class _SoftmaxScan(torch.autograd.Function):
    """Attaches the gradient to a filter that has run."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        log_start: Tensor,
        log_transition: Tensor,
        kernels: ModuleType,
        chain: Any,
        result: Any,
        suspect: Tensor,
        pending: PendingGradient,
    ) -> Tensor:
        ctx.kernels, ctx.chain, ctx.result, ctx.suspect, ctx.pending = kernels, chain, result, suspect, pending
        likelihood: Tensor = result.log_likelihood
        return likelihood.clone()  # ctx must not hold a returned tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        seed = torch.where(ctx.suspect | (ctx.result.log_likelihood == NEG_INF), 0.0, grad)
        with without_autocast(grad):
            start, transition, ctx.pending.value = ctx.kernels.accumulate_words(ctx.chain, ctx.result, seed)
        return start, transition, None, None, None, None, None
