"""GPU kernels: states are read in place, and scores exist only as tiles on the chip, computed when needed."""
# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers)

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmmlm.ops.blocked_emission.tiled import TILE, Tiles
from hmmlm.ops.common import dot_precision


@triton.jit
def _scores(words, bias, word, here, states, inner, H: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the scores [TILE, k] of a tile of words for `states` [k, h]; −inf where the tile is empty."""
    at = words + word[:, None] * H + inner[None, :]
    rows = tl.load(at, mask=here[:, None] & (inner < H)[None, :], other=0.0)
    scores = tl.dot(rows, tl.trans(states), input_precision=PRECISION)
    if HAS_BIAS:
        scores += tl.load(bias + word, mask=here, other=0.0)[:, None]
    return tl.where(here[:, None], scores, -float("inf"))


@triton.jit
def _forward_kernel(
    hidden,
    words,
    bias,
    out,
    word_of_slot,
    empty,
    first_tile,
    kept,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per range of states of a block: one pass over its tiles for the normalizer, a second for `out`."""
    block = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inner = tl.arange(0, BLOCK_H)
    at = hidden + (block * kept + k)[:, None] * H + inner[None, :]
    states = tl.load(at, mask=(k < kept)[:, None] & (inner < H)[None, :], other=0.0)
    begin, end = tl.load(first_tile + block), tl.load(first_tile + block + 1)
    largest = tl.full([BLOCK_K], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_K], tl.float32)
    for tile in range(begin, end):
        slots = tile * TILE + tl.arange(0, TILE)
        word, here = tl.load(word_of_slot + slots), tl.load(empty + slots) == 0
        scores = _scores(words, bias, word, here, states, inner, H, HAS_BIAS, PRECISION)
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(scores - shift[None, :]), 0)
        largest = new_largest
    normalizer = largest + tl.log(total)
    for tile in range(begin, end):
        slots = tile * TILE + tl.arange(0, TILE)
        word, here = tl.load(word_of_slot + slots), tl.load(empty + slots) == 0
        scores = _scores(words, bias, word, here, states, inner, H, HAS_BIAS, PRECISION)
        inside = here[:, None] & (k < kept)[None, :]
        tl.store(out + word[:, None] * kept + k[None, :], scores - normalizer[None, :], mask=inside)


@triton.jit
def _hidden_kernel(
    grad,
    words,
    out,
    totals,
    gradient,
    word_of_slot,
    empty,
    first_tile,
    kept,
    H: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per range of states of a block: the sum of `grad` over its words, and the gradient of the states."""
    block = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inner = tl.arange(0, BLOCK_H)
    begin, end = tl.load(first_tile + block), tl.load(first_tile + block + 1)
    total = tl.zeros([BLOCK_K], tl.float32)
    for tile in range(begin, end):
        slots = tile * TILE + tl.arange(0, TILE)
        word, here = tl.load(word_of_slot + slots), tl.load(empty + slots) == 0
        inside = here[:, None] & (k < kept)[None, :]
        total += tl.sum(tl.load(grad + word[:, None] * kept + k[None, :], mask=inside, other=0.0), 0)
    tl.store(totals + block * kept + k, total, mask=k < kept)
    result = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    for tile in range(begin, end):
        slots = tile * TILE + tl.arange(0, TILE)
        word, here = tl.load(word_of_slot + slots), tl.load(empty + slots) == 0
        cells, inside = word[:, None] * kept + k[None, :], here[:, None] & (k < kept)[None, :]
        g = tl.load(grad + cells, mask=inside, other=0.0)
        g -= tl.exp(tl.load(out + cells, mask=inside, other=-float("inf"))) * total[None, :]
        at = words + word[:, None] * H + inner[None, :]
        rows = tl.load(at, mask=here[:, None] & (inner < H)[None, :], other=0.0)
        result = tl.dot(tl.trans(g.to(rows.dtype)), rows, result, input_precision=PRECISION)
    at = gradient + (block * kept + k)[:, None] * H + inner[None, :]
    tl.store(at, result, mask=(k < kept)[:, None] & (inner < H)[None, :])


@triton.jit
def _words_kernel(
    grad,
    hidden,
    out,
    totals,
    gradient,
    grad_bias,
    word_of_slot,
    empty,
    block_of_tile,
    kept,
    H: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per tile of words and range of columns: gradients of words and bias, over the states of the block."""
    tile = tl.program_id(0)
    block = tl.load(block_of_tile + tile)
    inner = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    slots = tile * TILE + tl.arange(0, TILE)
    word, here = tl.load(word_of_slot + slots), tl.load(empty + slots) == 0
    result = tl.zeros([TILE, BLOCK_H], tl.float32)
    over_states = tl.zeros([TILE], tl.float32)
    for first in range(0, kept, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        cells, inside = word[:, None] * kept + k[None, :], here[:, None] & (k < kept)[None, :]
        g = tl.load(grad + cells, mask=inside, other=0.0)
        total = tl.load(totals + block * kept + k, mask=k < kept, other=0.0)
        g -= tl.exp(tl.load(out + cells, mask=inside, other=-float("inf"))) * total[None, :]
        over_states += tl.sum(g, 1)
        at = hidden + (block * kept + k)[:, None] * H + inner[None, :]
        states = tl.load(at, mask=(k < kept)[:, None] & (inner < H)[None, :], other=0.0)
        result = tl.dot(g.to(states.dtype), states, result, input_precision=PRECISION)
    at = gradient + word[:, None] * H + inner[None, :]
    tl.store(at, result, mask=here[:, None] & (inner < H)[None, :])
    if tl.program_id(1) == 0:
        tl.store(grad_bias + word, over_states, mask=here)


def _options(dtype: torch.dtype, h: int) -> dict[str, int | str]:
    """Return the options of the kernels."""
    states = 16 if dtype == torch.float32 else 32
    block_h = max(16, triton.next_power_of_2(h))
    shared: dict[str, int | str] = {"H": h, "TILE": TILE, "PRECISION": dot_precision(dtype), "num_stages": 2}
    return {"BLOCK_H": block_h, "BLOCK_K": states, "num_warps": 4 if block_h < 256 else 8, **shared}


def forward(hidden: Tensor, words: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """Compute the log-probabilities [V, k] in float32."""
    blocks, kept, h = hidden.shape
    options = _options(hidden.dtype, h)
    out = hidden.new_empty(words.shape[0], kept, dtype=torch.float32)
    _forward_kernel[(blocks, triton.cdiv(kept, int(options["BLOCK_K"])))](
        hidden, words, bias, out, tiles.word, tiles.empty, tiles.first, kept, HAS_BIAS=bias is not None, **options
    )
    return out


def backward(grad: Tensor, hidden: Tensor, words: Tensor, out: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of hidden, words and bias in float32."""
    blocks, kept, h = hidden.shape
    options = _options(hidden.dtype, h)
    grad_hidden, grad_words = (torch.empty_like(x, dtype=torch.float32) for x in (hidden, words))
    grad_bias, totals = out.new_empty(words.shape[0]), out.new_empty(blocks, kept)
    _hidden_kernel[(blocks, triton.cdiv(kept, int(options["BLOCK_K"])))](
        grad, words, out, totals, grad_hidden, tiles.word, tiles.empty, tiles.first, kept, **options
    )
    # One stage: with more, the compiler starts the next product while this one still reads its registers.
    options |= {"BLOCK_H": min(int(options["BLOCK_H"]), 128), "num_warps": 4, "num_stages": 1}
    _words_kernel[(len(tiles.block), triton.cdiv(h, int(options["BLOCK_H"])))](
        grad, hidden, out, totals, grad_words, grad_bias, tiles.word, tiles.empty, tiles.block, kept, **options
    )
    return grad_hidden, grad_words, grad_bias
