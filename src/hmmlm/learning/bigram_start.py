"""Where training may start: at the bigram of word classes that a Kneser-Ney model of them has smoothed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hmmlm.baselines.ngram import NgramModel
from hmmlm.data.tokenfile import TokenFile
from hmmlm.models.scalar import BlockedScalar

NOISE = 0.3
"""Standard deviation of what is added to logits of transitions, so that the states of a block come to differ."""


@torch.no_grad()
def assign_bigram(model: BlockedScalar, train: TokenFile, eos: int, restarts: bool, seed: int) -> None:
    """Set a model so that it predicts as a bigram of its blocks does, whose states are almost alike.

    Args:
        restarts: whether the chain restarts after the token `eos`.
    """
    blocks, tokens = model.blocks, np.asarray(train.tokens)
    block_of_word = blocks.block_of_word.cpu().numpy()
    words = np.bincount(tokens, minlength=len(block_of_word)) + 0.1
    share = words / np.bincount(block_of_word, words)[block_of_word]
    bigram = NgramModel(block_of_word[tokens], blocks.num_blocks, 2, int(block_of_word[eos]) if restarts else None)
    rows = np.stack([bigram.next_token([block]) for block in range(blocks.num_blocks)])
    block_of_state = np.arange(blocks.num_states) // blocks.states_per_block
    generator = torch.Generator().manual_seed(seed)

    def states(rows: np.ndarray) -> Tensor:
        logits = torch.from_numpy(rows[..., block_of_state]).float()
        noise = NOISE * torch.randn(logits.shape, generator=generator)
        return (logits + noise if blocks.states_per_block > 1 else logits).log_softmax(-1)

    model.transition.copy_(states(rows[block_of_state]))
    model.start.copy_(states(rows[block_of_word[eos]]))
    model.emission.copy_(torch.from_numpy(np.log(share))[:, None].expand(model.emission.shape))
