"""Log-probabilities of target words: exact, or with a sample of the other words."""

import pytest
import torch
import torch.nn.functional as F

from hmmlm.ops.target_log_probs import target_log_probs

WORDS, WIDTH = 50, 6


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(WORDS, WIDTH, generator=generator, dtype=torch.float64)
    return features, weight, torch.tensor([3, 3, 7, -1, 20, 49, 0, 7])


@pytest.mark.parametrize("negatives", [0, WORDS - 5, 10**6])
def test_enough_negatives_are_exact(negatives: int) -> None:
    features, weight, targets = problem()
    want = F.linear(features, weight).log_softmax(1)[torch.arange(8), targets.clamp(min=0)]
    found = target_log_probs(features, weight, targets, negatives)
    torch.testing.assert_close(found, torch.where(targets < 0, 0.0, want))


def test_the_sum_over_a_sample_is_unbiased() -> None:
    features, weight, targets = problem()
    logits = F.linear(features, weight)
    total, target = logits.exp().sum(1), logits[torch.arange(8), targets.clamp(min=0)]
    torch.manual_seed(0)
    draws = [(target - target_log_probs(features, weight, targets, 9)).exp() for _ in range(3_000)]
    sums = torch.stack(draws)[:, targets >= 0]
    error = sums.std(0) / len(draws) ** 0.5
    assert bool((error > 0).all()) and bool(((sums.mean(0) - total[targets >= 0]).abs() < 4 * error).all())


def test_gradients_reach_targets_and_drawn_words_only() -> None:
    features, weight, targets = problem()
    weight.requires_grad_()
    torch.manual_seed(1)
    target_log_probs(features, weight, targets, 4).sum().backward()
    assert weight.grad is not None
    touched = weight.grad.abs().sum(1) > 0
    assert int(touched.sum()) == 5 + 4 and bool(touched[[0, 3, 7, 20, 49]].all())
