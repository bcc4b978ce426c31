"""The scalar model, and what it shares with other families."""

from __future__ import annotations

import pytest
import torch
from helpers.models import make_dense
from helpers.runs import random_hmm

from hmmlm.errors import InputError
from hmmlm.models.scalar import Scalar


def test_forward_returns_distributions_of_the_given_sizes() -> None:
    hmm = Scalar(5, 7, scale=3.0)()
    assert (hmm.log_start.shape, hmm.transition.log_probs.shape, hmm.emission.log_probs.shape) == ((5,), (5, 5), (5, 7))
    hmm.validate()


def test_initial_logits_have_the_given_scale_and_seed() -> None:
    made = [Scalar(64, 200, scale=0.5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert made[0].emission.std().item() == pytest.approx(0.5, rel=0.02)
    assert torch.equal(made[0].transition, made[1].transition)
    assert not torch.equal(made[0].transition, made[2].transition)
    assert not torch.equal(made[0].transition.flatten()[:200], made[0].emission[0])


def test_gradient_with_respect_to_logits_is_counts_minus_their_expectation() -> None:
    model = Scalar(3, 4).double()
    tokens = torch.tensor([[0, 3, 1, 2, 2], [1, 1, 0, 3, 2]])
    hmm = model()
    hmm.log_likelihood(tokens).sum().backward()
    counts = hmm.expected_counts(tokens)
    expected = counts.emission - counts.emission.sum(1, keepdim=True) * hmm.emission.log_probs.exp()
    assert model.emission.grad is not None
    torch.testing.assert_close(model.emission.grad, expected.detach())


def test_forward_returns_assigned_probabilities_including_zeros() -> None:
    hmm = random_hmm(3, 4, seed=0)
    hmm.emission.log_probs[1] = torch.tensor([0.25, 0.0, 0.75, 0.0], dtype=torch.float64).log()
    model = Scalar(3, 4).double()
    model.assign(hmm)
    for made, given in zip(model().tensors().values(), hmm.tensors().values(), strict=True):
        torch.testing.assert_close(made, given, rtol=0, atol=1e-14)


def test_assign_refuses_other_sizes() -> None:
    with pytest.raises(InputError, match="3 states and 5 words cannot be assigned to a model of 3 states and 4 words"):
        Scalar(3, 4).assign(random_hmm(3, 5, seed=0))


def test_assign_to_another_family_names_the_one_to_use() -> None:
    with pytest.raises(InputError, match="DenseFactored model cannot be set to given probabilities: use the scalar"):
        make_dense("linear", 3, 4, hidden=2).assign(random_hmm(3, 4, seed=0))
