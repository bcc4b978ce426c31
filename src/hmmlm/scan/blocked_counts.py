"""Expected counts of a blocked HMM, as sparse matrices: only pairs of blocks in the text have transitions."""

from __future__ import annotations

import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.numerics.support import BlockSupport, some_rows, spread
from hmmlm.ops.common import NEG_INF, finite
from hmmlm.ops.pieces import at_once
from hmmlm.scan.composition import Composition
from hmmlm.scan.lattice import Lattice, Packed, Stack
from hmmlm.scan.results import Counts


def count_expected(hmm: Composition, lattice: Lattice, messages: Packed, weights: Tensor | None) -> Counts:
    """Compute expected counts from the forward recursion and the messages of the backward one.

    Args:
        weights: [B] of the sequences; None: one each.
    """
    log_likelihood, emission = lattice.log_likelihood(), hmm.emission
    weight = torch.ones_like(log_likelihood) if weights is None else weights[lattice.batch.order].double()
    log_likelihood = torch.where(weight > 0, weight * log_likelihood, 0.0)
    weight = torch.where(log_likelihood > NEG_INF, weight, 0.0).to(hmm.dtype)
    given = Packed(lattice.batch, weight[lattice.batch.row, None])
    marginals = lattice.filtered.map(lambda f, m, own: torch.where(own > 0, own * (f + m).exp(), 0.0), messages, given)
    emitted = {name: torch.zeros_like(value) for name, value in emission.parameters().items()}
    for row, t, share, support in lattice.rows(marginals):
        tokens = lattice.batch.tokens[row, t]
        known = (tokens >= 0).nonzero()[:, 0]
        for name, value in emission.gradient(tokens[known], share[known], some_rows(support, known)).items():
            emitted[name] += value
    return Counts(
        spread(marginals[0], lattice.supports[0], hmm.num_states, 0.0).sum(0),
        _transition_counts(hmm, lattice, messages, weight),
        next(iter(emitted.values())),
        log_likelihood.sum().to(hmm.dtype),
    )


def _transition_counts(hmm: Composition, lattice: Lattice, messages: Packed, weight: Tensor) -> Tensor:
    """Return the expected transitions [Z, Z], sparse, of sequences of weight [B]."""
    emission, transition = hmm.emission, hmm.transition
    assert isinstance(emission, Blocked)
    k, blocks, inside = emission.width, emission.num_blocks, torch.arange(emission.width, device=hmm.device)
    ahead = lattice.scores.map(lambda s, m, scale: s + m - finite(scale)[:, None], messages, lattice.scales)
    pairs = [(*both, *_pairs(*both, blocks, weight > 0)) for both in lattice.pairs(lattice.filtered, ahead)]
    known = torch.cat([*(source * blocks + target for *_, source, target in pairs), inside[:0]]).unique()
    totals = torch.zeros(len(known), k, k, dtype=hmm.dtype, device=hmm.device)
    for before, after, row, source, target in pairs:
        size = at_once(k**2)
        for rows, a, b in zip(row.split(size), source.split(size), target.split(size), strict=True):
            scores = transition.tiles(a, b, k) + _in_block(before, rows, a, k)[:, :, None]
            counts = (scores + _in_block(after, rows, b, k)[:, None]).exp() * weight[before.row[rows], None, None]
            totals.index_add_(0, torch.searchsorted(known, a * blocks + b), counts)
    origins, targets = ((each[:, None] * k + inside) for each in (known // blocks, known % blocks))
    index = torch.stack(torch.broadcast_tensors(origins[:, :, None], targets[:, None]))
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(index.flatten(1), totals.flatten(), (hmm.num_states,) * 2).coalesce()


def _pairs(before: Stack, after: Stack, blocks: int, possible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, the source block and the target block [n] of every move of possible sequences.

    With a missing token a row moves from all blocks, or to all.
    """
    source, target = before.support, after.support
    assert isinstance(source, BlockSupport) and isinstance(target, BlockSupport)
    rows = possible[before.row].nonzero()[:, 0]
    if not source.wide and not target.wide:
        return rows, source.blocks[rows], target.blocks[rows]
    left, right = (~support.rows(rows).outside(blocks) for support in (source, target))
    index, origin = left.nonzero().unbind(1)
    move, aim = right[index].nonzero().unbind(1)
    return rows[index[move]], origin[move], aim


def _in_block(stack: Stack, rows: Tensor, blocks: Tensor, width: int) -> Tensor:
    """Return the values [n, k] of rows [n] of a stack in one block each."""
    values = stack.values[rows]
    return values if values.shape[1] == width else BlockSupport(blocks, width).restrict(values)
