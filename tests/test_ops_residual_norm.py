"""residual_norm: the kernels against the specification, the specification against the modules of PyTorch.

The Triton kernels run here in Triton's interpreter (tests/helpers/interpreter.py); tests/gpu runs them on a GPU.
"""

import pytest
import torch
from helpers.interpreter import (
    in_interpreter,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.layers import RESIDUAL_CASES, assert_residual_agrees, residual_inputs, solve_residual
from torch import nn

from hmmlm.models.networks import Residual
from hmmlm.ops.residual_norm import residual_norm


@in_interpreter
@pytest.mark.parametrize(("n", "h"), RESIDUAL_CASES)
def test_triton_agrees_with_the_specification(n: int, h: int) -> None:
    for inputs in (1, 2):
        assert_residual_agrees("triton", residual_inputs(n, h, seed=h, inputs=inputs))


@in_interpreter
def test_triton_under_autocast_is_as_exact_as_the_composition() -> None:
    """What is summed in float32 is more exact; the rest is set by ReLUs that rounding opens or shuts."""
    given = residual_inputs(70, 48, seed=3)
    exact = solve_residual("naive", given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = solve_residual("triton", given), solve_residual("naive", [x.float() for x in given])
    for got, other, expected in zip(mine, theirs, exact, strict=True):
        assert (got - expected).norm() < max(1.1 * (other - expected).norm(), 0.02 * expected.norm())


@in_interpreter
def test_triton_results_repeat_bit_by_bit() -> None:
    given = residual_inputs(100, 12)
    for first, second in zip(solve_residual("triton", given), solve_residual("triton", given), strict=True):
        assert torch.equal(first, second)


@in_interpreter
@pytest.mark.parametrize("shape", [(0, 5), (1, 3, 5), (129, 40), (300, 3, 33)])
def test_triton_sums_of_partial_sums(shape: tuple[int, ...]) -> None:
    from hmmlm.ops.residual_norm import triton as kernels

    partial = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kernels._sum(partial), partial.sum(0))


@in_interpreter
def test_triton_without_rows() -> None:
    value, *gradients = solve_residual("triton", residual_inputs(0, 6))
    assert value.shape == (0, 6) and all(bool((x == 0).all()) for x in gradients)


@in_interpreter
def test_triton_keeps_leading_dimensions() -> None:
    given = residual_inputs(6, 4)
    flat, folded = (solve_residual("triton", [e, *given[1:]]) for e in (given[0], given[0].view(2, 3, 4)))
    assert folded[0].shape == (2, 3, 4)
    for a, b in zip(flat, folded, strict=True):
        assert torch.equal(a, b.view(a.shape))


@in_interpreter
def test_triton_does_not_hide_nan() -> None:
    given = residual_inputs(3, 4)
    given[2][1] = torch.nan
    assert solve_residual("triton", given)[0].isnan().all()


@outside_interpreter
def test_the_specification_agrees_with_modules() -> None:
    given = residual_inputs(7, 6)
    first, second, norm = nn.Linear(6, 6).double(), nn.Linear(6, 6).double(), nn.LayerNorm(6).double()
    parameters = (*first.parameters(), *second.parameters(), *norm.parameters())
    with torch.no_grad():
        for to, value in zip(parameters, given[1:], strict=True):
            to.copy_(value)
    inner = first(given[0]).relu()
    torch.testing.assert_close(residual_norm(*given), norm(second(inner).relu() + inner))


@outside_interpreter
def test_gradients_agree_with_finite_differences() -> None:
    for inputs in (1, 2):
        given = [x.requires_grad_() for x in residual_inputs(4, 3, seed=1, inputs=inputs)]
        assert torch.autograd.gradcheck(residual_norm, given)


@outside_interpreter
def test_dropout_is_for_training_only() -> None:
    network, embedding = Residual(16, dropout=0.5), torch.randn(20, 16)
    assert sum(parameter.numel() for parameter in network.parameters()) == 2 * (16 * 16 + 16) + 2 * 16
    assert not torch.equal(network(embedding), network(embedding))
    evaluated = network.eval()(embedding)
    assert torch.equal(evaluated, network(embedding))
    without = Residual(16)
    without.load_state_dict(network.state_dict())
    torch.testing.assert_close(evaluated, without(embedding))


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)
