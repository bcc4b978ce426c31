"""Emission blocks, uniform subsets and state dropout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.errors import InputError
from hmmlm.structure.blocks import Blocks, UniformSubsets
from hmmlm.structure.dropout import global_states, sample_columns, sample_states, states_kept


@st.composite
def clusterings(draw: st.DrawFn) -> list[int]:
    """A cluster for each word, every cluster occupied."""
    blocks = draw(st.integers(1, 6))
    more = draw(st.lists(st.integers(0, blocks - 1), max_size=20))
    return draw(st.permutations(list(range(blocks)) + more))


@given(clusterings(), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_blocks_of_clusters(cluster, k):
    num_blocks = max(cluster) + 1
    blocks = Blocks.from_clusters(np.array(cluster), num_blocks * k)
    assert (blocks.num_blocks, blocks.states_per_block, blocks.num_states) == (num_blocks, k, num_blocks * k)
    assert blocks.vocab_size == len(cluster) and blocks.block_of_word.tolist() == cluster
    moved = blocks.to("meta")
    assert moved.device.type == "meta" and moved.num_states == blocks.num_states


@pytest.mark.parametrize(
    ("cluster", "states", "message"),
    [
        ([0, 2, 2, 5], 6, r"3 of 6 blocks have no words \(1, 3, 4\)"),
        ([0, 1, 2], 7, "7 states do not divide into 3 blocks of equal size: use a multiple of 3"),
        ([0, 1, 2], 0, "0 states do not divide into 3 blocks"),
        ([0, -1, 1, -1], 4, "the words of ids 1, 3 have no block: give each one"),
        ([], 4, "the vocabulary is empty"),
    ],
)
def test_bad_clusters_are_named(cluster, states, message):
    with pytest.raises(InputError, match=message):
        Blocks.from_clusters(np.array(cluster, dtype=np.int64), states)


def test_clusters_for_another_vocabulary_are_named():
    with pytest.raises(InputError, match="another vocabulary: 3 words are clustered, the vocabulary has 4"):
        Blocks.from_clusters(np.array([0, 1, 1]), 4, vocab_size=4)


# uniform subsets


def test_uniform_subsets_are_subsets_drawn_evenly_and_by_seed():
    subsets = UniformSubsets.sample(vocab_size=3000, states=40, states_per_word=8, seed=1)
    assert subsets.states_of_word.shape == (3000, 8) and subsets.vocab_size == 3000
    assert (subsets.states_of_word.diff(dim=1) > 0).all()  # sorted, without replacement
    emits = torch.zeros(3000, 40).scatter_(1, subsets.states_of_word, 1.0).T.bool()
    words_of_state = emits.sum(1).double()
    expected = 3000 * 8 / 40
    variance = 3000 * 0.2 * 0.8
    assert float(((words_of_state - expected) ** 2 / variance).sum()) < 80  # 39 degrees of freedom
    together = (emits[0] & emits[39]).sum()
    assert abs(int(together) - 3000 * (8 * 7) / (40 * 39)) < 50
    same = UniformSubsets.sample(3000, 40, 8, seed=1)
    other = UniformSubsets.sample(3000, 40, 8, seed=2)
    assert torch.equal(same.states_of_word, subsets.states_of_word)
    assert not torch.equal(other.states_of_word, subsets.states_of_word)


def test_bad_uniform_subsets_are_named():
    with pytest.raises(InputError, match="9 states per word cannot be drawn from 8: use 1 to 8"):
        UniformSubsets.sample(5, 8, 9, seed=0)
    with pytest.raises(InputError, match="0 states per word"):
        UniformSubsets.sample(5, 8, 0, seed=0)
    with pytest.raises(InputError, match=r"\d+ of 100 states \(.*, …\) have no words when each of 10 words draws 2"):
        UniformSubsets.sample(10, 100, 2, seed=0)


# state dropout


def equal_blocks(num_blocks: int, k: int) -> Blocks:
    return Blocks.from_clusters(torch.arange(num_blocks), num_blocks * k)


@given(st.integers(1, 5), st.integers(1, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_exactly_the_kept_share_of_each_block_is_sampled(num_blocks, k, data):
    dropped = data.draw(st.integers(0, k - 1))
    blocks = equal_blocks(num_blocks, k)
    sample = sample_states(blocks, dropped / k)
    assert sample.shape == (num_blocks, k - dropped) and sample.dtype == torch.int64
    assert (sample >= 0).all() and (sample < k).all()
    assert (sample.diff(dim=1) > 0).all()  # ascending, none twice
    ids = global_states(blocks, sample)
    assert (ids.diff() > 0).all()
    assert torch.equal(ids // k, torch.arange(num_blocks).repeat_interleave(k - dropped))
    assert torch.equal(ids % k, sample.flatten())


def test_every_subset_of_states_is_as_likely_and_blocks_are_independent():
    """2 of 4 states: six subsets in each of two blocks, 36 pairs."""
    blocks, generator = equal_blocks(2, 4), torch.Generator().manual_seed(0)
    draws = 7200
    samples = torch.stack([sample_states(blocks, 0.5, generator) for _ in range(draws)])
    subset = (2**samples).sum(-1)  # [draws, 2]
    _, seen = torch.unique(subset[:, 0] * 16 + subset[:, 1], return_counts=True)
    assert len(seen) == 36
    expected = draws / 36
    assert float(((seen - expected) ** 2 / expected).sum()) < 75  # 35 degrees of freedom, p < 1e-4


def test_samples_follow_the_generator():
    blocks = equal_blocks(8, 16)
    one, same, other = (sample_states(blocks, 0.5, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_columns_kept_are_exactly_the_share_and_drawn_evenly():
    generator = torch.Generator().manual_seed(0)
    samples = torch.stack([sample_columns(8, 0.25, generator) for _ in range(2000)])
    assert samples.dtype == torch.bool and (samples.sum(1) == 6).all()
    kept = samples.double().mean(0)
    assert (kept - 0.75).abs().max() < 0.05


def test_rates_that_keep_no_state_or_a_fraction_of_one_are_named():
    assert states_kept(10, 0.9) == 1 and states_kept(128, 0.5) == 64 and states_kept(3, 0.0) == 3
    assert states_kept(10, 0.1 + 0.2) == 7  # rounding of the rate is not a fraction of a state
    with pytest.raises(InputError, match=r"dropout rate 0.99 keeps 0.04 of 4 states"):
        sample_states(equal_blocks(2, 4), 0.99)
    with pytest.raises(InputError, match=r"dropout rate 0.5 keeps 2.5 of 5 states, .* a multiple of 1/5"):
        sample_states(equal_blocks(2, 5), 0.5)
    with pytest.raises(InputError, match=r"dropout rate 1.0: it must be at least 0 and below 1"):
        sample_columns(8, 1.0)
    with pytest.raises(InputError, match=r"dropout rate -0.5"):
        sample_columns(8, -0.5)
