"""Inputs of linear_logsumexp, blocked_emission and residual_norm, and their values and gradients on any device."""

from typing import Any

import torch
from torch import Tensor

from hmmlm.ops.blocked_emission import blocked_emission, make_tiles
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.residual_norm import residual_norm

Device = torch.device | str

LINEAR_CASES = [(1, 1, 1, False), (70, 131, 5, True), (64, 128, 16, False), (3, 65, 140, True)]
"""Rows of u, rows of w, columns, and whether there is a bias."""
EMISSION_CASES = [((1, 1, 0, 1), False), ((3, 4, 250, 6), True), ((2, 40, 63, 20), False), ((4, 17, 130, 150), True)]
"""Blocks, states per block, words beyond one per block, columns; and whether there is a bias."""
RESIDUAL_CASES = [(1, 1), (40, 5), (70, 32), (33, 300), (5, 1024)]
"""Rows and columns: rows fewer and more than a program's, a last program that is not full, rows of any width."""


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _leaves(given: list[Tensor], impl: str, device: Device) -> list[Tensor]:
    """The Triton kernels compute in float32."""
    return [x.to(device, torch.float32 if impl == "triton" else x.dtype, copy=True).requires_grad_() for x in given]


def _waves(out: Tensor) -> Tensor:
    """Return a weight for each output, in the sum that is differentiated."""
    return torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out)


def _values(out: Tensor, gradients: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.detach().double().cpu() for x in (out, *gradients)]


def _assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for value, expected in zip(got, want, strict=True):
        atol = tolerance * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=atol)


# --- linear_logsumexp ---


def linear_inputs(n: int, m: int, h: int, with_bias: bool, seed: int) -> list[Tensor]:
    """Return u [n, h], w [m, h] and perhaps bias [m], in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [_normal(generator, *shape) for shape in [(n, h), (m, h)] + [(m,)] * with_bias]


def solve_linear(
    impl: Any, given: list[Tensor], weight: Tensor | None = None, device: Device = "cpu", **options: Any
) -> list[Tensor]:
    """Return value and gradients in float64, on the CPU."""
    leaves = _leaves(given, impl, device)
    out = linear_logsumexp(*leaves, impl=impl, **options)
    weight = torch.linspace(-1, 2, len(given[0]), dtype=torch.float64) if weight is None else weight
    return _values(out, torch.autograd.grad(out, leaves, weight.to(out)))


def assert_linear_agrees(impl: str, given: list[Tensor], device: Device = "cpu") -> None:
    """Compare an implementation with the specification."""
    tolerance = 2e-5 if impl == "triton" else 1e-11
    for got, want in zip(solve_linear(impl, given, device=device), solve_linear("naive", given), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# --- blocked_emission ---


def emission_inputs(
    blocks: int, states: int, extra: int, h: int, with_bias: bool, seed: int
) -> tuple[Tensor, list[Tensor]]:
    """Return block_of_word [V], and hidden, words and perhaps bias; the first block has most of the extra words."""
    generator = torch.Generator().manual_seed(seed)
    uneven = torch.randint(0, 3 * blocks, (extra,), generator=generator)
    block_of_word = torch.cat([torch.arange(blocks), torch.where(uneven < blocks, uneven, 0)])
    block_of_word = block_of_word[torch.randperm(len(block_of_word), generator=generator)]
    shapes = [(blocks, states, h), (len(block_of_word), h), (len(block_of_word),)][: 3 if with_bias else 2]
    return block_of_word, [_normal(generator, *shape) for shape in shapes]


def solve_emission(impl: Any, block_of_word: Tensor, given: list[Tensor], device: Device = "cpu") -> list[Tensor]:
    """Return value and gradients in float64, on the CPU."""
    leaves = _leaves(given, impl, device)
    tiles = make_tiles(block_of_word, len(given[0])).to(device)
    out = blocked_emission(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None, tiles, impl=impl)
    return _values(out, torch.autograd.grad(out, leaves, _waves(out)))


def assert_emission_agrees(impl: str, block_of_word: Tensor, given: list[Tensor], device: Device = "cpu") -> None:
    """Compare an implementation with the specification."""
    want = solve_emission("naive", block_of_word, given)
    _assert_close(solve_emission(impl, block_of_word, given, device), want, 2e-5 if impl == "triton" else 1e-10)


# --- residual_norm ---


def residual_inputs(n: int, h: int, seed: int = 0) -> list[Tensor]:
    """Return embedding, w1, b1, w2, b2, gamma, beta in float64; about half of both ReLUs are open."""
    generator = torch.Generator().manual_seed(seed)
    given = [_normal(generator, *shape) for shape in [(n, h), (h, h), (h,), (h, h), (h,), (h,), (h,)]]
    return [given[0], given[1] / h**0.5, given[2], given[3] / h**0.5, *given[4:]]


def solve_residual(impl: Any, given: list[Tensor], device: Device = "cpu") -> list[Tensor]:
    """Return value and gradients in float64, on the CPU."""
    leaves = _leaves(given, impl, device)
    out = residual_norm(*leaves, impl=impl)
    return _values(out, torch.autograd.grad(out, leaves, _waves(out)))


def assert_residual_agrees(impl: str, given: list[Tensor], device: Device = "cpu") -> None:
    """Compare an implementation with the specification."""
    _assert_close(solve_residual(impl, given, device), solve_residual("naive", given), 3e-5)
