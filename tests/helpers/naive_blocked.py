"""The specification of the blocked scan: log space, one sequence and one word at a time, gradients by autograd."""

import torch
from torch import Tensor

from hmmlm.ops.blocked_scan.problem import Factors
from hmmlm.ops.common import NEG_INF, Carry, Scan, log_normalize, logsumexp


def blocked_scan(
    factors: Factors,
    tokens: Tensor,
    entry: Tensor | None,
    lengths: Tensor | None,
    restart: Tensor | None,
    next_words: Tensor | None = None,
) -> Scan:
    """Compute log p(x) [B] and the carry; see `hmmlm.scan.generic_scan.generic_scan`."""
    u, kept = factors.u, factors.log_emission.shape[1]
    batch, time = tokens.shape
    log_likelihoods, carries, scores = [], [], []
    for b in range(batch):
        score = u.new_zeros(())
        total = u.new_zeros(())  # log-likelihood up to the last restart
        joint, states = u.new_zeros(0), slice(0)  # log p(words since the last restart, z) over the last word's block
        length = time if lengths is None else int(lengths[b])
        for t in range(length):
            starts = restart is not None and bool(restart[b, t])
            if starts and t > 0:
                total = total + logsumexp(joint, 0)
            before = None if starts or t == 0 else (joint, states)
            enters = entry is not None and t == 0 and not starts
            if next_words is not None:
                already = 0.0 if before is None else logsumexp(joint, 0)
                others = [
                    logsumexp(_extend(factors, before, word, entry[b, 1 + s] if enters else None)[0], 0) - already  # type: ignore[index]
                    for s, word in enumerate(next_words[b, t])
                ]
                score = score + torch.stack(others).mean()
            joint, states = _extend(factors, before, tokens[b, t], entry[b, 0] if enters else None)  # type: ignore[index]
        total = total + logsumexp(joint, 0) if length else total
        # One impossible segment makes the sequence impossible: the others then have no gradient either.
        log_likelihoods.append(torch.where(total.detach() == NEG_INF, NEG_INF, total))
        scores.append(score)
        carries.append(log_normalize(joint.detach()) if length else u.new_full((kept,), NEG_INF))
    next_word_score = None if next_words is None else torch.stack(scores)
    return Scan(torch.stack(log_likelihoods), Carry(torch.stack(carries).double()), None, next_word_score)


def _extend(
    factors: Factors, before: tuple[Tensor, slice] | None, word: Tensor, entry: Tensor | None
) -> tuple[Tensor, slice]:
    """Return log p(words since the last restart, word, z) over the states z of the word's block, and these states.

    Args:
        before: the same of the preceding word; None: the word is first.
        entry: [k] log p(z | all words before the window), for the first one that does not restart.
    """
    kept, block = factors.log_emission.shape[1], int(factors.block_of_word[word])
    states = slice(block * kept, (block + 1) * kept)
    reached = factors.log_start[states] if entry is None else entry
    if before is not None:
        joint, source = before
        tile = factors.u[source] @ factors.w[states].T - factors.log_normalizer[source, None]  # [k, k], of this step
        reached = logsumexp(joint[:, None] + tile, 0)
    return reached + factors.log_emission[word], states
