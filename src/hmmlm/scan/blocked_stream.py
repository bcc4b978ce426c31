"""The filter of a blocked HMM over one long sequence.

A step of it is little work, so what the steps of a piece need is prepared for all of them: the tiles of the transition
matrix between their blocks. A step is then one product and four operations on the states of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import restrict
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.pieces import at_once
from hmmlm.ops.underflow import FLOOR, least_sum
from hmmlm.scan.lattice import Lattice, Packed, SortedBatch, Supports
from hmmlm.scan.steps import Steps, add_step
from hmmlm.transitions.tiled import TiledTransition

if TYPE_CHECKING:
    from hmmlm.scan.composition import Composition

_STEPS = 256  # of a piece


def is_stream(hmm: Composition, batch: SortedBatch) -> bool:
    """Return whether `filter_stream` serves a batch: one sequence without missing tokens, and no gradient."""
    tiled = isinstance(hmm.transition, TiledTransition) and isinstance(hmm.emission, Blocked)
    return tiled and batch.active[:1] == [1] and not any(batch.missing) and not hmm.requires_grad


def filter_stream(hmm: Composition, batch: SortedBatch, log_initial: Tensor | None) -> Lattice:
    """Run the filter over one sequence; see `Recursions._forward`.

    Where underflow may have changed a sum, or a word is impossible, the rest of the piece is computed in log space.
    """
    steps, emission = len(batch.active), hmm.emission
    assert isinstance(emission, Blocked)
    support, scores = emission.score(batch.tokens[0, :steps], missing=False)
    lattice = Lattice.begin(batch, Supports(batch, support), Packed(batch, scores))
    first = restrict(hmm.log_start[None], lattice.supports[0])
    if log_initial is not None:
        first = hmm.transition.forward_step(LOG, log_initial, None, lattice.supports[0])
    add_step(Steps(LOG, hmm.transition), lattice, first)
    size = min(_STEPS, at_once(emission.width**2, 2**27))  # 512 MB of tiles in float32
    for begin in range(1, steps, size):
        end = min(begin + size, steps)
        _filter_piece(hmm, lattice, end)
        for _ in range(len(lattice.filtered), end):
            add_step(Steps(LOG, hmm.transition), lattice, first)
    return lattice


def _filter_piece(hmm: Composition, lattice: Lattice, end: int) -> None:
    """Add steps to a lattice that has at least one, until `end` or a sum that underflow may have changed."""
    transition, emission = hmm.transition, hmm.emission
    assert isinstance(transition, TiledTransition) and isinstance(emission, Blocked)
    begin, support = len(lattice.filtered), lattice.supports.blocks
    assert support is not None
    blocks, scores = support.blocks[begin - 1 : end], lattice.scores.whole[begin:end]
    pairs, pair = (blocks[:-1] * emission.num_blocks + blocks[1:]).unique(return_inverse=True)
    peak, tiles = _prepare(transition, emission, pairs)
    added = (peak[pair] + scores)[:, None]  # [steps, 1, k]
    filtered, relative, joint = (torch.empty_like(added) for _ in range(3))
    before, on_gpu = lattice.filtered[-1], hmm.device.type == "cuda"
    for sums, more, total, after, tile in zip(relative, added, joint, filtered, pair.tolist(), strict=True):
        weights = before.exp()
        if not on_gpu:  # denormal numbers would slow the product down
            torch.threshold_(weights, FLOOR[hmm.dtype], 0.0)
        torch.mm(weights, tiles[tile], out=sums)
        torch.add(sums.log(), more, out=total)
        before = torch.log_softmax(total, 1, out=after)
    log_scales = torch.logsumexp(joint, 2)
    sure = (relative >= least_sum(emission.width, hmm.dtype)).flatten(1).all(1) & (log_scales[:, 0] > NEG_INF)
    sound = len(sure) if bool(sure.all()) else int(sure.int().argmin())
    lattice.filtered.extend(filtered[:sound].unbind())
    lattice.scales.extend(log_scales[:sound].unbind())


def _prepare(transition: TiledTransition, emission: Blocked, pairs: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the largest entries of the columns of log A [P, k], and exp(log A) [k, k] relative to them, of pairs [P].

    A pair of blocks is source · M + target.
    """
    sources, targets = pairs // emission.num_blocks, pairs % emission.num_blocks
    table = transition.table(emission.width)
    if table is not None:
        return table.peak[sources, targets, 0], list(table.scaled[sources, targets])
    if transition.device.type == "cpu":
        store = transition.store(emission.width)
        peaks, scaled = zip(*(store.tile(key) for key in pairs.tolist()), strict=True)
        return torch.stack(peaks), scaled
    tiles = LogMatrix(transition.tiles(sources, targets, emission.width))
    return tiles.peak[:, 0], list(tiles.scaled)
