"""The filter of a blocked HMM over one long sequence.

A step of it is little work, so what the steps of a piece need is prepared for all of them: the tiles of the transition
matrix between their blocks. A step is then one product and four operations on the states of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.hmm.lattice import Lattice, SortedBatch
from hmmlm.numerics.logmatrix import LogTiles, least_sum
from hmmlm.ops.common import FLOOR, NEG_INF

if TYPE_CHECKING:
    from hmmlm.hmm.blocked import BlockedHMM

_STEPS = 256  # of a piece
_CELLS = 2**27  # of its tiles: 512 MB in float32


def is_stream(hmm: BlockedHMM, batch: SortedBatch) -> bool:
    """Return whether `filter_stream` serves a batch: one sequence without missing tokens, and no gradient."""
    return batch.active[:1] == [1] and not any(batch.missing) and not hmm.requires_grad


def filter_stream(hmm: BlockedHMM, batch: SortedBatch, log_initial: Tensor | None) -> Lattice:
    """Run the filter over one sequence; see `Recursions._forward`.

    Where underflow may have changed a sum, or a word is impossible, the rest of the piece is computed in log space.
    """
    lattice, steps = Lattice(batch, [], [], [], []), len(batch.active)
    hmm.filter_step(lattice, hmm.observe(batch.tokens[:, 0], missing=False), log_initial)
    size = max(1, min(_STEPS, _CELLS // hmm.states_per_block**2))
    for first in range(1, steps, size):
        end = min(first + size, steps)
        _filter_piece(hmm, lattice, end)
        for t in range(len(lattice.supports), end):
            hmm.filter_step(lattice, hmm.observe(batch.tokens[:, t], missing=False))
    return lattice


def _filter_piece(hmm: BlockedHMM, lattice: Lattice, end: int) -> None:
    """Add steps to a lattice that has at least one, until `end` or a sum that underflow may have changed."""
    support, scores = hmm.observe(lattice.batch.tokens[0, len(lattice.supports) - 1 : end], missing=False)
    pairs, pair = (support.blocks[:-1] * hmm.blocks + support.blocks[1:]).unique(return_inverse=True)
    peak, tiles = _prepare(hmm, pairs)
    added = (peak[pair] + scores[1:])[:, None]  # [steps, 1, k]
    filtered, relative, joint = (torch.empty_like(added) for _ in range(3))
    before, on_gpu = lattice.log_filtered[-1], hmm.device.type == "cuda"
    for sums, more, total, after, tile in zip(relative, added, joint, filtered, pair.tolist(), strict=True):
        weights = before.exp()
        if not on_gpu:  # denormal numbers would slow the product down
            torch.threshold_(weights, FLOOR[hmm.dtype], 0.0)
        torch.mm(weights, tiles[tile], out=sums)
        torch.add(sums.log(), more, out=total)
        before = torch.log_softmax(total, 1, out=after)
    log_scales = torch.logsumexp(joint, 2)
    sure = (relative >= least_sum(hmm.states_per_block, hmm.dtype)).flatten(1).all(1) & (log_scales[:, 0] > NEG_INF)
    sound = len(sure) if bool(sure.all()) else int(sure.int().argmin())
    lattice.supports.extend(support.rows(slice(t, t + 1)) for t in range(1, sound + 1))
    lattice.scores.extend(scores[1 : sound + 1, None])
    lattice.log_filtered.extend(filtered[:sound])
    lattice.log_scales.extend(log_scales[:sound])


def _prepare(hmm: BlockedHMM, pairs: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the largest entries of the columns of log A [P, k], and exp(log A) [k, k] relative to them, of pairs [P].

    A pair of blocks is source · M + target.
    """
    sources, targets = pairs // hmm.blocks, pairs % hmm.blocks
    if hmm.forward_tiles is None and hmm.device.type == "cpu":
        peaks, scaled = zip(*(hmm.store.tile(key) for key in pairs.tolist()), strict=True)
        return torch.stack(peaks), scaled
    tiles = hmm.forward_tiles
    if tiles is not None:
        return tiles.peak[sources, targets], list(tiles.scaled[sources, targets])
    tiles = LogTiles(hmm.tiles(sources, targets))
    return tiles.peak, list(tiles.scaled)
