"""The filter of a blocked HMM over one long sequence.

A step of it is little work, so what the steps of a piece need is prepared for all of them: the tiles of the transition
matrix between their blocks. The steps are those of `products.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.hmm.lattice import Lattice, SortedBatch
from hmmlm.hmm.products import Observations, filter_products
from hmmlm.hmm.steps import Steps, add_step
from hmmlm.numerics.logmatrix import LogTiles
from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import BlockSupport, restrict
from hmmlm.transitions.tiled import TiledTransition

if TYPE_CHECKING:
    from hmmlm.hmm.composition import Composition

_STEPS = 256  # of a piece
_CELLS = 2**27  # of its tiles: 512 MB in float32


def is_stream(hmm: Composition, batch: SortedBatch) -> bool:
    """Return whether `filter_stream` serves a batch: one sequence without missing tokens, and no gradient."""
    tiled = isinstance(hmm.transition, TiledTransition) and isinstance(hmm.emission, Blocked)
    return tiled and batch.active[:1] == [1] and not any(batch.missing) and not hmm.requires_grad


def filter_stream(hmm: Composition, batch: SortedBatch, log_initial: Tensor | None) -> Lattice:
    """Run the filter over one sequence; see `recursions.forward`.

    Where underflow may have changed a sum, or a word is impossible, a piece is computed in log space.
    """
    lattice, steps, emission = Lattice(batch, [], [], [], []), len(batch.active), hmm.emission
    assert isinstance(emission, Blocked)
    observed = emission.score(batch.tokens[:, 0], missing=False)
    first = restrict(hmm.log_start[None], observed[0])
    if log_initial is not None:
        first = hmm.transition.forward_step(LOG, log_initial, None, observed[0])
    add_step(Steps(LOG, hmm.transition), lattice, observed, first)
    size = max(1, min(_STEPS, _CELLS // emission.width**2))
    for begin in range(1, steps, size):
        end = min(begin + size, steps)
        _filter_piece(hmm, lattice, end)
        for t in range(len(lattice.supports), end):
            add_step(Steps(LOG, hmm.transition), lattice, emission.score(batch.tokens[:, t], missing=False), first)
    return lattice


def _filter_piece(hmm: Composition, lattice: Lattice, end: int) -> None:
    """Add steps to a lattice that has at least one, until `end`; none if log space has to decide."""
    transition, emission, last = hmm.transition, hmm.emission, lattice.filtered[-1]
    assert isinstance(transition, TiledTransition) and isinstance(emission, Blocked)
    tokens = lattice.batch.tokens[0, len(lattice.supports) - 1 : end]
    blocks, scores = emission.block_of_word[tokens], emission.log_probs[tokens]
    pairs, pair = (blocks[:-1] * emission.num_blocks + blocks[1:]).unique(return_inverse=True)
    peak, tiles = _prepare(transition, emission, pairs)
    given = Observations(scores, torch.arange(len(tokens), device=hmm.device)[:, None], [1] * len(tokens))
    log_factor = torch.cat([scores[:1], peak[pair] + scores[1:]])
    found = filter_products([last, *(tiles[i] for i in pair.tolist())], log_factor, last, given)
    if found is None:
        return
    support = BlockSupport(blocks, emission.width)
    lattice.supports.extend(support.rows(slice(t, t + 1)) for t in range(1, len(tokens)))
    lattice.scores.extend(scores[1:, None])
    lattice.filtered.extend(found[0][1:])
    lattice.scales.extend(found[1][1:])


def _prepare(transition: TiledTransition, emission: Blocked, pairs: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the largest entries of the columns of log A [P, k], and exp(log A) [k, k] relative to them, of pairs [P].

    A pair of blocks is source · M + target.
    """
    sources, targets = pairs // emission.num_blocks, pairs % emission.num_blocks
    table = transition.table(emission.width)
    if table is not None:
        return table.peak[sources, targets], list(table.scaled[sources, targets])
    if transition.device.type == "cpu":
        store = transition.store(emission.width)
        peaks, scaled = zip(*(store.tile(key) for key in pairs.tolist()), strict=True)
        return torch.stack(peaks), scaled
    tiles = LogTiles(transition.tiles(sources, targets, emission.width))
    return tiles.peak, list(tiles.scaled)
