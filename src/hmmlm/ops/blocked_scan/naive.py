"""Specification: log space, one sequence and one word at a time, gradients by autograd."""

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.problem import CarriedRows, Factors
from hmmlm.ops.common import NEG_INF, Carry, Scan, logsumexp


def blocked_scan(
    factors: Factors, tokens: Tensor, carried: CarriedRows | None, lengths: Tensor | None, restart: Tensor | None
) -> Scan:
    """Compute log p(x) [B] and the carry; see `hmmlm.ops.blocked_scan.blocked_scan`."""
    block_of_word, u, w, log_normalizer, log_start, log_emission = factors
    batch, time = tokens.shape
    kept = log_emission.shape[1]
    log_likelihoods, finals = [], []
    for b in range(batch):
        total = u.new_zeros(())  # log-likelihood up to the last restart
        joint = u.new_zeros(0)  # log p(words since the last restart, z) over the states of the last word's block
        tail = (u[:0], log_normalizer[:0])  # the rows of U of those states, and their normalizers
        if carried is not None:
            own = b if len(carried.u) > 1 else 0
            joint, tail = _log(carried.filtered[b]), (carried.u[own], carried.log_normalizer[own])
        length = time if lengths is None else int(lengths[b])
        for t in range(length):
            word = tokens[b, t]
            block = int(block_of_word[word])
            states = slice(block * kept, (block + 1) * kept)
            starts = (t == 0 and carried is None) or (restart is not None and bool(restart[b, t]))
            if starts:
                if t > 0:
                    total = total + logsumexp(joint, 0)
                reached = log_start[states]
            else:
                log_transition = tail[0] @ w[states].T - tail[1][:, None]  # [kept, kept], only the tile of this step
                reached = logsumexp(joint[:, None] + log_transition, 0)
            joint = reached + log_emission[word]
            tail = (u[states], log_normalizer[states])
        total = total + logsumexp(joint, 0) if length else total
        # One impossible segment makes the sequence impossible: the others then have no gradient either.
        log_likelihoods.append(torch.where(total.detach() == NEG_INF, NEG_INF, total))
        finals.append(_normalize(joint.detach()) if length else u.new_zeros(kept))
    return Scan(torch.stack(log_likelihoods), Carry(torch.stack(finals)))


def _log(probability: Tensor) -> Tensor:
    """Compute the logarithm, with gradient zero instead of infinity at zero."""
    none = probability == 0
    return probability.masked_fill(none, 1.0).log().masked_fill(none, NEG_INF)


def _normalize(joint: Tensor) -> Tensor:
    """Return probabilities from log weights; all zero if every weight is −inf."""
    return torch.softmax(joint, 0).nan_to_num(0.0)
