"""The blocked HMM against the equivalent dense one: whatever the pieces it is computed in; and its checks."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.oracle import by_state, random_blocked_hmm
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry
from hmmlm.hmm.word_products import WordProducts
from hmmlm.numerics.semirings import LOG
from hmmlm.ops import pieces
from hmmlm.scan.composition import kinds_of, read_parts, with_tensors
from hmmlm.transitions import Factored

V, BLOCKS, K, H = 9, 3, 4, 5
TOKENS = torch.tensor([[0, 3, 8, 1, 1], [5, -1, 2, 7, 4], [-1, -1, 6, 0, 3], [2, 2, 2, 2, 2]])
LENGTHS = torch.tensor([5, 4, 3, 1])
MANY = TOKENS.repeat(3, 1)  # more rows than pairs of blocks: rows that share a pair are computed together


def make(sharpness: float = 1.0) -> HMM:
    return random_blocked_hmm(BLOCKS, K, V, seed=0, sharpness=sharpness, hidden=H)


@pytest.fixture(params=[1.0, 30.0], ids=["flat", "sharp"])
def pair(request: pytest.FixtureRequest) -> tuple[HMM, HMM]:
    hmm = make(request.param)
    dense = hmm.dense()
    dense.validate()
    return hmm, dense


@pytest.fixture(params=["table", "tiles", "pieces"])
def computed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the transition matrix, compute tiles of it when they are needed, or compute these in small pieces."""
    with pieces.limit({"table": sys.maxsize, "tiles": (BLOCKS * K) ** 2 - 1, "pieces": 5 * K}[request.param]):
        yield


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("query", ["log_likelihood", "posterior", "next_token", "entropy", "infill"])
def test_queries_agree_with_the_dense_model(pair: tuple[HMM, HMM], query: str, lengths: Tensor | None) -> None:
    hmm, dense = pair
    got, want = (getattr(model, query)(TOKENS, lengths) for model in (hmm, dense))
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    together = getattr(hmm, query)(MANY, None if lengths is None else lengths.repeat(3))
    torch.testing.assert_close(together, want.repeat(3, *[1] * (want.dim() - 1)), rtol=1e-8, atol=1e-9)


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_viterbi_filter_and_counts_agree_with_the_dense_model(pair: tuple[HMM, HMM], lengths: Tensor | None) -> None:
    hmm, dense = pair
    mine, theirs = hmm.viterbi(TOKENS, lengths), dense.viterbi(TOKENS, lengths)
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1])
    initial = torch.rand(4, BLOCKS * K, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    for before in (None, Carry(initial.log())):
        for a, b in zip(hmm.filter(TOKENS, lengths, before), dense.filter(TOKENS, lengths, before), strict=True):
            torch.testing.assert_close(a, b)
    mine_counts, dense_counts = hmm.expected_counts(TOKENS, lengths), dense.expected_counts(TOKENS, lengths)
    assert mine_counts.transition.is_sparse and mine_counts.emission.shape == (V, K)
    torch.testing.assert_close(mine_counts.start, dense_counts.start)
    torch.testing.assert_close(mine_counts.transition.to_dense(), dense_counts.transition)
    torch.testing.assert_close(by_state(hmm.emission, mine_counts.emission), dense_counts.emission)
    torch.testing.assert_close(mine_counts.log_likelihood, dense_counts.log_likelihood)


def test_bad_parameters_are_named() -> None:
    given = make().tensors()
    u, w, normalizer = (given[f"transition.{name}"] for name in ("u", "w", "log_normalizer"))
    block_of_word, scores = given["emission.block_of_word"], given["emission.log_probs"]
    wrong: list[tuple[str, Any, str]] = [
        ("transition.u", u.tolist(), "transition.u must be a float32 or float64 tensor, not list"),
        ("transition.w", w.half(), "transition.w must be a float32 or float64 tensor, not float16"),
        ("transition.log_normalizer", normalizer.float(), "u, .*w and .*log_normalizer must share one dtype"),
        ("transition.u", u[:, 0], r"transition.u must have shape \[states, width\], not \[12\]"),
        ("transition.w", w[:, 0], r"transition.w must have shape \[12, 5\], not \[12\]"),
        ("transition.w", w[:3], r"transition.w must have shape \[12, 5\], not \[3, 5\]"),
        ("transition.log_normalizer", normalizer[:3], r"log_normalizer must have shape \[12\], not \[3\]"),
        ("log_start", given["log_start"][None], r"log_start must have shape \[states\], not \[1, 12\]"),
        (
            "log_start",
            given["log_start"][:3],
            "log_start has 3 states, the transition 12 and the emission 12: give all",
        ),
        ("log_start", given["log_start"].float(), "log_start, transition and emission must share one dtype and device"),
        ("emission.log_probs", scores[:, 0], r"emission.log_probs must have shape \[words, states per block\], not"),
        ("emission.log_probs", scores[:5], r"emission.block_of_word must have shape \[5\], not \[9\]"),
        ("emission.block_of_word", block_of_word.double(), "emission.block_of_word must be an integer tensor"),
        ("emission.block_of_word", block_of_word.tolist(), "emission.block_of_word must be an integer tensor"),
        ("emission.block_of_word", block_of_word[None], r"emission.block_of_word must have shape \[9\], not \[1, 9\]"),
        ("emission.block_of_word", block_of_word + 1, "emission.block_of_word must be between 0 and 2, the number of"),
        ("emission.block_of_word", block_of_word - 1, "emission.block_of_word must be between 0 and 2, the number of"),
    ]
    for name, value, message in wrong:
        with pytest.raises(InputError, match=message):
            with_tensors(make(), {name: value})
    wide = given | {"emission.log_probs": torch.zeros(V, 5, dtype=torch.float64)}
    with pytest.raises(InputError, match=r"12 states do not divide into blocks of 5, the width of emission.log_probs"):
        HMM(*read_parts(wide, kinds_of(make())))
    with pytest.raises(InputError, match="transition must be a Transition, not"):
        HMM(given["log_start"], make().emission, make().emission)  # type: ignore[arg-type]


def test_distributions_that_do_not_sum_to_one_are_named() -> None:
    given = make().tensors()
    for name, message in [
        ("log_start", "log_start sums to"),
        ("emission.log_probs", "emission.log_probs of state 0 sums to"),
        ("transition.log_normalizer", "transition.log_normalizer of state 0 is .* normalize it first"),
    ]:
        with pytest.raises(InputError, match=message):
            with_tensors(make(), {name: given[name] + 7}).validate()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_normalizer_of_factors_is_computed_if_it_is_not_given(dtype: torch.dtype) -> None:
    u, w, normalizer = (value.to(dtype) for value in make().transition.tensors().values())
    torch.testing.assert_close(Factored(u, w).log_normalizer, normalizer)
    leaves = [value.clone().requires_grad_() for value in (u, w)]
    Factored(*leaves).dense()[0, 1].backward()
    assert all(value.grad is not None for value in leaves)


def test_blocks_without_words_are_counted_if_their_number_is_given() -> None:
    scores = torch.zeros(2, 3, dtype=torch.float64)
    assert Blocked(scores, torch.tensor([0, 1])).num_states == 6
    assert Blocked(scores, torch.tensor([0, 1]), 4).num_states == 12


def test_predictions_do_not_depend_on_the_products_that_are_kept() -> None:
    hmm = make()
    tokens = torch.arange(hmm.vocab_size)[:, None]
    want = hmm.dense().next_token(tokens)
    for cells, some in ((1, False), (2**25, True)):
        hmm._word_products = WordProducts(hmm)  # type: ignore[misc]
        with pieces.limit(cells):
            for _ in range(2):
                torch.testing.assert_close(hmm.next_token(tokens), want, atol=1e-5, rtol=1e-5)
        assert (len(hmm._word_products._kept) > 1) == some


def test_products_with_all_states_keep_their_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    transition = random_blocked_hmm(3, 4, 9, seed=2).transition
    values = torch.randn(2, 12, dtype=transition.dtype, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    with pieces.limit(24):
        there, back = transition.forward_step(LOG, values), transition.backward_step(LOG, values)
    monkeypatch.setattr(Factored, "pieces", None)
    again = random_blocked_hmm(3, 4, 9, seed=2).transition
    for _ in range(2):
        torch.testing.assert_close(again.forward_step(LOG, values), there)
        torch.testing.assert_close(again.backward_step(LOG, values), back)
    torch.testing.assert_close(there, (again.dense() + values[:, :, None]).logsumexp(1))
    torch.testing.assert_close(back, (again.dense()[None] + values[:, None]).logsumexp(2))
