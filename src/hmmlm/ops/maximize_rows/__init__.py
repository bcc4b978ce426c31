"""The M step of Baum-Welch for the rows of a matrix: tensor operations, or one kernel on a GPU."""

import torch
from torch import Tensor

from hmmlm.ops.common import find_kernels


def maximize_rows(
    counts: Tensor, log_probs: Tensor, pseudocount: float = 0.0, step: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Return the log-probabilities [..., N] that counts [..., N] make most likely, `step` of the way from the current.

    A row without any count keeps its current log_probs [..., N].

    Args:
        out: [..., N] where to write the result; may be `log_probs`.
    """
    narrow = all(x.dtype == torch.float32 and x.is_contiguous() for x in (counts, log_probs, out) if x is not None)
    kernels = find_kernels("maximize_rows", counts.device, not narrow)
    if kernels is None:
        new = _maximize_rows(counts, log_probs, pseudocount, step)
        return new if out is None else out.copy_(new)
    out = torch.empty_like(log_probs) if out is None else out
    kernels.maximize_rows(counts, log_probs, pseudocount, step, out)
    return out


def _maximize_rows(counts: Tensor, log_probs: Tensor, pseudocount: float, step: float) -> Tensor:
    """Return new log-probabilities [..., N] by tensor operations."""
    total = counts.sum(-1, keepdim=True)
    empty = total <= 0
    if pseudocount:
        counts, total = counts + pseudocount, total + pseudocount * counts.shape[-1]
    new = counts / total
    if step < 1:
        new = torch.lerp(log_probs.exp(), new, step)
    # Logarithms of zeros and denormal numbers are slow, and there are many.
    tiny = torch.finfo(counts.dtype).tiny
    new = new.clamp_min(tiny).log_().masked_fill_(new < tiny, float("-inf"))
    # On a GPU, waiting to see whether there is any takes longer than the selection.
    return torch.where(empty, log_probs, new) if counts.is_cuda or bool(empty.any()) else new
