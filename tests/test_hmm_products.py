"""Products with what is kept of matrices, compared with log space: log matrices, tiles, and columns that repeat."""

import pytest
import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.emissions.columns import EmissionMatrix, equal_columns, log_group_sums
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops import pieces
from hmmlm.ops.common import installed
from hmmlm.scan.recursions import forward, messages_back, run_filter, run_messages, sort_batch
from hmmlm.transitions import Factored
from hmmlm.transitions.tilestore import TileStore

# --- log matrices ---


def sharp(*shape: int, seed: int, sharpness: float) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (sharpness * values).log_softmax(-1)


@pytest.mark.parametrize("sharpness", [1.0, 20.0, 60.0])
@pytest.mark.parametrize("states", [60, 130])  # few, and enough for the transposed product
def test_products_of_log_matrices_are_exact_at_any_scale(sharpness: float, states: int) -> None:
    matrix, weights = sharp(states, 2000, seed=0, sharpness=sharpness), sharp(40, states, seed=1, sharpness=sharpness)
    matrix[:, 7], matrix[:, 8], weights[3] = -torch.inf, -torch.inf, -torch.inf
    matrix[5, 8] = -200.0
    want = torch.logsumexp(weights.double()[:, :, None] + matrix.double(), 1)
    product = LogMatrix(matrix)
    for _ in range(2):  # the second time with what is kept
        torch.testing.assert_close(product.product(weights).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sharpness", [1.0, 20.0, 60.0])
def test_products_with_tiles_are_exact_at_any_scale(sharpness: float) -> None:
    tiles, weights = sharp(3, 4, 5, 6, seed=0, sharpness=sharpness), sharp(30, 5, seed=1, sharpness=sharpness)
    weights[2] = -torch.inf
    index = (torch.arange(30) % 3, torch.arange(30) % 4)
    want = torch.logsumexp(weights.double()[:, :, None] + tiles[index].double(), 1)
    torch.testing.assert_close(LogMatrix(tiles).product_by_row(weights, index).double(), want, rtol=1e-5, atol=1e-4)


# --- tiles ---

BLOCKS, K = 3, 4


def make_tiles(scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    matrix = (scale * torch.randn(BLOCKS * K, BLOCKS * K, generator=generator)).log_softmax(1)
    return matrix.view(BLOCKS, K, BLOCKS, K).transpose(1, 2)


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_products_agree_with_log_space_and_each_tile_is_computed_once(scale: float) -> None:
    tiles, made = make_tiles(scale), list[tuple[int, int]]()

    def make(source: int, target: int) -> Tensor:
        made.append((source, target))
        return tiles[source, target].clone()

    store = TileStore(make, BLOCKS, room=20)
    generator = torch.Generator().manual_seed(1)
    log_probs = (scale * torch.randn(40, K, generator=generator)).log_softmax(1)
    log_probs[3] = -torch.inf
    log_probs[4] -= 200.0  # of a component of a union that is unlikely so far
    sources, targets = (torch.randint(0, BLOCKS, (40,), generator=generator) for _ in range(2))
    want = torch.logsumexp(log_probs.double()[:, :, None] + tiles[sources, targets].double(), 1).float()
    for _ in range(2):
        torch.testing.assert_close(store.product(log_probs, sources, targets), want, rtol=1e-5, atol=1e-5)
    if scale == 1.0:  # sums that may have underflowed are computed again from a tile of their own
        impossible = {(int(sources[3]), int(targets[3]))}
        assert len(set(made)) == len(set(zip(sources.tolist(), targets.tolist(), strict=True)))
        assert {pair for pair in made if made.count(pair) > 1} <= impossible


def test_a_full_store_computes_further_tiles_each_time() -> None:
    tiles, made = make_tiles(1.0), list[tuple[int, int]]()

    def make(source: int, target: int) -> Tensor:
        made.append((source, target))
        return tiles[source, target].clone()

    store = TileStore(make, BLOCKS, room=1)
    log_probs = torch.zeros(2, K).log_softmax(1)
    for _ in range(3):
        store.product(log_probs, torch.tensor([0, 1]), torch.tensor([2, 2]))
    assert made == [(0, 2), (1, 2), (1, 2), (1, 2)]


def test_queries_of_a_large_blocked_model_use_the_store() -> None:
    generator = torch.Generator().manual_seed(2)
    u, w = (torch.randn(BLOCKS * K, 5, generator=generator) for _ in range(2))
    block_of_word = torch.arange(9) % BLOCKS
    scores = torch.randn(9, K, generator=generator)
    total = torch.zeros(BLOCKS, K).index_add_(0, block_of_word, scores.exp()).log()
    start = torch.randn(BLOCKS * K, generator=generator).log_softmax(0)
    emission = Blocked(scores - total[block_of_word], block_of_word)
    tokens = torch.randint(0, 9, (2, 30), generator=generator)
    kept = HMM(start, Factored(u, w), emission).token_log_probs(tokens)
    stored = Factored(u, w)
    with pieces.limit((BLOCKS * K) ** 2 - 1):
        torch.testing.assert_close(HMM(start, stored, emission).token_log_probs(tokens), kept)
    assert stored.store(K)._kept


# --- columns that repeat ---


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


@pytest.mark.skipif(not installed("numba"), reason="numba is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_long_texts_in_compiled_loops_are_those_of_log_space(dtype: torch.dtype) -> None:
    hmm = HMM.random(5, 7, seed=3).to(dtype)
    tokens = hmm.sample(3, 1100, torch.Generator().manual_seed(0))[0]
    tokens[0, ::50] = -1
    batch = sort_batch(hmm, tokens, torch.tensor([1090, 1100, 3]))
    found, plain = run_filter(hmm, batch), forward(hmm, batch)
    assert found.stacked.by_loops
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found.filtered, plain.filtered, **close)
    torch.testing.assert_close(found.scales, plain.scales, **close)
    torch.testing.assert_close(run_messages(hmm, found), messages_back(hmm, plain)[0], **close)
    whole, first = hmm.token_log_probs(tokens), hmm.filter(tokens[:, :20])
    rest = hmm.token_log_probs(tokens[:, 20:], carry=first.carry)  # from a carry
    torch.testing.assert_close(rest, whole[:, 20:], **close)


def test_long_texts_with_faint_states_are_computed_in_log_space() -> None:
    start, transition, emission = torch.tensor([0.5, 0.5]), torch.eye(2), torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    hmm = HMM(start.log(), transition.log(), emission.log())
    tokens = torch.tensor([[0] * 60 + [1] * 1040])  # the second state recovers from 0.9^60 / 0.1^60
    posterior = hmm.posterior(tokens)[0]
    torch.testing.assert_close(posterior[:, 1], torch.ones(1100))
