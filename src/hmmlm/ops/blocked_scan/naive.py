"""The specification: log space, one sequence and one word at a time, gradients by autograd."""

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.problem import BlockedScan, Initial
from hmmlm.ops.linear_logsumexp.naive import logsumexp


def blocked_scan(
    tokens: Tensor, block_of_word: Tensor, u: Tensor, w: Tensor, log_normalizer: Tensor, log_start: Tensor,
    log_emission: Tensor, initial: Initial | None, lengths: Tensor | None, restart: Tensor | None,
) -> BlockedScan:  # fmt: skip
    """See `hmmlm.ops.blocked_scan.blocked_scan`."""
    batch, time = tokens.shape
    kept = log_emission.shape[1]
    log_likelihoods, finals = [], []
    for b in range(batch):
        total = u.new_zeros(())  # log-likelihood up to the last restart
        joint = u.new_zeros(0)  # log p(words since the last restart, z) over the states of the last word's block
        tail = (u[:0], log_normalizer[:0])  # the rows of U of those states, and their normalisers
        if initial is not None:
            own = b if len(initial.u) > 1 else 0
            joint, tail = _log(initial.filtered[b]), (initial.u[own], initial.log_normalizer[own])
        length = time if lengths is None else int(lengths[b])
        for t in range(length):
            word = tokens[b, t]
            block = int(block_of_word[word])
            states = slice(block * kept, (block + 1) * kept)
            starts = (t == 0 and initial is None) or (restart is not None and bool(restart[b, t]))
            if starts:
                if t > 0:
                    total = total + logsumexp(joint, 0)
                reached = log_start[states]
            else:
                log_transition = tail[0] @ w[states].T - tail[1][:, None]  # [kept, kept], the only tile there is
                reached = logsumexp(joint[:, None] + log_transition, 0)
            joint = reached + log_emission[word]
            tail = (u[states], log_normalizer[states])
        log_likelihoods.append(total + logsumexp(joint, 0) if length else total)
        finals.append(_normalised(joint.detach()) if length else u.new_zeros(kept))
    suspect = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    return BlockedScan(torch.stack(log_likelihoods), torch.stack(finals), suspect)


def _log(probability: Tensor) -> Tensor:
    """log with no gradient, rather than an infinite one, at zero."""
    none = probability == 0
    return probability.masked_fill(none, 1.0).log().masked_fill(none, -torch.inf)


def _normalised(joint: Tensor) -> Tensor:
    """Probabilities from log weights; all zero if nothing is possible."""
    return torch.softmax(joint, 0).nan_to_num(0.0)
