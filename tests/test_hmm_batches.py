"""Ragged batches, per-token scores, rows of several sequences; products that underflow; fitting; hmmlearn."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracle import matrices, random_blocked_hmm, random_hmm
from torch import Tensor

import hmmlm
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.numerics.logmatrix import LogMatrix, LogTiles

RAGGED = [[0, 2, -1, 1], [3], [1, 1, 2, 0, 3, 3, 1]]


def make(kind: str, seed: int = 0) -> HMM:
    if kind == "blocked":
        return random_blocked_hmm(2, 2, 5, seed)
    return HMM(*(p.log() for p in random_hmm(4, 5, seed)))


both_kinds = pytest.mark.parametrize("kind", ["dense", "blocked"])


# --- ragged lists ---------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize(
    "query", ["log_likelihood", "filter", "posterior", "viterbi", "entropy", "next_token", "infill", "token_log_probs"]
)
def test_lists_of_different_lengths_are_a_batch(kind: str, query: str) -> None:
    hmm = make(kind)
    tokens, lengths = hmmlm.padded(RAGGED)
    assert tokens.tolist()[1] == [3, -1, -1, -1, -1, -1, -1] and lengths.tolist() == [4, 1, 7]
    want = getattr(hmm, query)(tokens, lengths)
    for given in (
        RAGGED,
        tuple(map(tuple, RAGGED)),
        [torch.tensor(row) for row in RAGGED],
        list(map(np.array, RAGGED)),
    ):
        got = getattr(hmm, query)(given)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@both_kinds
def test_expected_counts_and_samples_of_lists(kind: str) -> None:
    hmm = make(kind)
    got, want = hmm.expected_counts(RAGGED), hmm.expected_counts(*hmmlm.padded(RAGGED))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.to_dense(), theirs.to_dense())
    assert [(row >= 0).sum().item() for row in hmm.posterior_sample(RAGGED)[0]] == [4, 1, 7]


def test_wrong_lists_are_named() -> None:
    hmm = make("dense")
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


# --- tokens one by one ----------------------------------------------------------------------------------------------


@both_kinds
def test_token_log_probs_are_differences_of_log_likelihoods(kind: str) -> None:
    hmm = make(kind)
    found = hmm.token_log_probs(RAGGED)
    for row, sequence in zip(found, RAGGED, strict=True):
        parts = [float(hmm.log_likelihood([sequence[: t + 1]])) for t in range(len(sequence))]
        assert row[: len(sequence)].tolist() == pytest.approx(np.diff([0.0, *parts]).tolist(), abs=1e-9)
        assert not row[len(sequence) :].any()
    before = hmm.filter([[2, 0]]).carry
    want = hmm.token_log_probs([[2, 0, 1, 3]])[:, 2:]
    torch.testing.assert_close(hmm.token_log_probs([[1, 3]], carry=before), want)


def test_tokens_after_an_impossible_one_are_impossible() -> None:
    hmm = HMM.from_probs([1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    assert hmm.token_log_probs([[0, 0, 1, 0], [0, 0, 0, 0]]).tolist() == [[0, 0, -math.inf, -math.inf], [0, 0, 0, 0]]


@both_kinds
def test_several_sequences_advance_together(kind: str) -> None:
    hmm = make(kind)
    states = torch.stack([hmm.begin(), hmm.advance(hmm.begin(), 3), hmm.advance(hmm.begin(), 1)])
    tokens = torch.tensor([2, 0, -1])
    want = torch.stack([hmm.advance(state, int(token)) for state, token in zip(states, tokens, strict=True)])
    torch.testing.assert_close(hmm.advance(states, tokens), want)


@both_kinds
def test_words_that_states_emit(kind: str) -> None:
    hmm = make(kind)
    words, log_probs = hmm.emission.log_rows(torch.tensor([3, 0, 2]))
    emission = hmm.emission.dense()[[3, 0, 2]]
    found = torch.full_like(emission, -math.inf)
    for row, (ids, scores) in enumerate(zip(words.tolist(), log_probs, strict=True)):
        for word, score in zip(ids, scores, strict=True):
            assert word >= 0 or score == -math.inf
            found[row, word] = torch.maximum(found[row, word], score)
    torch.testing.assert_close(found, emission)


# --- products that underflow ----------------------------------------------------------------------------------------


def sharp(*shape: int, seed: int, sharpness: float) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (sharpness * values).log_softmax(-1)


@pytest.mark.parametrize("sharpness", [1.0, 20.0, 60.0])
def test_products_of_log_matrices_are_exact_at_any_scale(sharpness: float) -> None:
    matrix, weights = sharp(60, 2000, seed=0, sharpness=sharpness), sharp(40, 60, seed=1, sharpness=sharpness)
    matrix[:, 7], matrix[:, 8], weights[3] = -math.inf, -math.inf, -math.inf
    matrix[5, 8] = -200.0
    want = torch.logsumexp(weights.double()[:, :, None] + matrix.double(), 1)
    product = LogMatrix(matrix)
    for _ in range(2):  # the second time with what is kept
        torch.testing.assert_close(product.product(weights).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sharpness", [1.0, 20.0, 60.0])
@pytest.mark.parametrize("states", [6, 130])  # few, and enough for the transposed product
@pytest.mark.parametrize("rows", [[0, 1], [1, 0, 1, 1]])
@pytest.mark.parametrize("zeros", [False, True])
def test_ratios_are_exact_at_any_scale(sharpness: float, states: int, rows: list[int], zeros: bool) -> None:
    matrix = sharp(states, 5 * states, seed=0, sharpness=sharpness)
    base, weights = (sharp(n, states, seed=n, sharpness=sharpness) for n in (2, len(rows)))
    if zeros:
        matrix[:, 3], weights[0, 1:] = -math.inf, -math.inf
        matrix[0, 4] = -math.inf

    def product(log_weights: Tensor) -> Tensor:
        return torch.logsumexp(log_weights.double()[:, :, None] + matrix.double(), 1)

    want = product(weights) - product(base)[rows]
    want = torch.where(product(weights) == -math.inf, -math.inf, want)
    assert not want.isnan().any() and (want == -math.inf).any() == zeros
    got = LogMatrix(matrix).ratio(weights, base, rows).double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("sharpness", [1.0, 20.0, 60.0])
def test_products_with_tiles_are_exact_at_any_scale(sharpness: float) -> None:
    tiles, weights = sharp(3, 4, 5, 6, seed=0, sharpness=sharpness), sharp(30, 5, seed=1, sharpness=sharpness)
    weights[2] = -math.inf
    index = (torch.arange(30) % 3, torch.arange(30) % 4)
    want = torch.logsumexp(weights.double()[:, :, None] + tiles[index].double(), 1)
    torch.testing.assert_close(LogTiles(tiles).product(weights, index).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sharpness", [1.0, 8.0, 40.0])
def test_small_blocked_models_agree_with_dense_ones(sharpness: float) -> None:
    """In float32, where products underflow; a model of this size keeps its transition matrix."""
    exact = random_blocked_hmm(3, 4, 20, seed=1, sharpness=sharpness)
    hmm: HMM = exact.to(torch.float32)
    dense = hmm.to(torch.float64).dense()  # the same rounded parameters
    tokens = torch.randint(20, (6, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([9, 1, 4, 9, 7, 2])
    tolerance = {"rtol": 1e-4, "atol": 1e-3}
    for query in ("log_likelihood", "posterior", "token_log_probs", "next_token"):
        got, want = (getattr(model, query)(tokens, lengths) for model in (hmm, dense))
        torch.testing.assert_close(got.double(), want, **tolerance)
    path, score = hmm.viterbi(tokens, lengths)
    torch.testing.assert_close(score.double(), dense.viterbi(tokens, lengths)[1], **tolerance)
    joint = dense.joint_scan(tokens.masked_fill(path < 0, -1), path, lengths).log_likelihood
    torch.testing.assert_close(joint, score.double(), **tolerance)
    states = sharp(3, 12, seed=2, sharpness=sharpness)
    torch.testing.assert_close(hmm.emit(states).double(), dense.emit(states.double()), **tolerance)
    some = torch.tensor([4, 0, 4])
    torch.testing.assert_close(hmm.emit(states, some), hmm.emit(states)[:, some])


# --- fitting --------------------------------------------------------------------------------------------------------


def test_fitting_raises_the_likelihood_to_a_maximum() -> None:
    truth = HMM(*(p.log() for p in random_hmm(3, 6, 5, sharpness=2.0)))
    tokens = truth.sample(60, 20, torch.Generator().manual_seed(0))[0]
    sequences = [row[: 5 + i % 15].tolist() for i, row in enumerate(tokens)]
    start = HMM.random(3, 6, seed=1)
    start.validate()
    kept = [p.clone() for p in matrices(start)]
    models = [start, *(start.fit(sequences, iterations=n, tolerance=0) for n in (1, 2, 5, 40))]
    likelihoods = [float(model.log_likelihood(sequences).sum()) for model in models]
    assert likelihoods == sorted(likelihoods)
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


def test_fitting_in_pieces_gives_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    start, sequences = HMM.random(3, 5, seed=2).to(torch.float64), [[0, 1, 2], [4], [3, 3, 1, 0], [2, 2]]
    whole = start.fit(sequences, iterations=3)
    monkeypatch.setattr("hmmlm.hmm.hmm._BULK_CELLS", 24)
    for mine, theirs in zip(matrices(start.fit(sequences, iterations=3)), matrices(whole), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_fitting_an_impossible_sequence_names_it() -> None:
    hmm = HMM.from_probs([1.0], [[1.0]], [[1.0, 0.0]])
    with pytest.raises(InputError, match="sequence 1 is impossible under this model: token 1 at position 1"):
        hmm.fit([[0], [0, 1]])


# --- hmmlearn -------------------------------------------------------------------------------------------------------


@both_kinds
def test_models_to_and_from_hmmlearn(kind: str) -> None:
    pytest.importorskip("hmmlearn", reason="hmmlearn is not installed")
    hmm = make(kind).to(torch.float32)
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
        make("dense").to_hmmlearn()


@pytest.mark.parametrize("settings", [{"pseudocount": float("nan")}, {"pseudocount": -0.1}, {"tolerance": "a"}])
def test_fit_names_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be a number of at least 0"):
        HMM.random(2, 3).fit([[0, 1, 2]], **settings)
