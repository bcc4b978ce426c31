"""Helpers shared by all operations.

Choice of implementation, log-space sums, precision of products.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.errors import InputError

NEG_INF = float("-inf")
_PRODUCT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

Impl = Literal["auto", "naive", "scaled", "compiled", "triton", "parallel"]
"""Implementation of an inference operation: log space (naive), scaled probabilities, these in CPU or GPU loops, or all
parts of a long sequence at once (parallel)."""


class Carry(NamedTuple):
    """The state at the last token of each sequence given all tokens, carried from one window to the next.

    In log space and float64: a state that explains a later token may have any probability.
    """

    log_probs: Tensor  # [B, K] log p(z | x) in float64; all −inf after an impossible sequence
    states: Tensor | None = None  # [B, K] state of each entry of log_probs; None: all states in order

    def rows(self, count: int) -> "Carry":
        """Return the carry of the first `count` sequences."""
        return self.take(slice(count))

    def take(self, rows: slice | Tensor) -> "Carry":
        """Return the carry of some sequences."""
        return Carry(self.log_probs[rows], None if self.states is None else self.states[rows])

    def clone(self) -> "Carry":
        """Return a copy."""
        return Carry(self.log_probs.clone(), None if self.states is None else self.states.clone())

    def to(self, device: torch.device | str) -> "Carry":
        """Return the carry on a device."""
        return Carry(self.log_probs.to(device), None if self.states is None else self.states.to(device))

    def over_all(self, states: int) -> Tensor:
        """Return log p(z | x) [B, Z] over all states."""
        if self.states is None:
            return self.log_probs
        nothing = self.log_probs.new_full((len(self.log_probs), states), NEG_INF)
        return nothing.scatter(1, self.states, self.log_probs)

    def copy_(self, other: "Carry") -> None:
        """Overwrite the tensors with those of another carry, unless they are the same."""
        for own, given in zip(self, other, strict=True):
            if own is not None and given is not None and own.data_ptr() != given.data_ptr():
                own.copy_(given)

    def most_likely(self) -> Tensor:
        """Return the most likely state of each sequence [B]."""
        best = self.log_probs.argmax(1, keepdim=True)
        return (best if self.states is None else self.states.gather(1, best))[:, 0]

    @property
    def is_lost(self) -> Tensor:
        """Whether all states of a sequence are impossible [B]."""
        return self.log_probs.amax(1) == NEG_INF

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by field name, for a checkpoint."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Scan(NamedTuple):
    """Result of the forward recursion over a batch."""

    log_likelihood: Tensor  # [B] natural log; differentiable in the parameters
    carry: Carry  # detached
    suspect: Tensor | None = None
    """[B] bool; None: no sequence. True only inside a CUDA graph, where a sequence whose mass underflows cannot be
    recomputed in log space. A suspect sequence has no gradient, and its log-likelihood must not be used."""
    next_word_score: Tensor | None = None
    """[B] for `next_words`: the sum over positions of their mean log-probability given the words before; differentiable
    in the parameters."""


@cache
def installed(package: str) -> bool:
    """Return whether a package is installed; looking for it takes longer than a step of a small model."""
    return find_spec(package) is not None


def choose_kernels(op: str, impl: str, reference: Tensor, portable: str, unsupported: str = "") -> ModuleType:
    """Return the module that implements `op`: the portable one or `triton`.

    Args:
        impl: "auto" selects Triton for CUDA tensors if Triton is installed and supports the problem.
        reference: a tensor on the device of the computation.
        portable: name of the implementation that runs on every device.
        unsupported: feature of this problem that the Triton kernels do not support; empty if none.
    """
    if impl == "auto":
        impl = "triton" if reference.is_cuda and not unsupported and installed("triton") else portable
    if impl not in (portable, "triton"):
        known = ", ".join(dict.fromkeys(("auto", "naive", portable)))
        raise InputError(f"{op}: unknown impl {impl!r}: use {known} or triton")
    if impl == "triton" and unsupported:
        raise InputError(f"{op}: the triton kernels do not support {unsupported}: use impl={portable!r}")
    if impl == "triton" and not installed("triton"):
        raise InputError(f"{op}: impl='triton' needs the package triton, which is not installed: use impl={portable!r}")
    if impl == "triton" and not reference.is_cuda and "TRITON_INTERPRET" not in os.environ:
        raise InputError(
            f"{op}: impl='triton' needs tensors on a GPU, not on {reference.device}: use impl={portable!r}"
        )
    return import_module(f"hmmlm.ops.{op}.{impl}")


def last_tokens(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the last token [B] of each sequence."""
    return tokens[:, -1] if lengths is None else tokens.gather(1, lengths[:, None] - 1).squeeze(1)


def without_autocast(reference: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast; entering one costs a small model time, so only if autocast is enabled."""
    device = reference.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def dot_precision(dtype: torch.dtype) -> str:
    """Return Triton's `input_precision` for products of `dtype`: float32 to its last bits, unless torch allows less."""
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def capturing(reference: Tensor) -> bool:
    """Return whether a CUDA graph is being captured; the device must not be synchronized during capture."""
    return reference.is_cuda and torch.cuda.is_current_stream_capturing()


# --- log space ---


def logsumexp(scores: Tensor, dim: int) -> Tensor:
    """Compute log Σ exp(scores), with value −inf and gradient zero (not NaN) where every score is −inf.

    NaN scores give NaN, which training detects.
    """
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return torch.logsumexp(scores, dim)
    peak = scores.detach().amax(dim, keepdim=True)
    peak = torch.where(peak == NEG_INF, 0.0, peak)
    total = (scores - peak).exp().sum(dim)
    possible = total != 0
    log_total = torch.where(possible, total, 1.0).log() + peak.squeeze(dim)
    return torch.where(possible, log_total, NEG_INF)


def finite(log_total: Tensor) -> Tensor:
    """Return log totals with −inf replaced by the lowest finite number: −inf minus it is −inf, not NaN."""
    return log_total.clamp_min(torch.finfo(log_total.dtype).min)


def log_normalize(log_weights: Tensor) -> Tensor:
    """Return log-distributions over the last dimension; all −inf where every weight is."""
    return log_weights - finite(torch.logsumexp(log_weights, -1, keepdim=True))


# --- products with narrow operands and wide sums ---


def product_dtype(reference: Tensor, requested: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of matrix product operands: `requested`, else autocast's, else that of `reference`.

    float16 lacks the range for probabilities: requesting it is an error, and float16 autocast selects float32.
    """
    if requested is not None:
        if requested not in _PRODUCT_DTYPES:
            raise InputError(f"product_dtype {requested} cannot represent probabilities: use bfloat16 or wider")
        return requested
    device = reference.device.type
    if reference.dtype == torch.float32 and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
        return autocast if autocast in _PRODUCT_DTYPES else torch.float32
    return reference.dtype if reference.dtype in _PRODUCT_DTYPES else torch.float32


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and results (the wide dtype) for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b (matrices or batches of them), summed and returned in the wide dtype regardless of autocast."""
    with without_autocast(a):
        if a.dtype == wide(a.dtype):
            return a @ b
        if a.is_cuda:
            product = torch.mm if a.dim() == 2 else torch.bmm
            return product(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()


def accumulate(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `out` [n, m], which is in the wide dtype."""
    with without_autocast(a):
        if a.dtype == out.dtype:
            out.addmm_(a, b)
        elif a.is_cuda:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            out.addmm_(a.to(out.dtype), b.to(out.dtype))


def factor_logits(a: Tensor, b: Tensor) -> Tensor:
    """Compute the logits a bᵀ [..., n, m] of factors a [..., n, h] and b [..., m, h].

    Operands are in autocast's dtype, the result is wide.

    The result is not rounded: in bfloat16, a logit of 20 has an error of 6% of its probability.
    """
    result: Tensor = _FactorLogits.apply(product_dtype(a), a, b)
    return result


class _FactorLogits(torch.autograd.Function):
    """Autograd function of `factor_logits`, with gradients in the dtypes of the factors."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        ctx.dtypes = a.dtype, b.dtype
        a, b = a.to(dtype), b.to(dtype)
        ctx.save_for_backward(a, b)
        return matmul(a, b.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype)
        return None, matmul(grad, b).to(ctx.dtypes[0]), matmul(grad.mT, a).to(ctx.dtypes[1])
