"""The implementations of the likelihood of an HMM, asked in order: the first that does not refuse computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import BlockSupport
from hmmlm.ops.blocked_scan import Factors, blocked_scan
from hmmlm.ops.blocked_scan import refusal as blocked_refusal
from hmmlm.ops.common import Carry, Impl, Scan, capturing, product_dtype, without_autocast
from hmmlm.ops.pieces import at_once, fits
from hmmlm.ops.scan import Evidence, scan
from hmmlm.ops.scan.api import CarryKind, refusal
from hmmlm.scan.composition import Composition, matrices
from hmmlm.scan.generic_scan import block_states, compute_again, generic_scan, over_support
from hmmlm.scan.parallel_scan import parallel_scan
from hmmlm.scan.recorded_scan import RecordedScans
from hmmlm.scan.recursions import last_filtered, log_initial, run_filter, sort_batch
from hmmlm.scan.union_scan import Scanner, scan_components
from hmmlm.transitions import BlockDiagonal, Factored
from hmmlm.transitions.tiled import TABLE_CELLS, TiledTransition

PARALLEL_STEPS = 2048  # least tokens for which chunks of a sequence side by side are faster than one after another
PARALLEL_PRODUCT = {"cpu": 2**13, "cuda": 2**24}  # largest B·Z³ of these


@dataclass(frozen=True)
class Problem:
    """A batch of an HMM whose likelihood is to be computed."""

    hmm: Composition
    tokens: Tensor  # [B, T]
    lengths: Tensor | None  # [B]
    carry: Carry | None
    restart: Tensor | None  # [B, T] bool
    wanted: CarryKind  # which carry to compute: none, or one of which no state may be lost

    @cached_property
    def evidence(self) -> Evidence:
        """The batch for a model of two matrices."""
        carry = None if self.carry is None else self.carry.over_all(self.hmm.num_states)
        return Evidence(self.tokens, self.lengths, carry, self.restart)


class Implementation(NamedTuple):
    """A way to compute the likelihood of a batch, the gradient and the carry."""

    name: str
    refuses: Callable[[Problem], str]
    """Returns why it does not serve; empty if it does."""
    run: Callable[[Problem], Scan]


class Choice(NamedTuple):
    """The implementation that computes the likelihood of a batch."""

    name: str
    refused: dict[str, str]
    """Why each one before it did not serve."""


def choose(problem: Problem) -> tuple[Implementation, dict[str, str]]:
    """Return the first implementation that serves, and why those before it do not."""
    refused = dict[str, str]()
    for each in IMPLEMENTATIONS:
        reason = each.refuses(problem)
        if not reason:
            return each, refused
        refused[each.name] = reason
    raise InputError(f"impl={problem.hmm.impl!r} is for a model of two matrices, and {_kinds(problem.hmm)}: use 'auto'")


def run(problem: Problem) -> Scan:
    """Compute the likelihood of a batch, differentiable, and the carry."""
    return choose(problem)[0].run(problem)


def _kinds(hmm: Composition) -> str:
    return f"the model is {hmm.kind}"


# --- unions ---


def _scan_union(problem: Problem) -> Scan:
    parts = problem.hmm.components
    wanted: CarryKind = "none" if problem.wanted == "none" else "exact"

    def scan_of(part: Composition) -> Scanner:
        return lambda tokens, lengths, carry, restart: run(Problem(part, tokens, lengths, carry, restart, wanted))

    batch = (problem.tokens, problem.lengths, problem.carry, problem.restart)
    sizes = [part.num_states for part in parts]
    return scan_components([scan_of(part) for part in parts], sizes, problem.hmm.log_weights, *batch)


# --- two matrices ---


def _dense(impl: Impl) -> Implementation:
    def refuses(problem: Problem) -> str:
        parameters = matrices(problem.hmm)
        if parameters is None:
            return _kinds(problem.hmm)
        if problem.hmm.impl != "auto":  # which raises an error if it does not serve
            return "" if problem.hmm.impl == impl else f"impl is {problem.hmm.impl!r}"
        return refusal(parameters, problem.evidence, product_dtype(parameters.log_start), impl)

    def run(problem: Problem) -> Scan:
        parameters = matrices(problem.hmm)
        assert parameters is not None
        learns = torch.is_grad_enabled() and problem.hmm.requires_grad
        if problem.tokens.is_cuda and not learns:
            replayed = RecordedScans.of(problem.hmm).run(parameters, problem.evidence, impl, problem.wanted == "exact")
            if replayed is not None:
                return replayed
        batch = (problem.tokens, problem.lengths, problem.carry, problem.restart)
        result = scan(parameters, problem.evidence, impl, problem.wanted)
        return compute_again(result, lambda: problem.hmm, *batch, exact_carry=problem.wanted == "exact")

    return Implementation(impl, refuses, run)


# --- two matrices of few states, long sequences ---


def _refuses_parallel(problem: Problem) -> str:
    hmm, (batch, steps) = problem.hmm, problem.tokens.shape
    if matrices(hmm) is None:
        return _kinds(hmm)
    if hmm.impl != "auto":
        return "" if hmm.impl == "parallel" else f"impl is {hmm.impl!r}"
    if capturing(problem.tokens):
        return "cannot be recorded in a CUDA graph"
    if steps < PARALLEL_STEPS:
        return f"is slower for fewer than {PARALLEL_STEPS:,} tokens"
    if batch * hmm.num_states**3 > PARALLEL_PRODUCT.get(problem.tokens.device.type, 0):
        return f"is slower for {hmm.num_states:,} states, {batch} at a time"
    return ""


def _scan_parallel(problem: Problem) -> Scan:
    batch = (problem.tokens, problem.lengths, problem.carry, problem.restart)
    return compute_again(parallel_scan(problem.hmm, problem.evidence), lambda: problem.hmm, *batch, exact_carry=True)


# --- tiles of a small model, kept for queries ---


def _refuses_tiles(problem: Problem) -> str:
    hmm = problem.hmm
    if not isinstance(hmm.transition, TiledTransition) or not isinstance(hmm.emission, Blocked):
        return _kinds(hmm)
    if hmm.impl != "auto":
        return f"impl is {hmm.impl!r}"
    if problem.tokens.is_cuda:
        return f"needs tensors on the CPU, not on {hmm.device}"
    if torch.is_grad_enabled() and hmm.requires_grad:
        return "it has no gradient"
    if problem.restart is not None:
        return "it does not restart"
    return (
        "" if fits(hmm.num_states**2, TABLE_CELLS) else f"the matrix has more than {at_once(1, TABLE_CELLS):,} entries"
    )


def _scan_tiles(problem: Problem) -> Scan:
    model = problem.hmm.detach()
    batch = sort_batch(model, problem.tokens, problem.lengths)
    with torch.no_grad(), without_autocast(model.log_start):
        lattice = run_filter(model, batch, log_initial(model, problem.carry, batch))
    last = last_filtered(model, lattice) if problem.wanted != "none" else lattice.filtered[0]
    return Scan(batch.unsort(lattice.log_likelihood()).to(model.dtype), Carry(batch.unsort(last)))


# --- factored transitions between blocks ---


def _refuses_blocked(problem: Problem) -> str:
    hmm = problem.hmm
    if not isinstance(hmm.transition, Factored) or not isinstance(hmm.emission, Blocked):
        return _kinds(hmm)
    if hmm.impl not in ("auto", "scaled"):
        return f"impl is {hmm.impl!r}"
    reason = blocked_refusal(hmm.device, hmm.dtype)
    if reason:
        return reason
    if not capturing(problem.tokens):
        missing = problem.tokens < 0
        if problem.lengths is not None:
            steps = torch.arange(missing.shape[1], device=missing.device)
            missing &= steps < problem.lengths[:, None]
        if bool(missing.any()):
            return "some tokens are missing"
    return ""


def _scan_blocked(problem: Problem) -> Scan:
    hmm, tokens, lengths, carry, entry = problem.hmm, problem.tokens, problem.lengths, problem.carry, None
    transition, emission = hmm.transition, hmm.emission
    assert isinstance(transition, Factored) and isinstance(emission, Blocked)
    if carry is not None:
        log_probs, source = over_support(hmm, carry)
        target = BlockSupport(emission.block_of_word[tokens[:, 0].clamp(min=0)], emission.width)
        entry = transition.forward_step(LOG, log_probs.to(hmm.dtype), source, target)[:, None]
    factors = Factors(
        emission.block_of_word,
        transition.u,
        transition.w,
        transition.log_normalizer,
        hmm.log_start,
        emission.log_probs,
    )
    exact = problem.wanted == "exact"
    restart = problem.restart
    result = blocked_scan(factors, tokens, entry=entry, lengths=lengths, restart=restart, exact_carry=exact)
    result = compute_again(result, lambda: hmm, tokens, lengths, None, restart, entry, exact_carry=exact)
    return result._replace(carry=Carry(result.carry.log_probs, block_states(emission, tokens, lengths)))


# --- any HMM ---


def _scan_generic(problem: Problem) -> Scan:
    batch, exact = (problem.tokens, problem.lengths, problem.carry, problem.restart), problem.wanted == "exact"
    return generic_scan(problem.hmm, *batch, exact_carry=exact, in_log_space=problem.hmm.impl == "naive")


IMPLEMENTATIONS = (
    Implementation(
        "components",
        lambda p: "" if isinstance(p.hmm.transition, BlockDiagonal) else "the model is no union",
        _scan_union,
    ),
    Implementation("naive", lambda p: "" if p.hmm.impl == "naive" else "is slow", _scan_generic),
    _dense("compiled"),
    Implementation("parallel", _refuses_parallel, _scan_parallel),
    _dense("triton"),
    _dense("scaled"),
    Implementation("tiles", _refuses_tiles, _scan_tiles),
    Implementation("blocked", _refuses_blocked, _scan_blocked),
    Implementation(
        "generic", lambda p: "" if p.hmm.impl in ("auto", "scaled") else f"impl is {p.hmm.impl!r}", _scan_generic
    ),
)
"""In the order in which they are asked."""
