"""Log-likelihood of a dense HMM as a differentiable function.

The gradient is the expected counts, in closed form.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

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
    choose_kernels,
    installed,
    log_normalize,
    logsumexp,
    product_dtype,
    without_autocast,
)
from hmmlm.ops.scan import naive, scaled
from hmmlm.ops.scan.naive import Evidence, Parameters

LOG_SPACE_CELLS = 2**25  # largest [rows, Z, Z] intermediate of the log-space recursion
LOOP_STATES = 256  # most states for which compiled loops are faster than tensor operations on two cores
LOOP_PATH_STATES, LOOP_SEQUENCES = 1024, 8  # for best paths: most states, or least sequences
LARGE = 2**20  # emissions whose gradient the C library would return to the system
KERNEL_CELLS = 2**30  # largest [T, B, Z] that the Triton kernels allocate


def scan(parameters: Parameters, evidence: Evidence, impl: Impl = "auto") -> Scan:
    """Compute log p(x) [B], differentiable in the parameters and `evidence.initial`, and the carry over all Z states.

    Sequences whose scaled mass may have underflowed are recomputed in log space, in float64. Inside a CUDA graph they
    are reported as `suspect` instead, with the start distribution as their carry.
    """
    if impl == "naive":
        joint = naive.forward(parameters, evidence)[:, -1]
        return Scan(logsumexp(joint, 1), Carry(log_normalize(joint.detach().double())))
    products = product_dtype(parameters.log_start)
    recursions = choose_recursions(parameters, evidence, products, impl)
    inputs = (*parameters, evidence.initial)
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs):
        log_likelihood, final, suspect = _Scan.apply(*parameters, *evidence, products, recursions)
    else:  # the autograd function would cost a small model time
        log_likelihood, final, suspect = _run_filter(parameters, evidence, products, recursions, False)[3:]
    return Scan(log_likelihood, Carry(final.double().log()), suspect)


def loops_pay(states: int, device: torch.device) -> bool:
    """Return whether compiled loops over the steps are faster than tensor operations, and numba works here."""
    return states <= LOOP_STATES and _loops_work(device)


def path_loops_pay(states: int, batch: int, device: torch.device) -> bool:
    """Return the same for best paths, whose steps are no matrix products."""
    return (states <= LOOP_PATH_STATES or batch >= LOOP_SEQUENCES) and _loops_work(device)


def _loops_work(device: torch.device) -> bool:
    return device.type == "cpu" and installed("numba") and _importable("numba")


@cache
def _importable(package: str) -> bool:
    """Return whether an installed package can be imported; numba refuses versions of NumPy that it does not know."""
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def choose_recursions(parameters: Parameters, evidence: Evidence, products: torch.dtype, impl: Impl) -> ModuleType:
    """Return the module that implements the recursions."""
    like = parameters.log_start
    if impl == "auto" and products == like.dtype and loops_pay(like.shape[0], like.device):
        impl = "compiled"
    if impl != "compiled":
        return choose_kernels("scan", impl, like, "scaled", unsupported(parameters, evidence))
    reasons = {
        f"needs tensors on the CPU, not on {like.device}": like.device.type != "cpu",
        f"does not support products in {products}": products != like.dtype,
        "needs numba, which the extra hmmlm[fast] installs (pip install 'hmmlm[fast]')": not installed("numba"),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"scan: impl='compiled' {reason}: use impl='scaled'")
    return import_module("hmmlm.ops.scan.compiled")


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

    chain: Any  # of the module of recursions
    result: Any
    doubt: Tensor  # indices of the sequences that were recomputed in log space
    log_likelihood: Tensor  # [B]
    final: Tensor  # [B, Z]
    suspect: Tensor  # [B]


def _run_filter(
    parameters: Parameters, evidence: Evidence, products: torch.dtype, recursions: ModuleType, keep: bool
) -> _Run:
    """Run the filter, and again in log space for sequences whose mass may have underflowed."""
    tokens = evidence.tokens
    with without_autocast(tokens):  # `products` already is the dtype of products
        chain = recursions.make_chain(parameters, evidence, products)
        result = recursions.forward(chain, keep)
        doubt = torch.empty(0, dtype=torch.long, device=tokens.device)
        if not capturing(tokens):
            doubt = chain.unsort(recursions.doubtful(parameters, chain, result)).nonzero().squeeze(1)
    log_likelihood, final = chain.unsort(result.log_likelihood), chain.unsort(result.final)
    if doubt.numel():
        joint = _in_log_space(lambda p, e: naive.forward(p, e)[:, -1], parameters, evidence, doubt)
        log_likelihood = log_likelihood.index_copy(0, doubt, logsumexp(joint, 1).to(log_likelihood.dtype))
        final = final.index_copy(0, doubt, torch.softmax(joint, 1).nan_to_num(0.0).to(final.dtype))
    suspect = torch.zeros(tokens.shape[:1], dtype=torch.bool, device=tokens.device)
    if tokens.is_cuda or capturing(tokens):
        # Outside a graph no sequence is suspect any more. The kernels run anyway: warm-up steps compile them.
        found = chain.unsort(recursions.suspicious(result))
        suspect = found if capturing(tokens) else suspect
        final = torch.where(suspect[:, None], chain.start, final)  # the next window needs a valid carry
    return _Run(chain, result, doubt, log_likelihood, final, suspect)


class _Scan(torch.autograd.Function):
    """Autograd function of `scan` for the scaled and Triton recursions."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        log_start: Tensor,
        log_transition: Tensor,
        log_emission: Tensor,
        tokens: Tensor,
        lengths: Tensor | None,
        initial: Tensor | None,
        restart: Tensor | None,
        products: torch.dtype,
        recursions: ModuleType,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parameters = Parameters(log_start, log_transition, log_emission)
        evidence = Evidence(tokens, lengths, initial, restart)
        if tokens.device.type == "cpu" and log_emission.numel() >= LARGE:
            keep_freed_memory()  # for the next step: whoever needs gradients trains
        run = _run_filter(parameters, evidence, products, recursions, any(ctx.needs_input_grad))
        ctx.save_for_backward(*parameters)
        ctx.evidence, ctx.run, ctx.recursions = evidence, run, recursions
        # Cloned because ctx must not hold a returned tensor.
        log_likelihood, final, suspect = run.log_likelihood.clone(), run.final.clone(), run.suspect.clone()
        ctx.mark_non_differentiable(final, suspect)
        return log_likelihood, final, suspect

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parameters = Parameters(*ctx.saved_tensors)
        evidence, (chain, result, doubt, _, _, suspect) = ctx.evidence, ctx.run
        seed = torch.where(suspect, 0.0, grad)
        if doubt.numel():
            seed = seed.index_fill(0, doubt, 0.0)
        seed = torch.where(result.log_likelihood == NEG_INF, 0.0, chain.sort(seed))
        with without_autocast(grad):
            counts, first = ctx.recursions.accumulate(chain, result, seed, parameters.log_emission.shape)
            before = None
            if ctx.needs_input_grad[5]:  # β at the token before position 0
                before = chain.unsort(scaled.move(first.to(grad.dtype), chain.transition.t()))
        if doubt.numel():
            exact, pieces = _log_space_problems(parameters, evidence, doubt)
            weights = grad[doubt].double().split(pieces[0].tokens.shape[0])
            for piece, weight in zip(pieces, weights, strict=True):
                more = naive.expected_counts(exact, piece, weight)
                counts = Parameters(*(a + b for a, b in zip(counts, more, strict=True)))
            if before is not None:
                scores = _in_log_space(naive.initial_gradient, parameters, evidence, doubt)
                before[doubt] = (scores * grad[doubt, None]).to(before.dtype)
        dtype = grad.dtype
        return *(count.to(dtype) for count in counts), None, None, before, None, None, None


def _log_space_problems(parameters: Parameters, evidence: Evidence, rows: Tensor) -> tuple[Parameters, list[Evidence]]:
    """Return parameters and the sequences at `rows` in float64, split so that [rows, Z, Z] fits LOG_SPACE_CELLS."""
    exact = Parameters(*(p.detach().double() for p in parameters))
    size = max(1, LOG_SPACE_CELLS // exact.log_start.shape[0] ** 2)
    pieces = [evidence.rows(piece) for piece in rows.split(size)]
    return exact, [p if p.initial is None else p._replace(initial=p.initial.double()) for p in pieces]


def _in_log_space(
    function: Callable[[Parameters, Evidence], Tensor], parameters: Parameters, evidence: Evidence, rows: Tensor
) -> Tensor:
    """Apply a log-space function to the sequences at `rows` in float64; return [rows, ...]."""
    exact, pieces = _log_space_problems(parameters, evidence, rows)
    return torch.cat([function(exact, piece) for piece in pieces])
