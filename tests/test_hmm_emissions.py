"""Products and sums of groups of an emission matrix whose columns repeat, compared with log space."""

import pytest
import torch

from hmmlm import HMM
from hmmlm.emissions.columns import EmissionMatrix, equal_columns, log_group_sums
from hmmlm.errors import InputError


def smoothed(states: int = 24, words: int = 3000, seen: int = 200) -> torch.Tensor:
    """Return an emission matrix [Z, V] of which all words but `seen` have the same column."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.rand(states, words, generator=generator) ** 8
    unseen = torch.randperm(words, generator=generator)[seen:]
    counts[:, unseen] = 1e-3 * torch.rand(states, 1, generator=generator)
    return (counts / counts.sum(1, keepdim=True)).log()


def test_equal_columns_are_stored_once() -> None:
    log_emission = smoothed()
    first, number = equal_columns(log_emission)  # type: ignore[misc]
    assert len(first) == 201
    assert torch.equal(log_emission[:, first][:, number], log_emission)
    assert EmissionMatrix(log_emission).matrix.scaled.shape == (24, 201)


def test_columns_that_differ_beyond_the_probed_rows_are_kept_apart() -> None:
    log_emission = smoothed()
    log_emission[13, 5:] -= torch.rand(2995)  # row 13 is not probed, nor the largest
    assert equal_columns(log_emission) is None


def test_distinct_columns_are_not_searched_further() -> None:
    assert equal_columns(torch.randn(8, 100)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_and_predictions_are_those_of_the_whole_matrix(dtype: torch.dtype) -> None:
    log_emission = smoothed().to(dtype)
    log_states = torch.randn(3, 24, dtype=dtype).log_softmax(1)
    expected = torch.logsumexp(log_states[:, :, None] + log_emission, 1)
    torch.testing.assert_close(EmissionMatrix(log_emission).product(log_states), expected)
    hmm = HMM(log_states[0], torch.randn(24, 24, dtype=dtype).log_softmax(1), log_emission)
    torch.testing.assert_close(hmm.emit(log_states), expected)


@pytest.mark.parametrize("merged", [True, False])
def test_sums_of_groups_are_exact_at_any_scale(merged: bool) -> None:
    log_emission = smoothed() if merged else torch.randn(24, 3000).log_softmax(1)
    log_emission[:, :4] -= 200.0  # below the range of float32
    log_emission[3, 4:8] = -torch.inf
    group = torch.randint(3, 6, (3000,))
    group[:8] = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    expected = log_group_sums(log_emission.double().t(), group, 7).float()  # no word is in group 6
    torch.testing.assert_close(EmissionMatrix(log_emission).group_sums(group, 7), expected, rtol=1e-6, atol=1e-6)


def test_rows_that_log_softmax_rounds_are_distributions() -> None:
    logits = torch.full((1, 32_000), -14.2678)
    logits[0, 0] = -0.0205
    log_emission = logits.log_softmax(1)
    HMM(torch.zeros(1), torch.zeros(1, 1), log_emission).validate()
    with pytest.raises(InputError, match=r"sums to 1\.001"):
        HMM(torch.zeros(1), torch.zeros(1, 1), log_emission + 1e-3).validate()
