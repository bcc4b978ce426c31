"""blocked_emission: tiles against the masked matrix.

The Triton kernels run here in Triton's interpreter (tests/helpers/interpreter.py), in float32 only, since it has no
bfloat16 products; tests/gpu runs both on a GPU.
"""

import pytest
import torch
from helpers.interpreter import (
    implementations,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.layers import (
    EMISSION_CASES,
    assert_emission_agrees,
    emission_inputs,
    emission_specification,
    solve_emission,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.errors import InputError
from hmmlm.ops.blocked_emission import blocked_emission, make_tiles

IMPLEMENTATIONS = implementations("tiled")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("size", "with_bias"), EMISSION_CASES)
def test_agrees_with_the_masked_matrix(impl: str, size: tuple[int, int, int, int], with_bias: bool) -> None:
    assert_emission_agrees(impl, *emission_inputs(*size, with_bias, seed=1))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_large_scores_and_impossible_words(impl: str) -> None:
    block_of_word, (hidden, words, bias) = emission_inputs(3, 4, 100, 5, True, seed=2)
    bias[20:30] = -torch.inf
    assert float((hidden.flatten(0, 1) @ words.T).abs().max() * 60) > 200
    values, exact = (solve_emission(name, block_of_word, [60 * hidden, words, bias]) for name in (impl, "naive"))
    for got, expected in zip(values, exact, strict=True):
        largest = float(expected[expected.isfinite()].abs().max())
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * largest)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_emission_probabilities_of_a_state_sum_to_one(impl: str) -> None:
    block_of_word, inputs = emission_inputs(3, 4, 150, 5, True, seed=3)
    totals = torch.zeros(3, 4, dtype=torch.float64)
    totals.index_add_(0, block_of_word, solve_emission(impl, block_of_word, inputs)[0].exp())
    torch.testing.assert_close(totals, torch.ones_like(totals), rtol=1e-5, atol=1e-5)


@outside_interpreter
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 200), st.booleans(), st.integers(0, 10**6))
def test_any_size(blocks: int, states: int, extra: int, with_bias: bool, seed: int) -> None:
    assert_emission_agrees("tiled", *emission_inputs(blocks, states, extra, 6, with_bias, seed))


@outside_interpreter
def test_narrow_products_round_the_operands_only() -> None:
    """The result is exact for the rounded operands, hence normalized; gradients stay in float32."""
    block_of_word, inputs = emission_inputs(3, 8, 100, 32, True, seed=5)
    hidden, words, bias = (x.float().requires_grad_() for x in inputs)
    tiles = make_tiles(block_of_word, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = blocked_emission(hidden, words, bias, tiles)
    rounded = [x.bfloat16().double() for x in (hidden, words)]
    expected = emission_specification(*rounded, bias.double(), tiles)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(blocked_emission(hidden, words, bias, tiles).double(), expected, rtol=1e-5, atol=1e-5)
    totals = torch.zeros(3, 8).index_add_(0, block_of_word, out.exp())
    torch.testing.assert_close(totals, torch.ones(3, 8), rtol=1e-5, atol=1e-5)
    weight = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape)
    gradients = torch.autograd.grad(out, [hidden, words, bias], weight)
    for got, want in zip(gradients, solve_emission("naive", block_of_word, inputs)[1:], strict=True):
        assert got.dtype == torch.float32 and (got - want).norm() < 0.03 * want.norm()


@outside_interpreter
def test_gradients_agree_with_finite_differences() -> None:
    block_of_word, inputs = emission_inputs(2, 3, 70, 3, True, seed=6)
    tiles = make_tiles(block_of_word, 2)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda h, w, b: blocked_emission(h, w, b, tiles), leaves, fast_mode=True)


@outside_interpreter
def test_a_block_without_words_is_named() -> None:
    with pytest.raises(InputError, match="block 1 has no word"):
        make_tiles(torch.tensor([0, 2, 2]), 3)


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)
