"""Block-diagonal emissions: log p(word | state) for the words of each state's block only.

Tiles of words are multiplied by the states of their block. The Triton kernels do so without copying the states or
storing scores.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.ops.blocked_emission import tiled
from hmmlm.ops.blocked_emission.tiled import Tiles, make_tiles
from hmmlm.ops.common import find_kernels, product_dtype, wide

__all__ = ["Tiles", "blocked_emission", "make_tiles"]

_WIDEST = 1024  # bytes of a row of states for the kernels


def blocked_emission(hidden: Tensor, words: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """Compute log p(word | state i of its block) [V, k] from hidden [M, k, h], words [V, h] and bias [V].

    Differentiable in all three. Under autocast, operands of products are rounded to its dtype; sums and the result are
    float32, or float64 for float64. Scores and their normalizer use the same rounded operands, so the probabilities of
    a state sum to one in any precision.
    """
    dtype = product_dtype(hidden)
    unsupported = dtype == torch.float64 or hidden.shape[2] * dtype.itemsize > _WIDEST
    kernels = find_kernels("blocked_emission", hidden.device, unsupported) or tiled
    result: Tensor = _BlockedEmission.apply(kernels, dtype, tiles, hidden, words, bias)
    return result


class _BlockedEmission(torch.autograd.Function):
    """Autograd function of `blocked_emission`; rounds the operands itself, so that gradients stay in the wide dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ModuleType,
        dtype: torch.dtype,
        tiles: Tiles,
        hidden: Tensor,
        words: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        factors = hidden.to(dtype).contiguous(), words.to(dtype).contiguous()
        offset = None if bias is None else bias.to(wide(dtype)).contiguous()
        out: Tensor = kernels.forward(*factors, offset, tiles)
        ctx.kernels, ctx.tiles = kernels, tiles
        ctx.dtypes = [x if x is None else x.dtype for x in (hidden, words, bias)]
        ctx.save_for_backward(*factors, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.kernels.backward(grads[0].contiguous(), *ctx.saved_tensors, ctx.tiles)
        return None, None, None, *(None if d is None else g.to(d) for g, d in zip(gradients, ctx.dtypes, strict=True))
