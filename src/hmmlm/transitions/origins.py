"""The states before each state of a dense HMM, in pieces of [from-state, to-state] sums: the likeliest, the entropy."""

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.common import NEG_INF

_CELLS = 2**24  # largest intermediate
_CACHE_CELLS = 2**17  # largest intermediate of `best_origins` on a CPU: fits in its cache
_FAINT = 1e-20  # scaled predictions below this make the entropy of origins inexact in products


def best_origins(log_probs: Tensor, into: Tensor) -> Tensor:
    """Compute max_i log p_i + log A[i, j] [n, Z] for log_probs [n, Z] and into [Z, Z], the transposed log A.

    Sums are taken in pieces that stay in the CPU's cache.
    """
    batch, states = log_probs.shape
    cells = _CACHE_CELLS if log_probs.device.type == "cpu" else _CELLS
    if batch * states * states <= cells:
        return (log_probs[:, None, :] + into).amax(2)
    columns = max(1, min(states, cells // states))
    rows = max(1, cells // (states * columns))
    out, buffer = torch.empty_like(log_probs), log_probs.new_empty(rows, columns, states)
    for j in range(0, states, columns):
        piece = into[j : j + columns]
        for b in range(0, batch, rows):
            sums = buffer[: min(rows, batch - b), : piece.shape[0]]
            torch.add(log_probs[b : b + rows, None, :], piece, out=sums)
            torch.amax(sums, 2, out=out[b : b + rows, j : j + columns])
    return out


def entropy_of_origins(log_probs: Tensor, matrix: LogMatrix, into: Tensor) -> Tensor:
    """Compute the entropy of the state before each state [n, Z], for log_probs [n, Z] before a step.

    From two products, except where the prediction is too small for them. With f the distribution, A' the transition
    with each column divided by its largest entry and q' = f A': H_j = log q'_j − Σ_i f_i A'_ij (log f_i + log A'_ij) /
    q'_j.

    Args:
        matrix: the transition [Z, Z].
        into: its transposed logarithm [Z, Z].
    """
    probs = log_probs.exp()
    predicted = probs @ matrix.scaled
    mean = torch.xlogy(probs, probs) @ matrix.scaled + probs @ torch.xlogy(matrix.scaled, matrix.scaled)
    faint = predicted < _FAINT
    result = torch.where(faint, 0.0, predicted.log() - mean / predicted).clamp_min(0)
    for b in faint.any(1).nonzero().flatten().tolist():
        for columns in faint[b].nonzero().flatten().split(max(1, _CELLS // len(into))):
            conditional = (log_probs[b] + into[columns]).log_softmax(1)
            entropy = -torch.where(conditional == NEG_INF, 0.0, conditional.exp() * conditional).sum(1)
            result[b, columns] = entropy.nan_to_num(0.0)  # NaN: a state without predecessors
    return result
