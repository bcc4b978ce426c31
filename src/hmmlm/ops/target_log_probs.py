"""Log-probabilities of target words under a softmax over the vocabulary; in training, from a sample of the others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def target_log_probs(features: Tensor, weight: Tensor, targets: Tensor, negatives: int = 0) -> Tensor:
    """Compute log softmax(features weightᵀ) at the targets [N], for features [N, h] and weight [V, h]; 0 for target −1.

    Args:
        negatives: on a CPU, replace the words that are no target of the batch by a random sample of this many, each
            with the weight of those that it represents. The sum over words is then an unbiased estimate. 0: exact.
    """
    known = targets[targets >= 0].unique() if negatives and features.device.type == "cpu" else targets[:0]
    others = weight.shape[0] - len(known)
    if not len(known) or others <= negatives:
        logits, index = F.linear(features, weight), targets
    else:
        drawn = _draw_others(known, weight.shape[0], negatives)
        logits = F.linear(features, weight[torch.cat([known, drawn])])
        represented = torch.zeros(logits.shape[1], dtype=logits.dtype)
        represented[len(known) :] = math.log(others / negatives)
        logits = logits + represented
        index = torch.searchsorted(known, targets).masked_fill(targets < 0, -1)
    # Not in bfloat16, which autocast uses for the product.
    return -F.cross_entropy(logits.to(weight.dtype), index, ignore_index=-1, reduction="none")


def _draw_others(known: Tensor, words: int, num: int) -> Tensor:
    """Draw `num` of the words that are not known, without replacement."""
    free = torch.ones(words, dtype=torch.bool)
    free[known] = False
    others = free.nonzero().flatten()
    return others[torch.randperm(len(others))[:num]]
