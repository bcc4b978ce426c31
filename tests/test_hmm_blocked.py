"""The blocked HMM against the equivalent dense one: whatever the pieces it is computed in; and its checks."""

from typing import Any

import pytest
import torch
from helpers.oracle import random_blocked_hmm
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import HMM, BlockedHMM, Carry, blocked, blocked_products, word_products

V, BLOCKS, K, H = 9, 3, 4, 5
TOKENS = torch.tensor([[0, 3, 8, 1, 1], [5, -1, 2, 7, 4], [-1, -1, 6, 0, 3], [2, 2, 2, 2, 2]])
LENGTHS = torch.tensor([5, 4, 3, 1])
MANY = TOKENS.repeat(3, 1)  # more rows than pairs of blocks: rows that share a pair are computed together


def make(sharpness: float = 1.0) -> BlockedHMM:
    return random_blocked_hmm(BLOCKS, K, V, seed=0, sharpness=sharpness, hidden=H)


@pytest.fixture(params=[1.0, 30.0], ids=["flat", "sharp"])
def pair(request: pytest.FixtureRequest) -> tuple[BlockedHMM, HMM]:
    hmm = make(request.param)
    dense = hmm.dense()
    dense.validate()
    return hmm, dense


@pytest.fixture(params=["table", "tiles", "pieces"])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the transition matrix, compute tiles of it when they are needed, or compute these in small pieces."""
    if request.param != "table":
        monkeypatch.setattr(blocked, "_TABLE_CELLS", 0)
    if request.param == "pieces":
        for module in (blocked, blocked_products):
            monkeypatch.setattr(module, "_CELLS", 5 * K)


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("query", ["log_likelihood", "posterior", "next_token", "entropy", "infill"])
def test_queries_agree_with_the_dense_model(pair: tuple[BlockedHMM, HMM], query: str, lengths: Tensor | None) -> None:
    hmm, dense = pair
    got, want = (getattr(model, query)(TOKENS, lengths) for model in (hmm, dense))
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    together = getattr(hmm, query)(MANY, None if lengths is None else lengths.repeat(3))
    torch.testing.assert_close(together, want.repeat(3, *[1] * (want.dim() - 1)), rtol=1e-8, atol=1e-9)


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_viterbi_filter_and_counts_agree_with_the_dense_model(
    pair: tuple[BlockedHMM, HMM], lengths: Tensor | None
) -> None:
    hmm, dense = pair
    mine, theirs = hmm.viterbi(TOKENS, lengths), dense.viterbi(TOKENS, lengths)
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1])
    initial = torch.rand(4, BLOCKS * K, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    for before in (None, Carry(initial.log())):
        for a, b in zip(hmm.filter(TOKENS, lengths, before), dense.filter(TOKENS, lengths, before), strict=True):
            torch.testing.assert_close(a, b)
    mine_counts, dense_counts = hmm.expected_counts(TOKENS, lengths), dense.expected_counts(TOKENS, lengths)
    assert mine_counts.transition.is_sparse and mine_counts.emission.is_sparse
    for a, b in zip(mine_counts, dense_counts, strict=True):
        torch.testing.assert_close(a.to_dense(), b)


@pytest.mark.usefixtures("computed")
def test_posterior_samples_follow_the_posterior(pair: tuple[BlockedHMM, HMM]) -> None:
    hmm, dense = pair
    draws = hmm.posterior_sample(TOKENS, LENGTHS, num=4000, generator=torch.Generator().manual_seed(2))
    posterior = dense.posterior(TOKENS, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        assert bool((draws[:, row, length:] == -1).all())
        for t in range(length):
            seen = torch.bincount(draws[:, row, t], minlength=BLOCKS * K) / 4000
            torch.testing.assert_close(seen.double(), posterior[row, t], atol=0.04, rtol=0)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_gradients_agree_with_the_dense_model(missing: bool, carried: bool) -> None:
    tokens = TOKENS if missing else TOKENS.clamp(min=0)
    probs = torch.eye(BLOCKS * K, dtype=torch.float64)[[0, 3, 7, 11]] * 0.6 + 0.4 / (BLOCKS * K)
    carry = Carry(probs.log()) if carried else None

    def solve(dense: bool) -> list[Tensor]:
        block_of_word, *rest = make().factors
        leaves = [value.clone().requires_grad_() for value in rest]
        hmm = BlockedHMM(block_of_word, *leaves)
        result = (hmm.dense() if dense else hmm).filter(tokens, LENGTHS, carry).log_likelihood
        gradients = torch.autograd.grad(result.sum(), leaves, materialize_grads=True, allow_unused=True)
        return [result.detach(), *gradients]

    plain = make().filter(tokens, LENGTHS, carry).log_likelihood
    for mine, theirs in zip(solve(False), solve(True), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(solve(False)[0], plain)


def test_a_model_is_rebuilt_from_its_tensors_and_moved() -> None:
    hmm = make()
    again = BlockedHMM.from_tensors(hmm.tensors())
    assert torch.equal(again.log_likelihood(TOKENS), hmm.log_likelihood(TOKENS))
    narrow = hmm.to(torch.float32)
    assert narrow.dtype == torch.float32 and narrow.factors.block_of_word.dtype == torch.int64
    torch.testing.assert_close(narrow.log_likelihood(TOKENS).double(), hmm.log_likelihood(TOKENS), rtol=1e-5, atol=1e-5)
    assert hmm.detach() is hmm
    assert repr(hmm) == "BlockedHMM(states=12, blocks=3, vocab_size=9)"


def test_bad_parameters_are_named() -> None:
    block_of_word, u, w, normalizer, start, emission = make().factors
    with pytest.raises(InputError, match=r"12 states do not divide into blocks of 5"):
        BlockedHMM(block_of_word, u, w, normalizer, start, torch.zeros(V, 5, dtype=torch.float64))
    with pytest.raises(InputError, match=r"w must have shape \[12, 5\], not \[3, 5\]"):
        BlockedHMM(block_of_word, u, w[:3], normalizer, start, emission)
    with pytest.raises(InputError, match="between 0 and 2"):
        BlockedHMM(block_of_word + 1, u, w, normalizer, start, emission)
    wrong: list[tuple[str, Any, str]] = [
        ("u", u.tolist(), "u must be a float32 or float64 tensor, not list"),
        ("w", w.half(), "w must be a float32 or float64 tensor, not float16"),
        ("log_normalizer", normalizer.float(), "u, w, log_normalizer, log_start and log_emission must share one dtype"),
        ("u", u[:, 0], r"u must have shape \[states, width\], not \[12\]"),
        ("w", w[:, 0], r"w must have shape \[12, 5\], not \[12\]"),
        ("log_start", start[None], r"log_start must have shape \[states\], not \[1, 12\]"),
        ("log_emission", emission[:, 0], r"log_emission must have shape \[words, states per block\], not \[9\]"),
        ("block_of_word", block_of_word.double(), "block_of_word must be an integer tensor"),
        ("block_of_word", block_of_word.tolist(), "block_of_word must be an integer tensor"),
        ("block_of_word", block_of_word[None], r"block_of_word must have shape \[9\], not \[1, 9\]"),
    ]
    for name, value, message in wrong:
        with pytest.raises(InputError, match=message):
            BlockedHMM(**make().factors._replace(**{name: value})._asdict())


def test_predictions_do_not_depend_on_the_products_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hmm = make()
    tokens = torch.arange(hmm.vocab_size)[:, None]
    want = hmm.dense().next_token(tokens)
    for cells in (0, 2**25):
        monkeypatch.setattr(word_products, "_KEPT_CELLS", cells)
        for _ in range(2):
            torch.testing.assert_close(hmm.next_token(tokens), want, atol=1e-5, rtol=1e-5)
    assert len(hmm._word_products._kept) > 1


def test_products_with_all_states_keep_their_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    hmm = random_blocked_hmm(3, 4, 9, seed=2)
    values = torch.randn(2, 12, dtype=hmm.dtype, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(blocked, "_CELLS", 24)
    in_pieces = hmm.push(values)
    monkeypatch.undo()
    monkeypatch.setattr(BlockedHMM, "pieces", None)
    again = random_blocked_hmm(3, 4, 9, seed=2)
    for _ in range(2):
        torch.testing.assert_close(again.push(values), in_pieces)
    expected = (again.dense().log_transition[None] + values[:, None]).logsumexp(2)
    torch.testing.assert_close(in_pieces, expected)
