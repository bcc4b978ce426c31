"""Products of probabilities given by their logarithms, safe for any scale."""

import torch
from torch import Tensor

FAINT = {torch.float32: 1e-32, torch.float64: 1e-300}  # sums of products below this have lost digits
CELLS = 2**22  # of the pieces in which faint ones are summed again


def mix(log_weights: Tensor, log_matrix: Tensor) -> Tensor:
    """log Σ_i w_i M[i, j] [..., m] for log_weights [..., n] and log_matrix [n, m]."""
    top = log_weights.amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    log_weights = log_weights - top
    peak = log_matrix.amax(0)
    peak = torch.where(peak.isfinite(), peak, 0.0)
    relative = log_weights.exp() @ (log_matrix - peak).exp()
    mixed = relative.log() + peak
    # Columns that only faint rows fill: their product underflows (or nearly), so sum its logarithms.
    faint = (relative < FAINT[log_matrix.dtype]) & (log_weights.amax(-1, keepdim=True) > float("-inf"))
    if bool(faint.any()):
        *where, columns = faint.nonzero(as_tuple=True)
        for piece in torch.arange(columns.shape[0], device=columns.device).split(max(1, CELLS // log_matrix.shape[0])):
            index = tuple(axis[piece] for axis in where)
            scores = log_weights[index] + log_matrix.t()[columns[piece]]
            mixed[(*index, columns[piece])] = scores.logsumexp(1)
    return mixed + top
