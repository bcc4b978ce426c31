"""Block-diagonal emissions: tiles against the masked matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.errors import InputError
from hmmlm.ops.blocked_emission import blocked_emission, make_tiles, naive_blocked_emission


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 5), states=st.integers(1, 4), extra=st.integers(0, 90),
       biased=st.booleans())
def test_tiles_agree_with_the_masked_matrix(seed: int, blocks: int, states: int, extra: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    block_of_word = torch.cat([torch.arange(blocks), torch.randint(0, blocks, (extra,), generator=generator)])
    block_of_word = block_of_word[torch.randperm(len(block_of_word), generator=generator)]
    given_ = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in (
        (blocks, states, 6), (len(block_of_word), 6), (len(block_of_word),))]
    hidden, words, bias = given_[0], given_[1], given_[2] if biased else None
    mine = blocked_emission(hidden, words, bias, make_tiles(block_of_word, blocks))
    theirs = naive_blocked_emission(hidden, words, bias, block_of_word)
    torch.testing.assert_close(mine, theirs)
    weight = torch.randn(mine.shape, generator=generator, dtype=torch.float64)
    inputs = given_[: 3 if biased else 2]
    for a, b in zip(torch.autograd.grad(mine, inputs, weight), torch.autograd.grad(theirs, inputs, weight),
                    strict=True):
        torch.testing.assert_close(a, b)


def test_every_state_emits_with_total_probability_one() -> None:
    block_of_word = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    mine = blocked_emission(torch.randn(3, 4, 5), torch.randn(7, 5), None, make_tiles(block_of_word, 3))
    totals = torch.zeros(3, 4).index_add_(0, block_of_word, mine.exp())
    torch.testing.assert_close(totals, torch.ones(3, 4))


def test_a_block_without_words_is_named() -> None:
    with pytest.raises(InputError, match="block 1 has no word"):
        make_tiles(torch.tensor([0, 2, 2]), 3)
