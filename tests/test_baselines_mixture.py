"""Interpolation of models: the weights are the maximum, the mixture is a distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.baselines.mixture import fit_weights, fit_weights_by_class, mix


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_no_other_weights_are_more_likely(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log_probs = np.log(rng.dirichlet(np.ones(5), size=(3, 40))[:, :, 0])
    weights = fit_weights(log_probs)
    assert weights.sum() == pytest.approx(1) and (weights >= 0).all()
    best = mix(log_probs, weights).mean()
    for other in (*np.eye(3), np.full(3, 1 / 3), *rng.dirichlet(np.ones(3), 20)):
        assert mix(log_probs, other).mean() <= best + 1e-6


def test_a_mixture_sums_to_one() -> None:
    rng = np.random.default_rng(0)
    tables = rng.dirichlet(np.ones(6), size=2)  # two distributions over six words
    weights = np.array([0.3, 0.7])
    assert np.exp(mix(np.log(tables), weights)).sum() == pytest.approx(1)


def test_impossible_tokens() -> None:
    log_probs = np.log(np.array([[0.5, 1e-300, 0.5], [0.25, 0.5, 0.5]]))
    log_probs[0, 1] = -np.inf
    weights = fit_weights(log_probs)
    assert 0 < weights[0] < 1 and np.isfinite(mix(log_probs, weights)).all()
    nowhere = np.array([[-np.inf, -1.0], [-np.inf, -2.0]])
    assert mix(nowhere, fit_weights(nowhere))[0] == -np.inf
    assert fit_weights(nowhere) == pytest.approx([1, 0], abs=1e-3)


def test_classes_have_weights_of_their_own_unless_they_are_small() -> None:
    rng = np.random.default_rng(3)
    log_probs, classes = np.log(rng.uniform(0.01, 1, (2, 400))), np.repeat([0, 1, 2], [190, 200, 10])
    log_probs[0, :190] += 1
    weights = fit_weights_by_class(log_probs, classes, 4)
    for k in (0, 1):
        assert weights[k] == pytest.approx(fit_weights(log_probs[:, classes == k]))
    assert weights[2] == pytest.approx(fit_weights(log_probs)) and weights[3] == pytest.approx(weights[2])
    assert mix(log_probs, weights[classes].T).sum() > mix(log_probs, weights[2]).sum()


def test_a_weight_of_zero_hides_no_other_model() -> None:
    scores = np.array([[-1.0], [-1000.0]])
    assert mix(scores, np.array([0.0, 1.0])).tolist() == [-1000.0]
    assert mix(scores, np.array([[0.0], [0.5]])).tolist() == pytest.approx([-1000.0 + np.log(0.5)])
