"""Log-likelihood of a dense HMM from logits; log-probabilities of emissions and their gradient are never stored.

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
from hmmlm.ops.softmax_adamw import GradientNorm, LogitGradient


@dataclass
class PendingGradient:
    """The gradient of emission logits, and the norm of that of all logits, once the backward pass has run."""

    value: LogitGradient | None = None
    norm: GradientNorm | None = None


def softmax_scan(logits: Parameters, evidence: Evidence, impl: Impl = "auto") -> tuple[Scan, PendingGradient] | None:
    """Compute log p(x) [B] as `scan` does, for log-probabilities that are the log-softmax of the rows of `logits`.

    The result is differentiable in the logits of start and transition; the backward pass fills the gradient of those of
    emissions. Suspect sequences (inside a CUDA graph) have a log-likelihood of 0 and no gradient. None if the kernels
    do not support the problem, or if a sequence has to be recomputed in log space: use `scan`.
    """
    given = Parameters(*(part.detach() for part in logits))
    strided = "" if given.log_emission.is_contiguous() else "strided logits"
    kernels = choose_kernels("scan", impl, given.log_start, "scaled", unsupported(given, evidence) or strided)
    if not hasattr(kernels, "accumulate_words"):
        return None
    products = product_dtype(given.log_start)  # autocast's
    with torch.no_grad(), without_autocast(given.log_start):
        chain = kernels.make_chain(given, evidence, products, normalized=False)
        result = kernels.forward(chain, keep=True)
        suspect = result.suspect
        if not capturing(suspect):
            exact = Parameters(*(part.log_softmax(-1) for part in given))
            if bool(kernels.doubtful(exact, chain, result).any()):
                return None
            suspect = torch.zeros_like(suspect)
        carry = torch.where(suspect[:, None], chain.start.log().double(), result.carry)
    pending = PendingGradient()
    log_likelihood: Tensor = _SoftmaxScan.apply(*logits[:2], kernels, chain, result, suspect, pending)
    return Scan(log_likelihood, Carry(carry), suspect), pending


class _SoftmaxScan(torch.autograd.Function):
    """Attaches the gradient to a filter that has run."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        start: Tensor,
        transition: Tensor,
        kernels: ModuleType,
        chain: Any,
        result: Any,
        suspect: Tensor,
        pending: PendingGradient,
    ) -> Tensor:
        # An impossible sequence has no mass, and is suspect inside a graph.
        ctx.ignored = suspect if capturing(suspect) else result.log_likelihood == NEG_INF
        ctx.kernels, ctx.chain, ctx.result, ctx.pending = kernels, chain, result, pending
        return torch.where(suspect, 0.0, result.log_likelihood)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        seed = grad.masked_fill(ctx.ignored, 0.0)
        with without_autocast(grad):
            start, transition, ctx.pending.value, ctx.pending.norm = ctx.kernels.accumulate_words(
                ctx.chain, ctx.result, seed
            )
        return start, transition, None, None, None, None, None
