"""Block-diagonal emissions: tiles against the masked matrix.

The triton kernels run here in Triton's interpreter, in a process of their own (it has to be chosen before Triton is
first imported) and in float32 only, since the interpreter has no bfloat16 products. Where Triton is not installed its
kernels are not covered, and the module says so.
"""


import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IMPLEMENTATIONS, INTERPRETING, STARTS, run_in_the_interpreter
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.ops.blocked_emission import blocked_emission, make_tiles


def make_case(blocks: int, states: int, extra: int, h: int, biased: bool, seed: int) -> tuple[Tensor, list[Tensor]]:
    """block_of_word, and hidden, words, perhaps bias; the first block has most of the words beyond one a block."""
    generator = torch.Generator().manual_seed(seed)
    uneven = torch.randint(0, 3 * blocks, (extra,), generator=generator)
    block_of_word = torch.cat([torch.arange(blocks), torch.where(uneven < blocks, uneven, 0)])
    block_of_word = block_of_word[torch.randperm(len(block_of_word), generator=generator)]
    shapes = [(blocks, states, h), (len(block_of_word), h), (len(block_of_word),)][: 3 if biased else 2]
    return block_of_word, [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def run(impl: str, block_of_word: Tensor, given_: list[Tensor]) -> list[Tensor]:
    """Value and gradients, in float64; the triton kernels compute in float32."""
    leaves = [x.to(torch.float32 if impl == "triton" else x.dtype, copy=True).requires_grad_() for x in given_]
    tiles = make_tiles(block_of_word, len(given_[0]))
    out = blocked_emission(leaves[0], leaves[1], leaves[2] if len(leaves) == 3 else None, tiles, impl=impl)
    weight = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype)))]


def assert_agrees(impl: str, block_of_word: Tensor, given_: list[Tensor]) -> None:
    tolerance = 2e-5 if impl == "triton" else 1e-10
    for got, expected in zip(run(impl, block_of_word, given_), run("naive", block_of_word, given_), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * max(1, float(expected.abs().max())))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("size", "biased"), [
    ((1, 1, 0, 1), False), ((3, 4, 250, 6), True), ((2, 40, 63, 20), False), ((4, 17, 130, 150), True),
])
def test_agrees_with_the_masked_matrix(impl: str, size: tuple[int, int, int, int], biased: bool) -> None:
    assert_agrees(impl, *make_case(*size, biased, seed=1))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_large_scores_and_impossible_words(impl: str) -> None:
    block_of_word, (hidden, words, bias) = make_case(3, 4, 100, 5, True, seed=2)
    bias[20:30] = -torch.inf
    assert float((hidden.flatten(0, 1) @ words.T).abs().max() * 60) > 200
    values, exact = (run(name, block_of_word, [60 * hidden, words, bias]) for name in (impl, "naive"))
    for got, expected in zip(values, exact, strict=True):
        largest = float(expected[expected.isfinite()].abs().max())
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * largest)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_state_emits_with_total_probability_one(impl: str) -> None:
    block_of_word, given_ = make_case(3, 4, 150, 5, True, seed=3)
    totals = torch.zeros(3, 4, dtype=torch.float64)
    totals.index_add_(0, block_of_word, run(impl, block_of_word, given_)[0].exp())
    torch.testing.assert_close(totals, torch.ones_like(totals), rtol=1e-5, atol=1e-5)


if not INTERPRETING:

    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 200), st.booleans(), st.integers(0, 10**6))
    def test_any_size(blocks: int, states: int, extra: int, biased: bool, seed: int) -> None:
        assert_agrees("torch", *make_case(blocks, states, extra, 6, biased, seed))

    def test_narrow_products_round_the_operands_and_nothing_else() -> None:
        """Exact for the rounded operands, so normalised; gradients stay in float32."""
        block_of_word, given_ = make_case(3, 8, 100, 32, True, seed=5)
        hidden, words, bias = (x.float().requires_grad_() for x in given_)
        tiles = make_tiles(block_of_word, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = blocked_emission(hidden, words, bias, tiles)
        rounded = [x.bfloat16().double() for x in (hidden, words)]
        expected = blocked_emission(*rounded, bias.double(), tiles, impl="naive")
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(blocked_emission(hidden, words, bias, tiles).double(), expected, rtol=1e-5, atol=1e-5)
        totals = torch.zeros(3, 8).index_add_(0, block_of_word, out.exp())
        torch.testing.assert_close(totals, torch.ones(3, 8), rtol=1e-5, atol=1e-5)
        weight = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape)
        gradients = torch.autograd.grad(out, [hidden, words, bias], weight)
        exact = run("naive", block_of_word, given_)[1:]
        for got, want in zip(gradients, exact, strict=True):
            assert got.dtype == torch.float32 and (got - want).norm() < 0.03 * want.norm()

    def test_gradients() -> None:
        block_of_word, given_ = make_case(2, 3, 70, 3, True, seed=6)
        tiles = make_tiles(block_of_word, 2)
        leaves = [x.requires_grad_() for x in given_]
        assert torch.autograd.gradcheck(lambda h, w, b: blocked_emission(h, w, b, tiles), leaves, fast_mode=True)

    def test_a_block_without_words_is_named() -> None:
        with pytest.raises(InputError, match="block 1 has no word"):
            make_tiles(torch.tensor([0, 2, 2]), 3)

    @pytest.mark.parametrize(("shapes", "options", "message"), [
        (((2, 3, 4), (5, 4), (5,)), {"impl": "cuda"}, "impl 'cuda' is unknown"),
        (((3, 3, 4), (5, 4), (5,)), {}, r"hidden \[3, 3, 4\] and words \[5, 4\] must be \[2, k, h\] and \[5, h\]"),
        (((2, 3, 4), (5, 4), (6,)), {}, r"bias \[6\] must be \[5\]"),
        (((2, 3, 257), (5, 257), (5,)), {"impl": "triton"}, "no rows over 1024 bytes"),
    ])
    def test_bad_input_is_named(shapes: tuple[tuple[int, ...], ...], options: dict[str, object], message: str) -> None:
        tiles = make_tiles(torch.tensor([0, 1, 1, 0, 1]), 2)
        with pytest.raises(InputError, match=message):
            blocked_emission(*(torch.ones(shape) for shape in shapes), tiles, **options)


if STARTS:

    def test_triton_kernels_in_the_interpreter() -> None:
        run_in_the_interpreter(__file__)
