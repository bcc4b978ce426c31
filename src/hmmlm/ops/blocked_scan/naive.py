"""Specification: log space, one sequence and one word at a time, gradients by autograd."""

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.problem import CarriedRows, Factors
from hmmlm.ops.common import NEG_INF, Carry, Scan, logsumexp


def blocked_scan(
    factors: Factors,
    tokens: Tensor,
    carried: CarriedRows | None,
    lengths: Tensor | None,
    restart: Tensor | None,
    next_words: Tensor | None = None,
) -> Scan:
    """Compute log p(x) [B] and the carry; see `hmmlm.ops.blocked_scan.blocked_scan`."""
    u, log_normalizer, kept = factors.u, factors.log_normalizer, factors.log_emission.shape[1]
    batch, time = tokens.shape
    log_likelihoods, finals, scores = [], [], []
    for b in range(batch):
        score = u.new_zeros(())
        total = u.new_zeros(())  # log-likelihood up to the last restart
        joint = u.new_zeros(0)  # log p(words since the last restart, z) over the states of the last word's block
        tail = (u[:0], log_normalizer[:0])  # the rows of U of those states, and their normalizers
        if carried is not None:
            own = int(carried.groups(batch)[b])
            joint, tail = _log(carried.filtered[b]), (carried.u[own], carried.log_normalizer[own])
        length = time if lengths is None else int(lengths[b])
        for t in range(length):
            starts = (t == 0 and carried is None) or (restart is not None and bool(restart[b, t]))
            if starts and t > 0:
                total = total + logsumexp(joint, 0)

            previous = None if starts else (joint, *tail)
            if next_words is not None:
                before = logsumexp(joint, 0) if t > 0 and not starts else 0.0
                score = (
                    score
                    + torch.stack(
                        [logsumexp(_extend(factors, previous, x)[0], 0) - before for x in next_words[b, t]]
                    ).mean()
                )
            joint, states = _extend(factors, previous, tokens[b, t])
            tail = (u[states], log_normalizer[states])
        total = total + logsumexp(joint, 0) if length else total
        # One impossible segment makes the sequence impossible: the others then have no gradient either.
        log_likelihoods.append(torch.where(total.detach() == NEG_INF, NEG_INF, total))
        scores.append(score)
        finals.append(_normalize(joint.detach()) if length else u.new_zeros(kept))
    next_word_score = None if next_words is None else torch.stack(scores)
    return Scan(torch.stack(log_likelihoods), Carry(torch.stack(finals)), None, next_word_score)


def _extend(factors: Factors, previous: tuple[Tensor, Tensor, Tensor] | None, word: Tensor) -> tuple[Tensor, slice]:
    """Return log p(words since the last restart, word, z) over the states z of the word's block, and these states.

    Args:
        previous: the same of the preceding word, its states' rows of U and their normalizers; None: the word is first.
    """
    kept, block = factors.log_emission.shape[1], int(factors.block_of_word[word])
    states = slice(block * kept, (block + 1) * kept)
    reached = factors.log_start[states]
    if previous is not None:
        joint, u, log_normalizer = previous
        log_transition = u @ factors.w[states].T - log_normalizer[:, None]  # [kept, kept], only the tile of this step
        reached = logsumexp(joint[:, None] + log_transition, 0)
    return reached + factors.log_emission[word], states


def _log(probability: Tensor) -> Tensor:
    """Compute the logarithm, with gradient zero instead of infinity at zero."""
    none = probability == 0
    return probability.masked_fill(none, 1.0).log().masked_fill(none, NEG_INF)


def _normalize(joint: Tensor) -> Tensor:
    """Return probabilities from log weights; all zero if every weight is −inf."""
    return torch.softmax(joint, 0).nan_to_num(0.0)
