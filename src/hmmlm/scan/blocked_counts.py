"""Expected counts of a blocked HMM, as sparse matrices: only pairs of blocks in the text have transitions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hmmlm.emissions import Blocked
from hmmlm.numerics.support import BlockSupport, some_rows, spread
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.pieces import at_once
from hmmlm.scan.composition import Composition
from hmmlm.scan.lattice import Lattice, Packed
from hmmlm.scan.results import Counts
from hmmlm.transitions.tiles import span_of


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
    moved = list(_transition_counts(hmm, lattice, messages, weight))
    return Counts(
        spread(marginals[0], lattice.supports[0], hmm.num_states, 0.0).sum(0),
        _sparse(hmm, moved, hmm.num_states),
        next(iter(emitted.values())),
        log_likelihood.sum().to(hmm.dtype),
    )


def _transition_counts(
    hmm: Composition, lattice: Lattice, messages: Packed, weight: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the expected transitions of sequences of weight [B] above 0: flat indices into [Z, Z] and counts."""
    possible, emission = weight > 0, hmm.emission
    assert isinstance(emission, Blocked)
    k, blocks = emission.width, emission.num_blocks
    in_block = torch.arange(k, device=hmm.device)
    steps = []  # sequences, filtered before, ahead, and their supports
    for before, after in lattice.pairs(lattice.filtered, lattice.scores.map(torch.add, messages)):
        source, target = before.support, after.support
        assert isinstance(source, BlockSupport) and isinstance(target, BlockSupport)
        steps.append((before.row, before.values, after.values, source, target))
    pairs = [source.blocks * blocks + target.blocks for *_, source, target in steps]
    inside = [(source.blocks >= 0) & (target.blocks >= 0) for *_, source, target in steps]
    some = [pair[here & possible[row]] for (row, *_), pair, here in zip(steps, pairs, inside, strict=True)]
    known = torch.cat([*some, in_block[:0]]).unique()
    totals = torch.zeros(len(known), k, k, dtype=hmm.dtype, device=hmm.device)
    for (row, filtered, ahead, source, target), pair, here in zip(steps, pairs, inside, strict=True):
        for rows in (here & possible[row]).nonzero().squeeze(1).split(at_once(k**2)):
            scores = _in_block(filtered, source, rows)[:, :, None] + _in_block(ahead, target, rows)[:, None]
            scores += hmm.transition.tiles(source.blocks[rows], target.blocks[rows], k)
            counts = scores.flatten(1).softmax(1).view_as(scores)
            totals.index_add_(0, torch.searchsorted(known, pair[rows]), counts * weight[row[rows]][:, None, None])
        for n in (~here & possible[row]).nonzero().flatten().tolist():  # a missing token: all states
            index, counts = _wide_counts(hmm, filtered[n], ahead[n], source, target, n)
            yield index, counts * weight[row[n]]
    origins, targets = known // blocks, known % blocks
    flat = (origins[:, None] * k + in_block)[:, :, None] * hmm.num_states + (targets[:, None] * k + in_block)[:, None]
    yield flat.flatten(), totals.flatten()


def _wide_counts(
    hmm: Composition, before: Tensor, ahead: Tensor, source: BlockSupport, target: BlockSupport, row: int
) -> tuple[Tensor, Tensor]:
    """Return the expected transitions of one row of a step, from or to all states."""
    first, second = (span_of(int(s.blocks[row]), s.width, hmm.num_states) for s in (source, target))
    before, ahead = before[first] if source.wide else before, ahead[second] if target.wide else ahead
    tile = torch.cat(list(hmm.transition.pieces(first, second)), 1)
    states = torch.arange(hmm.num_states, device=hmm.device)
    flat = states[first][:, None] * hmm.num_states + states[second]
    return flat.flatten(), (before[:, None] + tile + ahead).flatten().softmax(0)


def _in_block(values: Tensor, support: BlockSupport, rows: Tensor) -> Tensor:
    """Return the values [n, k] of rows [n] that are in one block each."""
    own = support.rows(rows)
    return own._replace(wide=False).restrict(values[rows]) if support.wide else values[rows]


def _sparse(hmm: Composition, entries: list[tuple[Tensor, Tensor]], columns: int) -> Tensor:
    """Return a sparse [Z, columns] tensor of flat indices and values, duplicates added up."""
    none = (
        torch.empty(0, dtype=torch.long, device=hmm.device),
        torch.empty(0, dtype=hmm.dtype, device=hmm.device),
    )
    flat, values = (torch.cat(column) for column in zip(none, *entries, strict=True))
    index = torch.stack([flat // columns, flat % columns])
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(index, values, (hmm.num_states, columns)).coalesce()
