"""Wrong lists of tokens; fitting; hmmlearn."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracle import matrices, random_blocked_hmm, random_hmm

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.ops import pieces

# --- lists ---


def test_wrong_lists_are_named() -> None:
    hmm = HMM.random(4, 5)
    with pytest.raises(InputError, match="sequence 1 is empty: at least one token is needed"):
        hmm.log_likelihood([[1], []])
    with pytest.raises(InputError, match="lengths of their own: leave out lengths"):
        hmm.log_likelihood([[1], [1, 2]], [1, 2])
    with pytest.raises(InputError, match="token 9 in sequence 1 at position 1 is outside the vocabulary"):
        hmm.log_likelihood([[1], [1, 9]])
    with pytest.raises(InputError, match="tokens must be integers, not float64"):
        hmm.log_likelihood([[1], [1.5, 2]])
    for wrong in ([[1], [[1, 2], [3, 4]]], [["a"], ["b", "c"]]):
        with pytest.raises(InputError, match="tokens must be"):
            hmm.log_likelihood(wrong)


# --- fitting ---


def test_fitting_ends_at_a_maximum() -> None:
    truth = HMM(*(p.log() for p in random_hmm(3, 6, 5, sharpness=2.0)))
    tokens = truth.sample(60, 20, torch.Generator().manual_seed(0))[0]
    sequences = [row[: 5 + i % 15].tolist() for i, row in enumerate(tokens)]
    start = HMM.random(3, 6, seed=1)
    start.validate()
    kept = [p.clone() for p in matrices(start)]
    fitted = start.to(torch.float64).fit(sequences, iterations=300, tolerance=1e-9)
    fitted.validate()
    assert float(fitted.log_likelihood(sequences).sum()) > float(truth.log_likelihood(sequences).sum())
    assert all(torch.equal(a, b) for a, b in zip(kept, matrices(start), strict=True))
    # At a maximum the expected counts, normalized, are the parameters.
    counts = fitted.expected_counts(sequences)
    torch.testing.assert_close(
        counts.emission / counts.emission.sum(1, keepdim=True), fitted.emission.log_probs.exp(), atol=1e-3, rtol=0
    )
    smooth = start.fit([[0, 1], [1, 0, 1]], pseudocount=0.5)
    assert bool(smooth.emission.log_probs.isfinite().all())


def test_fitting_in_pieces_gives_the_same_model() -> None:
    start, sequences = HMM.random(3, 5, seed=2).to(torch.float64), [[0, 1, 2], [4], [3, 3, 1, 0], [2, 2]]
    whole = start.fit(sequences, iterations=3)
    with pieces.limit(24):
        parts = start.fit(sequences, iterations=3)
    for mine, theirs in zip(matrices(parts), matrices(whole), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_fitting_an_impossible_sequence_names_it() -> None:
    hmm = HMM.from_probs([1.0], [[1.0]], [[1.0, 0.0]])
    with pytest.raises(InputError, match="sequence 1 is impossible under this model: token 1 at position 1"):
        hmm.fit([[0], [0, 1]])


# --- hmmlearn ---


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_models_to_and_from_hmmlearn(kind: str) -> None:
    pytest.importorskip("hmmlearn", reason="hmmlearn is not installed")
    hmm = HMM.random(4, 5) if kind == "dense" else random_blocked_hmm(2, 2, 5, 0).to(torch.float32)
    tokens = [[0, 2, 1, 1], [3, 4, 0, 2]]
    other = hmm.to_hmmlearn()
    other._check()  # rows sum to one
    for row, want in zip(tokens, hmm.log_likelihood(tokens).tolist(), strict=True):
        assert other.score(np.array(row)[:, None]) == pytest.approx(want, rel=1e-5)
    again = HMM.from_hmmlearn(other)
    assert again.dtype == torch.float64
    torch.testing.assert_close(again.log_likelihood(tokens), hmm.log_likelihood(tokens).double(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(other.predict(np.array(tokens[0])[:, None]), hmm.viterbi(tokens[:1])[0][0])


def test_a_missing_hmmlearn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hmmlearn.hmm", None)
    with pytest.raises(InputError, match="hmmlearn is not installed: pip install hmmlearn"):
        HMM.random(4, 5).to_hmmlearn()


@pytest.mark.parametrize("settings", [{"pseudocount": float("nan")}, {"pseudocount": -0.1}, {"tolerance": "a"}])
def test_fit_names_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be a number of at least 0"):
        HMM.random(2, 3).fit([[0, 1, 2]], **settings)
