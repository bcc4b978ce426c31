"""The blocked HMM against the equivalent dense one, query by query."""

import math

import pytest
import torch

from hmmlm.errors import InputError
from hmmlm.hmm import HMM, BlockedHMM
from hmmlm.ops.linear_logsumexp import linear_logsumexp

V, BLOCKS, K, H = 9, 3, 4, 5
TOKENS = torch.tensor([[0, 3, 8, 1, 1], [5, -1, 2, 7, 4], [-1, -1, 6, 0, 3], [2, 2, 2, 2, 2]])
LENGTHS = torch.tensor([5, 4, 3, 1])


def make(seed: int = 0, scale: float = 1.0) -> BlockedHMM:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    block_of_word = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2, 2])
    scores = normal(V, K)
    normalizer = torch.stack([scores[block_of_word == m].logsumexp(0) for m in range(BLOCKS)])
    u, w = normal(BLOCKS * K, H), normal(BLOCKS * K, H)
    return BlockedHMM(
        block_of_word, u, w, linear_logsumexp(u, w), normal(BLOCKS * K).log_softmax(0),
        scores - normalizer[block_of_word])


@pytest.fixture(params=[1.0, 6.0])
def pair(request: pytest.FixtureRequest) -> tuple[BlockedHMM, HMM]:
    blocked = make(scale=request.param)
    dense = blocked.dense()
    dense.validate()
    return blocked, dense


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("query", ["log_likelihood", "posterior", "next_token", "entropy", "infill"])
def test_queries_agree_with_the_dense_model(
    pair: tuple[BlockedHMM, HMM], query: str, lengths: torch.Tensor | None
) -> None:
    blocked, dense = pair
    torch.testing.assert_close(
        getattr(blocked, query)(TOKENS, lengths), getattr(dense, query)(TOKENS, lengths), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_viterbi_filter_and_counts_agree_with_the_dense_model(
    pair: tuple[BlockedHMM, HMM], lengths: torch.Tensor | None
) -> None:
    blocked, dense = pair
    mine, theirs = blocked.viterbi(TOKENS, lengths), dense.viterbi(TOKENS, lengths)
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1])
    initial = torch.rand(4, BLOCKS * K, dtype=torch.float64).softmax(1)
    for before in (None, initial):
        for a, b in zip(blocked.filter(TOKENS, lengths, before), dense.filter(TOKENS, lengths, before), strict=True):
            torch.testing.assert_close(a, b)
    mine_counts, dense_counts = blocked.expected_counts(TOKENS, lengths), dense.expected_counts(TOKENS, lengths)
    assert mine_counts.transition.is_sparse and mine_counts.emission.is_sparse
    for a, b in zip(mine_counts, dense_counts, strict=True):
        torch.testing.assert_close(a.to_dense(), b)


def test_samples_follow_the_model_and_the_posterior(pair: tuple[BlockedHMM, HMM]) -> None:
    blocked, dense = pair
    tokens, states = blocked.sample(8000, 3, torch.Generator().manual_seed(1))
    marginal = dense.log_start.exp()
    for t in range(3):
        seen = torch.bincount(states[:, t], minlength=BLOCKS * K) / 8000
        torch.testing.assert_close(seen.double(), marginal, atol=0.03, rtol=0)
        seen = torch.bincount(tokens[:, t], minlength=V) / 8000
        torch.testing.assert_close(seen.double(), marginal @ dense.log_emission.exp(), atol=0.03, rtol=0)
        marginal = marginal @ dense.log_transition.exp()
    draws = blocked.posterior_sample(TOKENS, LENGTHS, num=4000, generator=torch.Generator().manual_seed(2))
    posterior = dense.posterior(TOKENS, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        assert bool((draws[:, row, length:] == -1).all())
        for t in range(length):
            seen = torch.bincount(draws[:, row, t], minlength=BLOCKS * K) / 4000
            torch.testing.assert_close(seen.double(), posterior[row, t], atol=0.04, rtol=0)


@pytest.mark.parametrize("missing", [False, True])
def test_gradients_agree_with_the_dense_model(missing: bool) -> None:
    tokens = TOKENS if missing else TOKENS.clamp(min=0)

    def gradients(dense: bool) -> list[torch.Tensor]:
        block_of_word, *rest = make().factors
        leaves = [value.clone().requires_grad_() for value in rest]
        model = BlockedHMM(block_of_word, *leaves)
        total = (model.dense() if dense else model).log_likelihood(tokens, LENGTHS).sum()
        return list(torch.autograd.grad(total, leaves))

    for mine, theirs in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_windows_with_carried_state_add_up_to_the_whole() -> None:
    blocked = make()
    tokens = torch.randint(0, V, (3, 12), generator=torch.Generator().manual_seed(3))
    whole, carry, total = blocked.scan(tokens), None, torch.zeros(3, dtype=torch.float64)
    for window in tokens.split(5, 1):
        part = blocked.scan(window, initial=carry)
        carry, total = part.final, total + part.log_likelihood
    torch.testing.assert_close(total, whole.log_likelihood)
    assert carry is not None and torch.equal(carry.states, whole.final.states)
    torch.testing.assert_close(carry.probs, whole.final.probs)


def test_impossible_sequences_are_named() -> None:
    block_of_word, u, w, normalizer, start, emission = make().factors
    emission = emission.clone()
    emission[7] = -math.inf
    blocked = BlockedHMM(block_of_word, u, w, normalizer, start, emission)
    tokens = torch.tensor([[0, 1, 2], [0, 7, 1]])
    assert blocked.log_likelihood(tokens)[1] == -math.inf
    for query in (blocked.posterior, blocked.viterbi, blocked.infill, blocked.entropy):
        with pytest.raises(ValueError, match=r"sequence 1 .*token 7 at position 1"):
            query(tokens)


def test_bad_parameters_are_named() -> None:
    block_of_word, u, w, normalizer, start, emission = make().factors
    with pytest.raises(InputError, match=r"12 states are not blocks of 5"):
        BlockedHMM(block_of_word, u, w, normalizer, start, torch.zeros(V, 5))
    with pytest.raises(InputError, match=r"w must have shape \[12, 5\]"):
        BlockedHMM(block_of_word, u, w[:3], normalizer, start, emission)
    with pytest.raises(InputError, match="between 0 and 2"):
        BlockedHMM(block_of_word + 1, u, w, normalizer, start, emission)
