"""linear_logsumexp: every implementation against the specification.

The Triton kernels run here in Triton's interpreter (tests/helpers/interpreter.py), in float32 only, since it has no
bfloat16 products; tests/gpu runs both on a GPU.
"""

import pytest
import torch
from helpers.interpreter import (
    INTERPRETING,
    implementations,
    in_interpreter,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.layers import LINEAR_CASES, assert_linear_agrees, linear_inputs, linear_specification, solve_linear
from helpers.ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.distributed import normalizers
from hmmlm.distributed.normalizers import split_linear_logsumexp
from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.ops.linear_logsumexp import chunked, linear_logsumexp

IMPLEMENTATIONS = implementations("chunked")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("n", "m", "h", "with_bias"), LINEAR_CASES)
def test_agrees_with_the_specification(impl: str, n: int, m: int, h: int, with_bias: bool) -> None:
    assert_linear_agrees(impl, linear_inputs(n, m, h, with_bias, seed=n))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_large_scores_neither_overflow_nor_vanish(impl: str) -> None:
    given = [60 * x for x in linear_inputs(9, 12, 3, False, seed=4)]
    values, expected = (solve_linear(name, given, torch.ones(9)) for name in (impl, "naive"))
    assert expected[0].abs().max() > 1000
    for got, want in zip(values, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("impl", ["naive", *IMPLEMENTATIONS])
def test_columns_of_minus_infinity_are_ignored(impl: str) -> None:
    u, w, bias = linear_inputs(5, 6, 3, True, seed=5)
    ignored, kept = torch.tensor([0, 4]), torch.tensor([1, 2, 3, 5])
    bias[ignored] = -torch.inf
    value, _, grad_w, grad_bias = solve_linear(impl, [u, w, bias], torch.ones(5))
    torch.testing.assert_close(value, torch.logsumexp(u @ w[kept].T + bias[kept], 1), rtol=1e-5, atol=1e-5)
    assert (grad_w[ignored] == 0).all() and (grad_bias[ignored] == 0).all()
    value, *gradients = solve_linear(impl, [u, w, torch.full_like(bias, -torch.inf)], torch.ones(5))
    assert (value == -torch.inf).all()
    assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_result_may_be_changed_in_place(impl: str) -> None:
    u, w = (x.float() for x in linear_inputs(3, 700, 4, False, seed=6))
    changed = linear_logsumexp(u.requires_grad_(), w).mul_(2)
    torch.testing.assert_close(changed, 2 * linear_specification(u, w))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: str) -> None:
    _, grad_u, grad_w = solve_linear(impl, [torch.zeros(0, 3), torch.ones(4, 3)], torch.zeros(0))
    assert grad_u.shape == (0, 3) and (grad_w == 0).all()


if INTERPRETING:
    from hmmlm.ops.linear_logsumexp import triton as kernels


@in_interpreter
@pytest.mark.parametrize(
    ("processors", "n", "m", "h", "with_bias", "whole_and_splits"),
    [
        (132, 70, 700, 5, True, [(0, 11), (0, 22), (11, 1)]),  # few rows: split along the columns
        (132, 500, 40, 5, True, [(8, 1), (8, 1), (0, 16)]),  # few columns: only the gradient of w is split
        (4, 300, 600, 9, True, [(4, 4), (4, 4), (8, 2)]),  # more blocks than processors: only the last are split
        (4, 300, 600, 16, False, [(4, 4), (4, 4), (8, 2)]),
    ],
)
def test_triton_splits(
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    n: int,
    m: int,
    h: int,
    with_bias: bool,
    whole_and_splits: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(kernels, "_processors", lambda _: processors)
    tiles = ((n, m, 64, 64), (n, m, 64, 32), (m, n, 64, 32))  # forward, gradient of u, gradient of w
    assert [kernels._schedule(*tile, torch.device("cpu"))[:2] for tile in tiles] == whole_and_splits
    given = linear_inputs(n, m, h, with_bias, seed=n)
    if with_bias:
        given[2][: m // 2] = -torch.inf  # whole splits without a column
    assert_linear_agrees("triton", given)


@in_interpreter
@pytest.mark.parametrize(
    ("rows", "whole", "splits"), [(2048, 0, 8), (16384, 128, 1), (18432, 132, 11), (40960, 264, 2)]
)
def test_triton_schedules_fill_the_processors(rows: int, whole: int, splits: int) -> None:
    assert kernels._schedule(rows, 16384, 128, 128, torch.device("cpu"))[:2] == (whole, splits)


@in_interpreter
def test_triton_partial_results_are_bounded() -> None:
    for rows in range(1, 200 * 128, 1000):
        schedule = kernels._schedule(rows, 10**6, 128, 64, torch.device("cpu"))
        assert schedule.splits * schedule.split_rows <= 4 * 132 * 128


@outside_interpreter
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 999))
def test_any_size(n: int, m: int, h: int, with_bias: bool, seed: int) -> None:
    assert_linear_agrees("chunked", linear_inputs(n, m, h, with_bias, seed))


@outside_interpreter
def test_tiles_add_up() -> None:
    rows, columns = chunked._CPU_TILE
    assert_linear_agrees("chunked", linear_inputs(2 * rows + 1, 2 * columns + 1, 3, True, seed=2))


@outside_interpreter
def test_rows_of_a_normalized_transition_sum_to_one() -> None:
    u, w = linear_inputs(30, 30, 4, False, seed=7)
    rows = (u @ w.T - linear_logsumexp(u, w)[:, None]).exp().sum(1)
    torch.testing.assert_close(rows, torch.ones(30, dtype=torch.float64))


@outside_interpreter
def test_gradients_agree_with_finite_differences() -> None:
    leaves = [x.requires_grad_() for x in linear_inputs(4, 5, 3, True, seed=8)]
    assert torch.autograd.gradcheck(linear_logsumexp, leaves)


@outside_interpreter
def test_narrow_products_round_the_operands_only() -> None:
    """With bfloat16 products the value is exact for the rounded operands; gradients stay in float32."""
    u, w = (x.float() for x in linear_inputs(40, 50, 32, False, seed=9))
    rounded = [x.bfloat16().double() for x in (u, w)]
    expected = linear_specification(*rounded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = linear_logsumexp(u, w)
        (gradient,) = torch.autograd.grad(linear_logsumexp(u.requires_grad_(), w).sum(), [u])
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(linear_logsumexp(u, w).double(), expected, rtol=1e-6, atol=1e-6)
    exact = torch.softmax(rounded[0] @ rounded[1].T, 1) @ rounded[1]
    assert (gradient - exact).norm() / exact.norm() < 5e-3
    assert not torch.equal(gradient, gradient.bfloat16().float())


@outside_interpreter
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), torch.ones(4, 5)), r"u \[2, 3\] and w \[4, 5\] must be \[N, h\] and \[M, h\]"),
        ((torch.ones(2, 3), torch.ones(0, 3)), "M > 0"),
        ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(2)), r"bias \[2\] must be \[4\]"),
    ],
)
def test_bad_input_is_named(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        linear_logsumexp(*arguments)


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def check_split(states: int) -> None:
    generator = torch.Generator().manual_seed(0)
    u, w = (torch.randn(states, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(world().count, states, generator=generator, dtype=torch.float64)  # the loss of each process
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalizers, "linear_logsumexp", lambda u, w: rows.append(len(u)) or linear_logsumexp(u, w))
        found = split_linear_logsumexp(u, w)
        with torch.no_grad():
            torch.testing.assert_close(split_linear_logsumexp(u, w), found)
    assert rows in ([states // world().count, states], [states // world().count + 1, states])
    own = torch.autograd.grad(found @ weights[world().rank], (u, w))
    world().sum_(own)
    expected = linear_logsumexp(u, w)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, torch.autograd.grad(expected @ weights.sum(0), (u, w)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_rows_are_divided_among_processes(count: int) -> None:
    run_ranks(count, check_split, 9)
