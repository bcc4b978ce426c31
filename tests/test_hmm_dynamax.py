"""Models to and from dynamax."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.oracle import matrices, random_blocked_hmm, random_hmm

from hmmlm.errors import InputError
from hmmlm.hmm import HMM


def make(kind: str) -> HMM:
    return random_blocked_hmm(2, 2, 5, 0) if kind == "blocked" else HMM(*(p.log() for p in random_hmm(4, 5, 0)))


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_models_to_and_from_dynamax(kind: str) -> None:
    pytest.importorskip("dynamax", reason="dynamax is not installed")
    hmm = make(kind)
    model, params, _ = hmm.to_dynamax()
    tokens = hmm.sample(1, 12)[0]
    theirs = float(model.marginal_log_prob(params, tokens[0, :, None].numpy()))
    assert theirs == pytest.approx(float(hmm.log_likelihood(tokens)), abs=1e-3)
    again = HMM.from_dynamax(params)
    assert torch.allclose(again.log_likelihood(tokens).double(), hmm.log_likelihood(tokens).double(), atol=1e-4)


def test_parameters_of_dynamax_are_read_without_it() -> None:
    start, transition = np.array([0.25, 0.75]), np.array([[0.5, 0.5], [0.1, 0.9]])
    emission = np.array([[[0.2, 0.3, 0.5]], [[0.6, 0.4, 0.0]]])
    parts = {"initial": start, "transitions": transition, "emissions": emission}
    names = {"initial": "probs", "transitions": "transition_matrix", "emissions": "probs"}
    params = SimpleNamespace(**{k: SimpleNamespace(**{names[k]: v}) for k, v in parts.items()})
    for ours, theirs in zip(matrices(HMM.from_dynamax(params)), (start, transition, emission[:, 0]), strict=True):
        assert np.allclose(ours.exp().numpy(), theirs)
    params.emissions.probs = np.repeat(emission, 2, 1)
    with pytest.raises(InputError, match=r"needs one emission, \[states, 1, words\], not \[2, 2, 3\]"):
        HMM.from_dynamax(params)
    with pytest.raises(InputError, match="needs the parameters of a CategoricalHMM: 'int' object has no attribute"):
        HMM.from_dynamax(5)


def test_a_missing_dynamax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.numpy", None)  # JAX comes with dynamax
    with pytest.raises(InputError, match="dynamax is not installed: pip install dynamax"):
        make("dense").to_dynamax()
