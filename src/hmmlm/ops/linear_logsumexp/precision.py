"""Matrix products with narrow operands and wide sums."""

import torch
from torch import Tensor

from hmmlm.errors import InputError

_ALLOWED = (torch.bfloat16, torch.float32, torch.float64)


def resolve(reference: Tensor, product_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the operands of products: as asked, or autocast's, or the reference's own.

    float16 has too little range for probabilities: asked for it is an error, under float16 autocast float32 is used.
    """
    if product_dtype is not None:
        if product_dtype not in _ALLOWED:
            raise InputError(f"product_dtype {product_dtype} cannot hold probabilities: use bfloat16 or wider")
        return product_dtype
    device = reference.device.type
    if reference.dtype == torch.float32 and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
        return autocast if autocast in _ALLOWED else torch.float32
    return reference.dtype if reference.dtype in _ALLOWED else torch.float32


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and results for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b (matrices or batches of them) summed and returned in the wide dtype, whatever autocast says."""
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == wide(a.dtype):
            return a @ b
        if a.is_cuda:
            product = torch.mm if a.dim() == 2 else torch.bmm
            return product(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()


def accumulate(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, `out` [n, m] in the wide dtype."""
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == out.dtype:
            out.addmm_(a, b)
        elif a.is_cuda:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            out.addmm_(a.to(out.dtype), b.to(out.dtype))
