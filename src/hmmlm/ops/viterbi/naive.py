"""The most likely path, as the textbook writes it: best score into each state, and where it came from."""

import torch
from torch import Tensor

from hmmlm.ops.scan.naive import Evidence, Parameters, active, emission_scores


def viterbi(parameters: Parameters, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Path [B, T], −1 beyond a length, and log p(path, x) [B]."""
    log_start, log_transition, log_emission = parameters
    scores, inside = emission_scores(log_emission, evidence.tokens), active(evidence)
    batch, steps = evidence.tokens.shape
    best = log_start + scores[:, 0]
    stay = torch.arange(log_start.shape[0], device=best.device).expand(batch, -1)
    pointers = []
    for t in range(1, steps):
        moved, origin = (best[:, :, None] + log_transition).max(1)
        best = torch.where(inside[:, t, None], moved + scores[:, t], best)
        pointers.append(torch.where(inside[:, t, None], origin, stay))
    log_prob, state = best.max(1)
    path = [state]
    for origin in reversed(pointers):
        path.append(torch.take_along_dim(origin, path[-1][:, None], 1).squeeze(1))
    return torch.where(inside, torch.stack(path[::-1], 1), -1), log_prob
