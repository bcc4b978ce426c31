"""Kept tiles of a factored transition matrix: the same answers, computed once, and exact where products underflow."""

import pytest
import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.hmm import HMM
from hmmlm.transitions import Factored, tiled
from hmmlm.transitions.tilestore import TileStore

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


def test_queries_of_a_large_blocked_model_use_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    u, w = (torch.randn(BLOCKS * K, 5, generator=generator) for _ in range(2))
    block_of_word = torch.arange(9) % BLOCKS
    scores = torch.randn(9, K, generator=generator)
    total = torch.zeros(BLOCKS, K).index_add_(0, block_of_word, scores.exp()).log()
    start = torch.randn(BLOCKS * K, generator=generator).log_softmax(0)
    emission = Blocked(scores - total[block_of_word], block_of_word)
    tokens = torch.randint(0, 9, (6, 7), generator=generator)
    kept = HMM(start, Factored(u, w), emission).token_log_probs(tokens)
    monkeypatch.setattr(tiled, "TABLE_CELLS", 0)
    stored = Factored(u, w)
    torch.testing.assert_close(HMM(start, stored, emission).token_log_probs(tokens), kept)
    assert stored.store(K)._kept
