"""Specification: every state scores every word, and words of other blocks are masked."""

import torch
from torch import Tensor


def blocked_emission(hidden: Tensor, words: Tensor, bias: Tensor | None, block_of_word: Tensor) -> Tensor:
    """Compute log p(word | state i of its block) [V, k] from hidden [M, k, h], words [V, h] and bias [V]."""
    scores = torch.einsum("mkh,vh->mkv", hidden, words)
    if bias is not None:
        scores = scores + bias
    blocks = torch.arange(hidden.shape[0], device=hidden.device)
    scores = scores.masked_fill((block_of_word != blocks[:, None])[:, None, :], float("-inf"))
    log_probs = scores.log_softmax(2)
    return log_probs[block_of_word, :, torch.arange(words.shape[0], device=words.device)]
