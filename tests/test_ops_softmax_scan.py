"""softmax_scan: the table of transitions against `blocked_scan` of the same factors, in log space."""

from typing import Any

import pytest
import torch
from helpers.blocked_scan import Case, make_case, weights
from torch import Tensor

from hmmlm.ops.blocked_scan import Features, blocked_scan, scaled, softmax, softmax_scan, table

CASES = [
    ((3, 4, 5, 9, 4, 6), {}),
    ((3, 4, 5, 9, 4, 6), {"entered": True, "restarts": True}),
    ((3, 4, 5, 9, 6, 6), {"entered": True, "ragged": True, "restarts": True}),
    ((1, 5, 3, 7, 3, 4), {"entered": True}),
    ((2, 64, 3, 7, 3, 9), {}),  # tiles so large that they are shared
]


def solve(case: Case, dtype: torch.dtype, specification: bool) -> dict[str, Tensor]:
    """Return likelihoods, the carry, and the gradients of features and carry, in float64."""
    case = case.to("cpu", dtype)
    block_of_word, u, w, _, log_start, log_emission = case.factors
    features = Features(block_of_word, u, w, log_start, log_emission)
    leaves = dict(zip(("u", "w", "log_start", "log_emission"), features[1:], strict=True))
    if case.entry is not None:
        leaves["entry"] = case.entry
    options: dict[str, Any] = {"entry": case.entry, "lengths": case.lengths, "restart": case.restart}
    if specification:
        result = blocked_scan(features.factors(), case.tokens, impl="naive", **options)
    else:
        result = softmax_scan(features, case.tokens, **options)
        assert result.suspect is not None and not result.suspect.any()
    total = (weights(len(case.tokens)).to(dtype) * result.log_likelihood).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = {"log_likelihood": result.log_likelihood, "carry": result.carry.log_probs.exp()}
    return {name: x.detach().double() for name, x in (found | dict(zip(leaves, gradients, strict=True))).items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [2**21, 1])  # all rows at a time, and one block at a time
@pytest.mark.parametrize(("size", "options"), CASES)
def test_agrees_with_the_specification(
    size: tuple[int, ...], options: dict[str, Any], chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_CHUNK", chunk)
    monkeypatch.setattr(softmax, "blocked_scan", None)  # the table is used
    case = make_case(*size, **options, seed=5)
    tolerance = 1e-10 if dtype == torch.float64 else 3e-5
    got, want = solve(case, dtype, False), solve(case, torch.float64, True)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=tolerance, atol=tolerance, msg=name)


def test_tiles_of_a_few_steps_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "_TILE_BUDGET", 2 * 4 * 4 * 4)
    case = make_case(3, 4, 5, 9, 4, 6, entered=True, seed=1)
    got, want = solve(case, torch.float64, False), solve(case, torch.float64, True)
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_without_a_table_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_LARGEST", 100)
    monkeypatch.setattr(softmax, "table_scan", None)
    case = make_case(3, 4, 5, 9, 4, 6, entered=True, seed=2)
    got, want = solve(case, torch.float64, False), solve(case, torch.float64, True)
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_sequences_whose_mass_underflows_are_recomputed() -> None:
    """The second word follows only by transitions of probability e^−200."""
    case = make_case(2, 2, 2, 4, 2, 3, seed=6)
    u, w = torch.tensor([[100.0, 0]] * 2 + [[0, 0]] * 2), torch.tensor([[1.0, 0]] * 2 + [[-1, 0]] * 2)
    factors = case.factors._replace(u=u.double(), w=w.double(), block_of_word=torch.tensor([0, 0, 1, 1]))
    case = case._replace(factors=factors, tokens=torch.tensor([[0, 2, 3], [2, 3, 0]]))
    got, want = solve(case, torch.float32, False), solve(case, torch.float64, True)
    assert got["log_likelihood"][0] < -190
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=3e-5, atol=3e-5, msg=name)
