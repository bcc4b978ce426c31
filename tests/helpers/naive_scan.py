"""The specification of the dense scan: forward and backward recursions in log space; see `hmmlm.ops.scan.problem`."""

import torch
from torch import Tensor

from hmmlm.ops.common import NEG_INF, Carry, Scan, log_normalize, logsumexp
from hmmlm.ops.scan.problem import Evidence, Parameters


def emission_scores(log_emission: Tensor, tokens: Tensor) -> Tensor:
    """Return log p(x_t | z) [B, T, Z]; zero for a missing token, which every state explains equally well."""
    scores = log_emission.t()[tokens.clamp(min=0)]
    return torch.where((tokens < 0)[..., None], 0.0, scores)


def active(evidence: Evidence) -> Tensor:
    """Return a mask [B, T] that is True within each sequence's length."""
    batch, steps = evidence.tokens.shape
    positions = torch.arange(steps, device=evidence.tokens.device)
    if evidence.lengths is None:
        return torch.ones(batch, steps, dtype=torch.bool, device=positions.device)
    return positions < evidence.lengths[:, None]


def forward(parameters: Parameters, evidence: Evidence) -> Tensor:
    """Compute log p(x_1..t, z_t) [B, T, Z]; positions beyond a sequence's length repeat its last value."""
    log_start, log_transition, log_emission = parameters
    scores, inside = emission_scores(log_emission, evidence.tokens), active(evidence)
    batch, steps = evidence.tokens.shape
    previous = None if evidence.carry is None else evidence.carry.to(log_start.dtype)
    columns = []
    for t in range(steps):
        predicted = log_start.expand(batch, -1)
        if previous is not None:
            moved = logsumexp(previous[:, :, None] + log_transition, 1)
            if evidence.restart is not None:  # the preceding tokens then contribute only their likelihood
                fresh = predicted + (logsumexp(previous, 1)[:, None] if t else 0.0)
                moved = torch.where(evidence.restart[:, t, None], fresh, moved)
            predicted = moved
        joint = predicted + scores[:, t]
        previous = joint if previous is None or t == 0 else torch.where(inside[:, t, None], joint, previous)
        columns.append(previous)
    return torch.stack(columns, 1)


def backward(parameters: Parameters, evidence: Evidence) -> Tensor:
    """Compute log p(x_t+1..T | z_t) [B, T, Z]."""
    log_start, log_transition, log_emission = parameters
    scores, inside = emission_scores(log_emission, evidence.tokens), active(evidence)
    batch, steps = evidence.tokens.shape
    following = torch.zeros(batch, log_start.shape[0], dtype=log_start.dtype, device=log_start.device)
    columns = [following]
    for t in range(steps - 1, 0, -1):
        ahead = scores[:, t] + following
        moved = logsumexp(log_transition + ahead[:, None, :], 2)
        if evidence.restart is not None:
            restarted = logsumexp(log_start + ahead, 1)[:, None]
            moved = torch.where(evidence.restart[:, t, None], restarted, moved)
        following = torch.where(inside[:, t, None], moved, following)
        columns.append(following)
    return torch.stack(columns[::-1], 1)


def scan(parameters: Parameters, evidence: Evidence) -> Scan:
    """Compute log p(x) [B] and the carry."""
    joint = forward(parameters, evidence)[:, -1]
    return Scan(logsumexp(joint, 1), Carry(log_normalize(joint.detach().double())))


def log_likelihood(parameters: Parameters, evidence: Evidence) -> Tensor:
    """Compute log p(x) [B]."""
    return logsumexp(forward(parameters, evidence)[:, -1], 1)


def expected_counts(parameters: Parameters, evidence: Evidence, weight: Tensor) -> Parameters:
    """Compute Σ_b weight_b × expected counts of sequence b: the gradient with respect to the parameters."""
    log_start, log_transition, log_emission = parameters
    alpha, beta = forward(parameters, evidence), backward(parameters, evidence)
    scores, inside = emission_scores(log_emission, evidence.tokens), active(evidence)
    total = logsumexp(alpha[:, -1], 1)
    possible = total > NEG_INF
    # An impossible sequence has no posterior and contributes nothing.
    log_weight_shift = torch.where(possible, total, 0.0)[:, None]
    factor = torch.where(possible, weight, 0.0)

    marginal = (alpha + beta - log_weight_shift[..., None]).exp() * (factor[:, None] * inside)[..., None]
    emission = torch.zeros_like(log_emission)
    observed = evidence.tokens >= 0
    emission.index_add_(1, evidence.tokens[observed], marginal[observed].t())

    ahead = scores + beta - log_weight_shift[..., None]
    start, transition = torch.zeros_like(log_start), torch.zeros_like(log_transition)
    for t in range(evidence.tokens.shape[1]):
        before = alpha[:, t - 1] if t else (None if evidence.carry is None else evidence.carry.to(alpha.dtype))
        begins = torch.full_like(possible, before is None)
        if evidence.restart is not None:
            begins = begins | evidence.restart[:, t]
        here = factor * inside[:, t]
        past = logsumexp(alpha[:, t - 1], 1)[:, None] if t else 0.0
        # Mask before exp: entries that do not apply may overflow.
        begun = torch.where(begins[:, None], past + log_start + ahead[:, t], NEG_INF)
        start += torch.einsum("b,bz->z", here, begun.exp())
        if before is not None:
            pair = before[:, :, None] + log_transition + ahead[:, t, None, :]
            transition += torch.einsum("b,bij->ij", here, torch.where(begins[:, None, None], NEG_INF, pair).exp())
    return Parameters(start, transition, emission)
