"""Drawing from an HMM: forwards from the prior, backwards from the posterior."""

import torch
from torch import Tensor

from hmmlm.ops.scan import Evidence, Parameters

CELLS = 2**24  # largest [draws, V] intermediate when words are drawn


def draw(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index a row of log_probs [..., n], by the exponential race: argmin of Exp(1) / p."""
    noise = torch.empty_like(log_probs).exponential_(generator=generator).clamp_min_(torch.finfo(log_probs.dtype).tiny)
    return (log_probs - noise.log()).argmax(-1)


def sample_chain(
    parameters: Parameters, num: int, length: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Tokens and states, both [num, length]."""
    state = draw(parameters.log_start.expand(num, -1), generator)
    path = [state]
    for _ in range(length - 1):
        state = draw(parameters.log_transition[state], generator)
        path.append(state)
    states = torch.stack(path, 1)
    pieces = states.reshape(-1).split(max(1, CELLS // parameters.log_emission.shape[1]))
    tokens = torch.cat([draw(parameters.log_emission[piece], generator) for piece in pieces])
    return tokens.reshape(num, length), states


def sample_paths(
    log_transition: Tensor, log_filtered: Tensor, evidence: Evidence, num: int, generator: torch.Generator | None
) -> Tensor:
    """Forward filtering, backward sampling: p(z_t | z_t+1, x) ∝ p(z_t | x_1..t) A(z_t, z_t+1). [num, B, T]."""
    batch, steps, _ = log_filtered.shape
    into = log_transition.t()
    last = evidence.last()
    path = torch.full((num, batch, steps), -1, device=log_filtered.device)
    for t in range(steps - 1, -1, -1):
        rows = (last >= t).nonzero().squeeze(1)
        scores = log_filtered[rows, t].expand(num, -1, -1)
        if t + 1 < steps:
            following = path[:, rows, t + 1]
            ahead = torch.where((following < 0)[..., None], 0.0, into[following.clamp(min=0)])
            scores = scores + ahead
        path[:, rows, t] = draw(scores, generator)
    return path
