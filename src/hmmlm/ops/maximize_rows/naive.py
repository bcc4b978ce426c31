"""The M step as tensor operations."""

import torch
from torch import Tensor


def maximize_rows(counts: Tensor, log_probs: Tensor, pseudocount: float, step: float) -> Tensor:
    """Return new log-probabilities [..., N]; see `api.maximize_rows`."""
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
