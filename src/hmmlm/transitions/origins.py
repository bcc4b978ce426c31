"""The entropy of the states before each state of a dense HMM, in products."""

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.pieces import at_once

_LEAST = 1e-20  # scaled predictions below this make the entropy of origins inexact in products


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
    suspect = predicted < _LEAST
    result = torch.where(suspect, 0.0, predicted.log() - mean / predicted).clamp_min(0)
    for b in suspect.any(1).nonzero().flatten().tolist():
        for columns in suspect[b].nonzero().flatten().split(at_once(len(into))):
            conditional = (log_probs[b] + into[columns]).log_softmax(1)
            entropy = -torch.where(conditional == NEG_INF, 0.0, conditional.exp() * conditional).sum(1)
            result[b, columns] = entropy.nan_to_num(0.0)  # NaN: a state without predecessors
    return result
