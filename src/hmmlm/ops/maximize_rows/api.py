"""Public function and choice of implementation."""

from typing import Literal

import torch
from torch import Tensor

from hmmlm.ops.common import choose_kernels
from hmmlm.ops.maximize_rows import naive

MaximizeImpl = Literal["auto", "naive", "triton"]


def maximize_rows(
    counts: Tensor,
    log_probs: Tensor,
    pseudocount: float = 0.0,
    step: float = 1.0,
    out: Tensor | None = None,
    impl: MaximizeImpl = "auto",
) -> Tensor:
    """Return the log-probabilities [..., N] that counts [..., N] make most likely, `step` of the way from the current.

    A row without any count keeps its current log_probs [..., N].

    Args:
        out: [..., N] where to write the result; may be `log_probs`.
    """
    narrow = all(x.dtype == torch.float32 and x.is_contiguous() for x in (counts, log_probs, out) if x is not None)
    unsupported = "" if narrow else "tensors other than contiguous float32"
    kernels = choose_kernels("maximize_rows", impl, counts, "naive", unsupported)
    if kernels is naive:
        new = naive.maximize_rows(counts, log_probs, pseudocount, step)
        return new if out is None else out.copy_(new)
    out = torch.empty_like(log_probs) if out is None else out
    kernels.maximize_rows(counts, log_probs, pseudocount, step, out)
    return out
