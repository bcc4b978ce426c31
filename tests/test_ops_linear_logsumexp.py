"""linear_logsumexp: every implementation against the specification.

The triton kernels run here in Triton's interpreter (tests/interpreter.py), in float32 only, since it has no bfloat16
products; benchmarks/gpu_blocked_ops.py checks both on a GPU.
"""


import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IMPLEMENTATIONS, INTERPRETING, STARTS, run_in_the_interpreter

from hmmlm.errors import InputError
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.linear_logsumexp import torch as portable


def inputs(n: int, m: int, h: int, with_bias: bool, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, h), (m, h)] + [(m,)] * with_bias
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run(impl: str, given: list[torch.Tensor], weight: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """Value and gradients, in float64; the triton kernels compute in float32."""
    dtype = torch.float32 if impl == "triton" else torch.float64
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
    out = linear_logsumexp(*leaves, impl=impl, **options)
    (out * weight.to(out.dtype)).sum().backward()
    return [out.detach().double(), *(x.grad.double() for x in leaves)]


def assert_agrees(impl: str, given: list[torch.Tensor]) -> None:
    weight = torch.linspace(-1, 2, given[0].shape[0], dtype=torch.float64)
    tolerance = 2e-5 if impl == "triton" else 1e-11
    for got, expected in zip(run(impl, given, weight), run("naive", given, weight), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("n", "m", "h", "with_bias"), [(1, 1, 1, False), (70, 131, 5, True), (64, 128, 16, False), (3, 65, 140, True)]
)
def test_agrees_with_the_specification(impl: str, n: int, m: int, h: int, with_bias: bool) -> None:
    assert_agrees(impl, inputs(n, m, h, with_bias, seed=n))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_large_scores_neither_overflow_nor_vanish(impl: str) -> None:
    given = [60 * x for x in inputs(9, 12, 3, False, seed=4)]
    values = run(impl, given, torch.ones(9))
    expected = run("naive", given, torch.ones(9))
    assert expected[0].abs().max() > 1000
    for got, want in zip(values, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("impl", ["naive", *IMPLEMENTATIONS])
def test_columns_of_minus_infinity_are_out(impl: str) -> None:
    u, w, bias = inputs(5, 6, 3, True, seed=5)
    gone = torch.tensor([0, 4])
    bias[gone] = -torch.inf
    value, _, grad_w, grad_bias = run(impl, [u, w, bias], torch.ones(5))
    left = torch.tensor([1, 2, 3, 5])
    torch.testing.assert_close(value, torch.logsumexp(u @ w[left].T + bias[left], 1), rtol=1e-5, atol=1e-5)
    assert (grad_w[gone] == 0).all() and (grad_bias[gone] == 0).all()
    nothing = run(impl, [u, w, torch.full_like(bias, -torch.inf)], torch.ones(5))
    assert (nothing[0] == -torch.inf).all()
    assert all((g == 0).all() for g in nothing[1:])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_result_may_be_changed_in_place(impl: str) -> None:
    u, w = (x.float() for x in inputs(3, 700, 4, False, seed=6))
    changed = linear_logsumexp(u.requires_grad_(), w, impl=impl).mul_(2)
    torch.testing.assert_close(changed, 2 * linear_logsumexp(u, w, impl="naive"))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_rows(impl: str) -> None:
    _, grad_u, grad_w = run(impl, [torch.zeros(0, 3), torch.ones(4, 3)], torch.zeros(0))
    assert grad_u.shape == (0, 3) and (grad_w == 0).all()


if INTERPRETING:
    from hmmlm.ops.linear_logsumexp import triton as kernels

    @pytest.mark.parametrize(
        ("processors", "n", "m", "h", "with_bias", "whole_and_splits"),
        [
            (132, 70, 700, 5, True, [(0, 11), (0, 22), (11, 1)]),  # few rows: they are split along the columns
            (132, 500, 40, 5, True, [(8, 1), (8, 1), (0, 16)]),  # few columns: only the gradient of w is split
            (4, 300, 600, 9, True, [(4, 4), (4, 4), (8, 2)]),  # more blocks than processors: only the last are split
            (4, 300, 600, 16, False, [(4, 4), (4, 4), (8, 2)]),
        ],
    )
    def test_triton_splits(
        monkeypatch: pytest.MonkeyPatch, processors: int, n: int, m: int, h: int, with_bias: bool,
        whole_and_splits: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        monkeypatch.setattr(kernels, "_processors", lambda _: processors)
        tiles = ((n, m, 64, 64), (n, m, 64, 32), (m, n, 64, 32))  # forward, gradient of u, gradient of w
        assert [kernels._schedule(*tile, torch.device("cpu"))[:2] for tile in tiles] == whole_and_splits
        given = inputs(n, m, h, with_bias, seed=n)
        if with_bias:
            given[2][: m // 2] = -torch.inf  # whole splits without a column
        assert_agrees("triton", given)

    @pytest.mark.parametrize(
        ("rows", "whole", "splits"), [(2048, 0, 8), (16384, 128, 1), (18432, 132, 11), (40960, 264, 2)]
    )
    def test_triton_schedules_fill_the_processors(rows: int, whole: int, splits: int) -> None:
        assert kernels._schedule(rows, 16384, 128, 128, torch.device("cpu"))[:2] == (whole, splits)

    def test_triton_partial_results_are_bounded() -> None:
        for rows in range(1, 200 * 128, 1000):
            schedule = kernels._schedule(rows, 10**6, 128, 64, torch.device("cpu"))
            assert schedule.splits * schedule.split_rows <= 4 * 132 * 128


if not INTERPRETING:

    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 999))
    def test_any_size(n: int, m: int, h: int, with_bias: bool, seed: int) -> None:
        assert_agrees("torch", inputs(n, m, h, with_bias, seed))

    def test_chunks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(portable, "_CHUNK", 40)
        assert_agrees("torch", inputs(17, 20, 3, True, seed=2))

    def test_rows_of_a_normalised_transition_sum_to_one() -> None:
        u, w = inputs(30, 30, 4, False, seed=7)
        rows = (u @ w.T - linear_logsumexp(u, w)[:, None]).exp().sum(1)
        torch.testing.assert_close(rows, torch.ones(30, dtype=torch.float64))

    def test_gradcheck() -> None:
        leaves = [x.requires_grad_() for x in inputs(4, 5, 3, True, seed=8)]
        assert torch.autograd.gradcheck(lambda u, w, b: linear_logsumexp(u, w, b, impl="torch"), leaves)

    def test_narrow_products_round_the_operands_and_nothing_else() -> None:
        """With bfloat16 products the value is exact for the rounded operands; gradients stay in float32."""
        u, w = (x.float() for x in inputs(40, 50, 32, False, seed=9))
        rounded = [x.bfloat16().double() for x in (u, w)]
        expected = linear_logsumexp(*rounded, impl="naive")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            by_autocast = linear_logsumexp(u, w)
        for value in (linear_logsumexp(u, w, product_dtype=torch.bfloat16), by_autocast):
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(linear_logsumexp(u, w).double(), expected, rtol=1e-6, atol=1e-6)
        u.requires_grad_()
        linear_logsumexp(u, w, product_dtype=torch.bfloat16).sum().backward()
        exact = torch.softmax(rounded[0] @ rounded[1].T, 1) @ rounded[1]
        assert (u.grad - exact).norm() / exact.norm() < 5e-3
        assert not torch.equal(u.grad, u.grad.bfloat16().float())

    @pytest.mark.parametrize(
        ("arguments", "options", "message"),
        [
            ((torch.ones(2, 3), torch.ones(4, 5)), {}, r"u \[2, 3\] and w \[4, 5\]"),
            ((torch.ones(2, 3), torch.ones(0, 3)), {}, "M > 0"),
            ((torch.ones(2, 3), torch.ones(4, 3), torch.ones(2)), {}, r"bias \[2\] must be \[4\]"),
            ((torch.ones(2, 3), torch.ones(4, 3)), {"impl": "cuda"}, "impl 'cuda' is unknown"),
            ((torch.ones(2, 3), torch.ones(4, 3)), {"product_dtype": torch.float16}, "float16 cannot hold"),
            ((torch.ones(2, 3).double(), torch.ones(4, 3).double()), {"impl": "triton"}, "no float64"),
        ],
    )
    def test_bad_input_is_named(arguments: tuple[torch.Tensor, ...], options: dict[str, object], message: str) -> None:
        with pytest.raises(InputError, match=message):
            linear_logsumexp(*arguments, **options)


if STARTS:

    def test_triton_kernels_in_the_interpreter() -> None:
        run_in_the_interpreter(__file__)
