"""Perplexity of a model over batches, with the carry from one window to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hmmlm.data.batches import Batch
from hmmlm.distributed.ranks import world
from hmmlm.hmm import HMM, Carry
from hmmlm.lm.scoring import perplexity


class Evaluation(NamedTuple):
    """exp(−Σ log p / Σ tokens), and the two sums."""

    perplexity: float
    tokens: int
    log_likelihood: float

    @property
    def loss(self) -> float:
        """Negative log-likelihood per token."""
        return -self.log_likelihood / self.tokens


def select_carry(batch: Batch, carry: Carry | None) -> Carry | None:
    """Return the carry that a batch starts from: the previous batch's, its first rows if there are fewer now."""
    return carry.take(slice(len(batch.tokens))) if batch.carry and carry is not None else None


@torch.no_grad()
def evaluate(hmm: HMM, batches: Iterable[Batch], on_batch: Callable[[int], None] | None = None) -> Evaluation:
    """Score every batch in order; `on_batch` receives the tokens of each (progress), and may raise to stop.

    Of several processes, each scores its rows of the batches; the result is that of all.
    """
    total, tokens = torch.zeros((), dtype=torch.float64, device=hmm.device), 0
    shared = False
    carry: Carry | None = None
    for given in batches:
        batch = given.to(hmm.device)
        result = hmm.scan(batch.tokens, batch.lengths, select_carry(batch, carry), batch.restart)
        carry = result.carry
        if not given.is_padding:
            total += result.log_likelihood.sum(dtype=torch.float64)
        tokens, shared = tokens + given.whole_tokens(), given.whole is not None
        if on_batch is not None:
            on_batch(given.whole_tokens())
    log_likelihood = world().sum_numbers([float(total)])[0] if shared else float(total)
    return Evaluation(perplexity(log_likelihood, tokens), tokens, log_likelihood)
