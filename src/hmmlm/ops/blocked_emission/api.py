"""Public function, choice of implementation and closed-form gradient."""

from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.errors import InputError
from hmmlm.ops.blocked_emission import naive
from hmmlm.ops.blocked_emission.tiles import Tiles
from hmmlm.ops.common import choose_kernels, product_dtype, wide

EmissionImpl = Literal["auto", "naive", "tiled", "triton"]


def blocked_emission(
    hidden: Tensor, words: Tensor, bias: Tensor | None, tiles: Tiles, *, impl: EmissionImpl = "auto"
) -> Tensor:
    """Compute log p(word | state i of its block) [V, k] from hidden [M, k, h], words [V, h] and bias [V].

    Differentiable in all three. Under autocast, operands of products are rounded to its dtype; sums and the result are
    float32, or float64 for float64. Scores and their normalizer use the same rounded operands, so the probabilities of
    a state sum to one in any precision. impl="naive" leaves precision to PyTorch.
    """
    blocks, vocab_size = len(tiles.first) - 1, len(tiles.slot_of_word)
    if hidden.dim() != 3 or hidden.shape[0] != blocks or words.shape != (vocab_size, hidden.shape[2]):
        found = f"hidden {list(hidden.shape)} and words {list(words.shape)}"
        raise InputError(f"blocked_emission: {found} must be [{blocks}, k, h] and [{vocab_size}, h]")
    if bias is not None and bias.shape != (vocab_size,):
        raise InputError(f"blocked_emission: bias {list(bias.shape)} must be [{vocab_size}], one per word")
    if impl == "naive":
        return naive.blocked_emission(hidden, words, bias, tiles.block_of_word)
    dtype = product_dtype(hidden)
    chosen = choose_kernels("blocked_emission", impl, hidden, "tiled", _unsupported(hidden, dtype))
    result: Tensor = _BlockedEmission.apply(chosen, dtype, tiles, hidden, words, bias)
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


def _unsupported(hidden: Tensor, dtype: torch.dtype) -> str:
    """Return the feature of this problem that the kernels do not support; empty if none."""
    if dtype == torch.float64:
        return "float64"
    return "rows of more than 1024 bytes" if hidden.shape[2] * dtype.itemsize > 1024 else ""
