"""Perplexity of a model over batches, state carried between windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmmlm.data.batches import Batch
from hmmlm.hmm import AnyHMM, Carry

State = Tensor | Carry | None
"""A filtered distribution: over all states [B,Z], or over the few that the last word allows; None before any word."""


class Evaluation(NamedTuple):
    """exp(−Σ log p / Σ tokens), and the two sums."""

    perplexity: float
    tokens: int
    log_likelihood: float


def perplexity(log_likelihood: float, tokens: int) -> float:
    """exp(−log_likelihood / tokens); infinite where a sequence is impossible."""
    loss = -log_likelihood / tokens
    return math.exp(loss) if loss < 700 else loss if math.isnan(loss) else math.inf


def count_tokens(batch: Batch) -> int:
    """Tokens of a batch, those beyond a row's length left out; ask before the batch goes to the device."""
    return int((batch.tokens >= 0).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    return Batch(batch.tokens.to(device, non_blocking=True), move(batch.lengths), move(batch.restart), batch.carry)


def carried(batch: Batch, final: State) -> State:
    """The filtered distribution a batch starts from: the last one's, its first rows if there are fewer now."""
    if not batch.carry or final is None:
        return None
    rows = batch.tokens.shape[0]
    return final.rows(rows) if isinstance(final, Carry) else final[:rows]


@torch.no_grad()
def evaluate(hmm: AnyHMM, batches: Iterable[Batch], on_batch: Callable[[int], None] | None = None) -> Evaluation:
    """Score every batch in order; `on_batch` is told the tokens of each (progress), and may raise to stop."""
    device = hmm.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    final: State = None
    for batch in batches:
        count = count_tokens(batch)
        batch = to_device(batch, device)
        result: Any = hmm.scan(batch.tokens, batch.lengths, carried(batch, final), batch.restart)  # type: ignore[arg-type]
        final = result.final
        total += result.log_likelihood.sum(dtype=torch.float64)
        tokens += count
        if on_batch is not None:
            on_batch(count)
    log_likelihood = float(total)
    return Evaluation(perplexity(log_likelihood, tokens), tokens, log_likelihood)
