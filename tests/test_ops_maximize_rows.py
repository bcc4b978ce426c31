"""The kernel of the M step against tensor operations, in Triton's interpreter; tests/gpu runs it on a GPU."""

import pytest
import torch
from helpers.compiled import ptx, record
from helpers.interpreter import (
    in_interpreter,
    needs_triton,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from torch import Tensor

from hmmlm.ops.maximize_rows import maximize_rows

CASES = [(1, 7), (5, 64), (4, 300), (3, 5000)]
SETTINGS = [(0.0, 1.0), (0.0, 0.1), (1e-3, 0.1), (2.0, 1.0)]


def make_problem(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return counts with zeros and an empty row, and log-probabilities with zeros."""
    generator = torch.Generator().manual_seed(columns)
    counts = torch.rand(rows, columns, generator=generator) * 10
    counts[torch.rand(counts.shape, generator=generator) < 0.3] = 0.0
    log_probs = torch.randn(rows, columns, generator=generator).mul(4)
    log_probs[torch.rand(counts.shape, generator=generator) < 0.1] = -torch.inf
    if rows > 2:
        counts[1] = 0.0
    return counts, log_probs.log_softmax(1)


@starts_interpreter
def test_the_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@in_interpreter
@pytest.mark.parametrize("size", CASES)
@pytest.mark.parametrize(("pseudocount", "step"), SETTINGS)
def test_triton_agrees_with_tensor_operations(size: tuple[int, int], pseudocount: float, step: float) -> None:
    counts, log_probs = make_problem(*size)
    want = maximize_rows(counts.double(), log_probs.double(), pseudocount, step)
    out = torch.full_like(counts, torch.nan)
    got = maximize_rows(counts, log_probs, pseudocount, step, out)
    assert got is out
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    if size[0] > 2:
        assert torch.equal(got[1], log_probs[1])


@in_interpreter
def test_triton_keeps_nan() -> None:
    counts, log_probs = make_problem(3, 10)
    counts[2, 4] = torch.nan
    got = maximize_rows(counts, log_probs, step=0.5)
    assert got[2].isnan().all() and not got[:2].isnan().any()


@outside_interpreter
def test_the_result_can_overwrite_the_current_log_probabilities() -> None:
    counts, log_probs = make_problem(4, 9)
    want = maximize_rows(counts, log_probs, 0.1, 0.5)
    assert maximize_rows(counts, log_probs, 0.1, 0.5, out=log_probs) is log_probs
    assert torch.equal(log_probs, want)


@outside_interpreter
def test_other_dtypes_are_left_to_tensor_operations() -> None:
    counts, log_probs = (x.double() for x in make_problem(2, 3))
    assert maximize_rows(counts, log_probs).dtype == torch.float64


@needs_triton
@outside_interpreter
def test_the_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from hmmlm.ops.maximize_rows import triton as kernels

    launches = record(monkeypatch, kernels)
    counts = torch.zeros(2, 32_000)
    kernels.maximize_rows(counts, counts, 1e-4, 0.1, torch.empty_like(counts))
    assert all("st.global.v4" in ptx(*launch) for launch in launches)
    assert launches
