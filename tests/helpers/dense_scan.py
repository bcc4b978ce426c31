"""Problems for the dense scan, and their solution by any implementation on any device."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers import naive_scan
from helpers.oracle import NEG_INF, random_hmm
from hmmlm.hmm import HMM
from hmmlm.ops.common import Carry, Impl, Scan
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.ops.scan import scan as run_scan
from hmmlm.ops.scan.api import CarryKind
from hmmlm.scan.generic_scan import compute_again

KERNEL_CASES: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((17, 11, 5, 4), {}),
    ((17, 11, 4, 3), {"carried": True}),
    ((16, 8, 9, 3), {"restarts": True}),
    ((33, 70, 3, 4), {"carried": True, "restarts": True}),
    ((1, 1, 1, 2), {"carried": True}),
    ((40, 130, 17, 2), {"zeros": 0.4}),
    ((70, 12, 2, 3), {"carried": True, "zeros": 0.4, "restarts": True}),
]
"""Sizes (states, words, batch, steps) and options of problems for the Triton kernels."""
EXCLUDED_FUTURE = torch.tensor([[0] * 2 + [1] * 5, [0] * 7])
"""Tokens of which, in `only_first`, the later ones are best explained by a state that the earlier ones exclude."""


def log_parameters(probs: tuple[Tensor, ...], dtype: torch.dtype = torch.float64) -> Parameters:
    return Parameters(*(p.log().to(dtype) for p in probs))


def make_problem(
    states: int,
    words: int,
    batch: int,
    steps: int,
    *,
    ragged: bool = False,
    carried: bool = False,
    restarts: bool = False,
    sharpness: float = 1.0,
    zeros: float = 0.0,
    seed: int = 0,
) -> tuple[Parameters, Evidence]:
    """Return parameters in float64 whose values fit float32, and tokens of which some are missing."""
    generator = torch.Generator().manual_seed(seed)
    parameters = Parameters(*(p.log().float().double() for p in random_hmm(states, words, seed, sharpness, zeros)))
    tokens = torch.randint(-1, words, (batch, steps), generator=generator)
    lengths = torch.randint(1, steps + 1, (batch,), generator=generator) if ragged else None
    carry = torch.rand(batch, states, generator=generator, dtype=torch.float64) if carried else None
    if carry is not None:
        carry = (carry / carry.sum(1, keepdim=True)).log()
    restart = torch.rand(batch, steps, generator=generator) < 0.3 if restarts else None
    return parameters, Evidence(tokens, lengths, carry, restart)


def sticky(log_leak: float, log_wrong: float) -> Parameters:
    """Return two states that hardly ever change, each with its own word, hardly ever emitting the other's."""
    stay, right = math.log1p(-math.exp(log_leak)), math.log1p(-math.exp(log_wrong))
    transition = torch.tensor([[stay, log_leak], [log_leak, stay]], dtype=torch.float64)
    emission = torch.tensor([[right, log_wrong], [log_wrong, right]], dtype=torch.float64)
    return Parameters(torch.tensor([0.5, 0.5], dtype=torch.float64).log(), transition, emission)


def only_first(log_leak: float) -> Parameters:
    """Return `sticky`, starting in the first state."""
    return sticky(log_leak, -30.0)._replace(log_start=torch.tensor([0.0, NEG_INF], dtype=torch.float64))


def scan(parameters: Parameters, evidence: Evidence, impl: Impl = "auto", carry: CarryKind = "kept") -> Scan:
    """Compute the likelihood by the specification ("naive"), or as an HMM does by one implementation."""
    if impl == "naive":
        return naive_scan.scan(parameters, evidence)
    tokens, lengths, before, restart, _ = evidence
    given = None if before is None else Carry(before)
    if impl == "parallel":
        return HMM(*parameters, impl=impl).scan(tokens, lengths, given, restart, carry == "exact")
    result, hmm = run_scan(parameters, evidence, impl, carry), HMM(*parameters)
    return compute_again(result, lambda: hmm, tokens, lengths, given, restart, exact_carry=carry == "exact")


class Solution(NamedTuple):
    scan: Scan
    gradients: dict[str, Tensor]  # of a weighted sum of log-likelihoods, in float64, on the CPU


def solve(
    parameters: Parameters,
    evidence: Evidence,
    impl: Impl,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Solution:
    """Run the scan and its backward pass; an impossible sequence must have no gradient."""
    inputs = {name: p.to(device, dtype, copy=True).requires_grad_() for name, p in parameters._asdict().items()}
    moved = Evidence(*(None if value is None else value.to(device) for value in evidence))
    result = scan(Parameters(**inputs), moved, impl)
    weight = torch.linspace(-1, 2, len(moved.tokens), dtype=dtype, device=device)
    if impl == "naive":  # the specification: autograd of −inf is not
        weight = torch.where(result.log_likelihood == NEG_INF, 0.0, weight)
    gradients = torch.autograd.grad(
        result.log_likelihood, list(inputs.values()), weight, allow_unused=True, materialize_grads=True
    )
    return Solution(result, {name: g.double().cpu() for name, g in zip(inputs, gradients, strict=True)})


def assert_agrees(
    parameters: Parameters,
    evidence: Evidence,
    impl: Impl,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rtol: float = 2e-4,
    atol: float = 2e-5,
) -> None:
    """Compare an implementation with log space in float64: likelihoods, carries and gradients."""
    got, want = solve(parameters, evidence, impl, dtype, device), solve(parameters, evidence, "naive")
    assert got.scan.suspect is None  # only inside a CUDA graph
    log_likelihood, probs = got.scan.log_likelihood.double().cpu(), got.scan.carry.log_probs.exp().cpu()
    torch.testing.assert_close(log_likelihood, want.scan.log_likelihood, rtol=rtol, atol=atol)
    possible = want.scan.log_likelihood > NEG_INF
    torch.testing.assert_close(probs[possible], want.scan.carry.log_probs[possible].exp(), rtol=rtol, atol=atol)
    for name, expected in want.gradients.items():
        torch.testing.assert_close(
            got.gradients[name], expected, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
