"""State dropout: a random subset of the states for every batch. Dropped states cost nothing."""

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.structure.blocks import Blocks


def states_kept(total: int, rate: float) -> int:
    """Return (1−λ)·total, which must be a whole number of at least 1."""
    if not 0.0 <= rate < 1.0:
        raise InputError(f"dropout rate {rate}: it must be at least 0 and below 1")
    exact = (1.0 - rate) * total
    kept = round(exact)
    if kept == 0 or abs(exact - kept) > 1e-6 * total:
        raise InputError(
            f"dropout rate {rate} keeps {exact:.6g} of {total} states, not a whole number of at least 1: "
            f"use a multiple of 1/{total}"
        )
    return kept


def _sample_rows(
    rows: int, total: int, kept: int, device: torch.device | str, generator: torch.Generator | None
) -> Tensor:
    """Draw `kept` of `total` indices for each row [rows, kept], uniformly without replacement.

    Gumbel top-k with equal weights. Gumbel noise −log(−log u) increases with u, so the largest u give the same indices.
    """
    noise = torch.rand(rows, total, device=device, generator=generator)
    return noise.topk(kept, dim=1, sorted=False).indices


def sample_states(blocks: Blocks, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw the states to keep [M, (1−λ)k] on the device of `blocks`: ascending indices 0..k−1 within each block."""
    kept = states_kept(blocks.states_per_block, rate)
    sample = _sample_rows(blocks.num_blocks, blocks.states_per_block, kept, blocks.device, generator)
    return sample.sort(dim=1).values


def global_states(blocks: Blocks, sample: Tensor) -> Tensor:
    """Return the ascending ids 0..Z−1 [M·kept] of the states of a sample [M, kept]."""
    first = torch.arange(blocks.num_blocks, device=sample.device) * blocks.states_per_block
    return (first[:, None] + sample).flatten()


def sample_columns(
    states: int, rate: float, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw a mask [Z], True for exactly (1−λ)Z transition columns to keep: dropout for `UniformSubsets`."""
    sample = _sample_rows(1, states, states_kept(states, rate), device, generator)
    return torch.zeros(states, dtype=torch.bool, device=device).index_fill_(0, sample[0], True)
