"""Inputs of linear_logsumexp, blocked_emission and residual_norm, and their values and gradients on any device.

The implementation "naive" is the specification, "triton" the kernels and any other name the portable functions.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hmmlm.ops.blocked_emission import Tiles, blocked_emission, make_tiles
from hmmlm.ops.common import logsumexp
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


def linear_specification(u: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear_logsumexp` from the whole score matrix."""
    scores = u @ w.T
    return logsumexp(scores if bias is None else scores + bias, 1)


def solve_linear(impl: str, given: list[Tensor], weight: Tensor | None = None, device: Device = "cpu") -> list[Tensor]:
    """Return value and gradients in float64, on the CPU."""
    leaves = _leaves(given, impl, device)
    out = (linear_specification if impl == "naive" else linear_logsumexp)(*leaves)
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


def emission_specification(hidden: Tensor, words: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """Compute `blocked_emission`: every state scores every word, and words of other blocks are masked."""
    scores = torch.einsum("mkh,vh->mkv", hidden, words)
    if bias is not None:
        scores = scores + bias
    blocks = torch.arange(hidden.shape[0], device=hidden.device)
    scores = scores.masked_fill((tiles.block_of_word != blocks[:, None])[:, None, :], float("-inf"))
    log_probs = scores.log_softmax(2)
    return log_probs[tiles.block_of_word, :, torch.arange(words.shape[0], device=words.device)]


def solve_emission(impl: str, block_of_word: Tensor, given: list[Tensor], device: Device = "cpu") -> list[Tensor]:
    """Return value and gradients in float64, on the CPU."""
    leaves = _leaves(given, impl, device)
    tiles = make_tiles(block_of_word, len(given[0])).to(device)
    solve = emission_specification if impl == "naive" else blocked_emission
    out = solve(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None, tiles)
    return _values(out, torch.autograd.grad(out, leaves, _waves(out)))


def assert_emission_agrees(impl: str, block_of_word: Tensor, given: list[Tensor], device: Device = "cpu") -> None:
    """Compare an implementation with the specification."""
    want = solve_emission("naive", block_of_word, given)
    _assert_close(solve_emission(impl, block_of_word, given, device), want, 2e-5 if impl == "triton" else 1e-10)


# --- residual_norm ---


def residual_inputs(n: int, h: int, seed: int = 0, inputs: int = 1) -> list[Tensor]:
    """Return embedding, w1, b1, w2, b2, gamma, beta in float64; about half of both ReLUs are open."""
    generator, d = torch.Generator().manual_seed(seed), inputs * h
    given = [_normal(generator, *shape) for shape in [(n, d), (h, d), (h,), (h, h), (h,), (h,), (h,)]]
    return [given[0], given[1] / d**0.5, given[2], given[3] / h**0.5, *given[4:]]


def residual_specification(e: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *norm: Tensor) -> Tensor:
    """Compute `residual_norm` as a composition of PyTorch operations."""
    inner = functional.linear(e, w1, b1).relu()
    return functional.layer_norm(functional.linear(inner, w2, b2).relu() + inner, norm[0].shape, *norm)


def solve_residual(impl: str, given: list[Tensor], device: Device = "cpu") -> list[Tensor]:
    """Return value and gradients in float64, on the CPU."""
    leaves = _leaves(given, impl, device)
    out = (residual_specification if impl == "naive" else residual_norm)(*leaves)
    return _values(out, torch.autograd.grad(out, leaves, _waves(out)))


def assert_residual_agrees(impl: str, given: list[Tensor], device: Device = "cpu") -> None:
    """Compare an implementation with the specification."""
    _assert_close(solve_residual(impl, given, device), solve_residual("naive", given), 3e-5)
