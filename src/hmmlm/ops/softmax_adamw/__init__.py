"""AdamW on the logits [Z, V] of softmax rows, from a gradient that is not stored as a matrix.

`triton` computes its norm and takes the step in one pass over logits and moments.
"""

from typing import NamedTuple

from torch import Tensor


class LogitGradient(NamedTuple):
    """Gradient of the logits [Z, V] of softmax rows in terms of that of their log-probabilities.

    The latter is zero except in the columns of the words of a batch. Of column v it is sums[edges[v]] if
    edges[v] < edges[v + 1]. With p = exp(logits − log_normalizer), that of the logits is (column v) − p · total.
    """

    log_normalizer: Tensor  # [Z] log Σ exp of the logits
    spread: Tensor  # [Z] Σ p² over the words that are not in the batch
    words: Tensor  # [N] the tokens of the batch, sorted; −1 is missing
    order: Tensor  # [N] row of `scores` of each
    edges: Tensor  # [V+1] int32: the places of word v in `words` are edges[v] up to edges[v + 1]
    scores: Tensor  # [N, Z] log p of the word of a row
    sums: Tensor  # [N, Z] see above; undefined where no word has its first place
    total: Tensor  # [Z] sum of all columns


class GradientNorm(NamedTuple):
    """Parts of the norm of the gradient of all parameters; those of words that are not in the batch are missing."""

    words: Tensor  # [] Σ g² of the logits in the columns of the words of the batch
    others: Tensor  # [n] norms of the gradients of all other parameters


class Moments(NamedTuple):
    """State of AdamW for one parameter, as torch's optimizer has it."""

    step: Tensor  # [] number of steps taken
    exp_avg: Tensor  # [Z, V]
    exp_avg_sq: Tensor  # [Z, V]


class Settings(NamedTuple):
    """Settings of AdamW, as torch's optimizer has them."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float  # largest norm of the gradient of all parameters; 0: any
