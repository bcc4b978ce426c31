"""Log-likelihood of a dense HMM as a differentiable function.

The gradient is the expected counts, in closed form.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.device import keep_freed_memory
from hmmlm.errors import InputError
from hmmlm.ops.common import (
    NEG_INF,
    Carry,
    Impl,
    Scan,
    capturing,
    installed,
    kernel_refusal,
    product_dtype,
    without_autocast,
)
from hmmlm.ops.scan import scaled
from hmmlm.ops.scan.problem import Evidence, Parameters
from hmmlm.ops.scan.scaled import unsort

CarryKind = Literal["none", "kept", "exact"]
LOOP_STATES = 256  # most states for which compiled loops are faster than tensor operations on two cores
LOOP_PATH_STATES, LOOP_SEQUENCES = 1024, 8  # for best paths: most states, or least sequences
LARGE = 2**20  # emissions whose gradient the C library would return to the system
KERNEL_CELLS = 2**30  # largest [T, B, Z] that the Triton kernels allocate


def scan(parameters: Parameters, evidence: Evidence, impl: Impl = "auto", carry: CarryKind = "kept") -> Scan:
    """Compute log p(x) [B], differentiable in the parameters, and the carry over all Z states.

    Sequences whose scaled mass may have underflowed are `suspect`; with an "exact" carry, also those of which a
    possible state of the carry may have lost its share. Where "none" is wanted, the carry is empty. Inside a CUDA
    graph, the carry of a suspect sequence is the start distribution.
    """
    products = product_dtype(parameters.log_start)
    recursions = choose_recursions(parameters, evidence, products, impl)
    if torch.is_grad_enabled() and any(value.requires_grad for value in parameters):
        log_likelihood, found, suspect = _Scan.apply(*parameters, evidence, products, recursions, carry)
    else:  # the autograd function would cost a small model time
        run = _run_filter(parameters, evidence, products, recursions, False, carry)
        log_likelihood, found, suspect = run.log_likelihood, run.carry, run.suspect
    return Scan(log_likelihood, Carry(log_likelihood.new_empty(0) if found is None else found), suspect)


@torch.no_grad()
def expected_counts(
    parameters: Parameters, evidence: Evidence, weights: Tensor | None, impl: Impl = "auto"
) -> tuple[Tensor, Parameters, Tensor]:
    """Compute log p(x) [B], the expected counts of all sequences but suspect ones, and which are suspect [B].

    A sequence counts `weights` [B] times (None: once): the counts are the gradient of the weighted log-likelihoods.
    """
    like = parameters.log_start
    if weights is None:
        weights = like.new_ones(len(evidence.tokens))
    products = product_dtype(like)
    recursions = choose_recursions(parameters, evidence, products, impl)
    run = _run_filter(parameters, evidence, products, recursions, True, "none")
    with without_autocast(like):
        counts = _counts(parameters.log_emission.shape, run, weights)
    return run.log_likelihood, Parameters(*(count.to(like.dtype) for count in counts)), run.suspect


def path_loops_pay(states: int, batch: int, device: torch.device) -> bool:
    """Return whether compiled loops find best paths faster than tensor operations, and numba works here."""
    pays = device.type == "cpu" and (states <= LOOP_PATH_STATES or batch >= LOOP_SEQUENCES)
    return pays and installed("numba") and _importable("numba")


@cache
def _importable(package: str) -> bool:
    """Return whether an installed package can be imported; numba refuses versions of NumPy that it does not know."""
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def refusal(parameters: Parameters, evidence: Evidence, products: torch.dtype, impl: str) -> str:
    """Return why `impl` is not what "auto" selects for a problem, or cannot serve; empty if there is no reason."""
    states, device = len(parameters.log_start), parameters.log_start.device
    if impl == "compiled":
        if device.type != "cpu":
            return f"needs tensors on the CPU, not on {device}"
        if products != parameters.log_start.dtype:
            return f"does not support products in {products}"
        if not installed("numba"):
            return "needs numba, which the extra hmmlm[fast] installs (pip install 'hmmlm[fast]')"
        if states > LOOP_STATES:
            return f"is slower for more than {LOOP_STATES} states"
        return "" if _importable("numba") else "cannot import numba"
    if impl == "triton":
        missing = unsupported(parameters, evidence)
        return kernel_refusal(device) or (missing and f"does not support {missing}")
    return ""


def choose_recursions(parameters: Parameters, evidence: Evidence, products: torch.dtype, impl: Impl) -> ModuleType:
    """Return the module that implements the recursions."""
    if impl == "auto":
        fastest: list[Impl] = ["compiled", "triton", "scaled"]
        impl = next(each for each in fastest if not refusal(parameters, evidence, products, each))
    reason = refusal(parameters, evidence, products, impl)
    if reason and not reason.startswith("is slower"):
        raise InputError(f"scan: impl={impl!r} {reason}: use impl='scaled'")
    return import_module(f"hmmlm.ops.scan.{impl}")


def unsupported(parameters: Parameters, evidence: Evidence) -> str:
    """Return the feature of this problem that the Triton kernels do not support; empty if none."""
    batch, steps = evidence.tokens.shape
    reasons = {
        "ragged lengths": evidence.lengths is not None,
        f"parameters in {parameters.log_start.dtype}": parameters.log_start.dtype != torch.float32,
        "windows of a single token": steps < 2,
        "tensors [T, B, Z] of more than 2^30 elements": steps * batch * len(parameters.log_start) > KERNEL_CELLS,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


class _Run(NamedTuple):
    """The filter over a batch; rows of the last three in the order of the batch."""

    recursions: ModuleType
    chain: Any  # of the recursions
    result: Any
    log_likelihood: Tensor  # [B]
    carry: Tensor | None  # [B, Z]
    suspect: Tensor  # [B]


def _run_filter(
    parameters: Parameters,
    evidence: Evidence,
    products: torch.dtype,
    recursions: ModuleType,
    keep: bool,
    kind: CarryKind,
) -> _Run:
    """Run the filter, and find the sequences whose mass may have underflowed."""
    tokens = evidence.tokens
    if keep and tokens.device.type == "cpu" and parameters.log_emission.numel() >= LARGE:
        keep_freed_memory()  # for the next step: whoever needs counts trains
    with without_autocast(tokens):  # `products` already is the dtype of products
        chain = recursions.make_chain(parameters, evidence, products)
        result = recursions.forward(chain, keep)
        predicted = unsort(result.predicted if result.predicted.dim() == 2 else result.predicted[-1], chain.order)
        if capturing(tokens):  # where nothing can be looked at
            suspect = unsort(recursions.guess_suspect(result), chain.order)
        else:
            suspect = unsort(recursions.find_suspect(parameters, chain, result), chain.order)
            if kind == "exact":
                suspect = suspect | scaled.suspect_in_carry(parameters, evidence, predicted, result.floor)
    carry = None
    if kind != "none":
        carry = scaled.log_carry(parameters, evidence, predicted) if result.carry is None else result.carry
        if capturing(tokens):  # the next window needs a valid one
            carry = torch.where(suspect[:, None], parameters.log_start.detach().double(), carry)
    return _Run(recursions, chain, result, unsort(result.log_likelihood, chain.order), carry, suspect)


class _Scan(torch.autograd.Function):
    """Autograd function of `scan` for the scaled and Triton recursions."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        log_start: Tensor,
        log_transition: Tensor,
        log_emission: Tensor,
        evidence: Evidence,
        products: torch.dtype,
        recursions: ModuleType,
        kind: CarryKind,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        parameters = Parameters(log_start, log_transition, log_emission)
        run = _run_filter(parameters, evidence, products, recursions, any(ctx.needs_input_grad), kind)
        ctx.shape, ctx.run = log_emission.shape, run
        # Cloned because ctx must not hold a returned tensor.
        log_likelihood, suspect = run.log_likelihood.clone(), run.suspect.clone()
        carry = None if run.carry is None else run.carry.clone()
        ctx.mark_non_differentiable(*(value for value in (carry, suspect) if value is not None))
        return log_likelihood, carry, suspect

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with without_autocast(grad):
            counts = _counts(ctx.shape, ctx.run, grad)
        return *(count.to(grad.dtype) for count in counts), None, None, None, None


def _counts(shape: torch.Size, run: _Run, grad: Tensor) -> Parameters:
    """Compute the expected counts of all but suspect sequences, weighted by grad [B]; emissions have a `shape`."""
    seed, order = torch.where(run.suspect, 0.0, grad), run.chain.order
    seed = seed if order is None else seed[order]
    seed = torch.where(run.result.log_likelihood == NEG_INF, 0.0, seed)
    counts: Parameters = run.recursions.accumulate(run.chain, run.result, seed, shape)
    return counts
