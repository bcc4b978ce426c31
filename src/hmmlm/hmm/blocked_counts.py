"""Expected counts of a blocked HMM, as sparse matrices: only pairs of blocks in the text have transitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.hmm.lattice import Lattice
from hmmlm.hmm.protocol import Counts
from hmmlm.ops.common import NEG_INF

if TYPE_CHECKING:
    from hmmlm.hmm.blocked import BlockedHMM
    from hmmlm.hmm.blocked_products import BlockSupport

CELLS = 2**24  # largest table of transitions counted at once


def count_expected(hmm: BlockedHMM, lattice: Lattice, messages: list[Tensor], weights: Tensor | None) -> Counts:
    """Compute expected counts from the forward recursion and the messages of the backward one.

    Args:
        weights: [B] of the sequences; None: one each.
    """
    log_likelihood = lattice.log_likelihood()
    weight = torch.ones_like(log_likelihood) if weights is None else weights[lattice.batch.order].double()
    log_likelihood = torch.where(weight > 0, weight * log_likelihood, 0.0)
    weight = torch.where(log_likelihood > NEG_INF, weight, 0.0).to(hmm.dtype)
    marginals = [
        torch.where(weight[: len(f), None] > 0, weight[: len(f), None] * (f + m).exp(), 0.0)
        for f, m in zip(lattice.log_filtered, messages, strict=True)
    ]
    emitted = list[tuple[Tensor, Tensor]]()  # (flat indices, counts)
    for t, marginal in enumerate(marginals):
        rows, support = len(marginal), lattice.supports[t]
        tokens_here = lattice.batch.tokens[:rows, t]
        known = tokens_here >= 0
        states = hmm.state_ids(support, torch.arange(marginal.shape[1], device=hmm.device)[:, None]).t()
        flat = states.expand_as(marginal) * hmm.vocab_size + tokens_here[:, None]
        emitted.append((flat[known].flatten(), marginal[known].flatten()))
    moved = list(_transition_counts(hmm, lattice, messages, weight))
    return Counts(
        hmm.spread(marginals[0], lattice.supports[0], 0.0).sum(0),
        _sparse(hmm, moved, hmm.states),
        _sparse(hmm, emitted, hmm.vocab_size),
        log_likelihood.sum().to(hmm.dtype),
    )


def _transition_counts(
    hmm: BlockedHMM, lattice: Lattice, messages: list[Tensor], weight: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the expected transitions of sequences of weight [B] above 0: flat indices into [Z, Z] and counts."""
    possible = weight > 0
    k, in_block = hmm.states_per_block, torch.arange(hmm.states_per_block, device=hmm.device)
    steps = []  # filtered before, ahead, and their supports
    for t in range(1, len(messages)):
        rows, ahead = len(messages[t]), lattice.scores[t] + messages[t]
        source = lattice.supports[t - 1].rows(slice(0, rows))
        steps.append((lattice.log_filtered[t - 1][:rows], ahead, source, lattice.supports[t]))
    pairs = [source.blocks * hmm.blocks + target.blocks for _, _, source, target in steps]
    inside = [(source.blocks >= 0) & (target.blocks >= 0) for _, _, source, target in steps]
    some = [pair[here & possible[: len(pair)]] for pair, here in zip(pairs, inside, strict=True)]
    known = torch.cat([*some, hmm.all_states[:0]]).unique()
    totals = torch.zeros(len(known), k, k, dtype=hmm.dtype, device=hmm.device)
    for (before, ahead, source, target), pair, here in zip(steps, pairs, inside, strict=True):
        for rows in (here & possible[: len(here)]).nonzero().squeeze(1).split(max(1, CELLS // k**2)):
            scores = _in_block(hmm, before, source, rows)[:, :, None] + _in_block(hmm, ahead, target, rows)[:, None]
            scores += hmm.tiles(source.blocks[rows], target.blocks[rows])
            counts = scores.flatten(1).softmax(1).view_as(scores)
            totals.index_add_(0, torch.searchsorted(known, pair[rows]), counts * weight[rows][:, None, None])
        for row in (~here & possible[: len(here)]).nonzero().flatten().tolist():  # a missing token: all states
            index, counts = _wide_counts(hmm, before[row], ahead[row], source, target, row)
            yield index, counts * weight[row]
    origins, targets = known // hmm.blocks, known % hmm.blocks
    flat = (origins[:, None] * k + in_block)[:, :, None] * hmm.states + (targets[:, None] * k + in_block)[:, None]
    yield flat.flatten(), totals.flatten()


def _wide_counts(
    hmm: BlockedHMM, before: Tensor, ahead: Tensor, source: BlockSupport, target: BlockSupport, row: int
) -> tuple[Tensor, Tensor]:
    """Return the expected transitions of one row of a step, from or to all states."""
    first, second = (hmm.span(int(support.blocks[row])) for support in (source, target))
    before, ahead = before[first] if source.wide else before, ahead[second] if target.wide else ahead
    pieces = hmm.pieces(first, second)
    scores = torch.cat([before[:, None] + tile + ahead[part] for part, tile in pieces], 1)
    flat = hmm.all_states[first][:, None] * hmm.states + hmm.all_states[second]
    return flat.flatten(), scores.flatten().softmax(0)


def _in_block(hmm: BlockedHMM, values: Tensor, support: BlockSupport, rows: Tensor) -> Tensor:
    """Return the values [n, k] of rows [n] that are in one block each."""
    if not support.wide:
        return values[rows]
    return values[rows].unflatten(1, (hmm.blocks, -1))[torch.arange(len(rows)), support.blocks[rows]]


def _sparse(hmm: BlockedHMM, entries: list[tuple[Tensor, Tensor]], columns: int) -> Tensor:
    """Return a sparse [Z, columns] tensor of flat indices and values, duplicates added up."""
    none = (
        torch.empty(0, dtype=torch.long, device=hmm.device),
        torch.empty(0, dtype=hmm.dtype, device=hmm.device),
    )
    flat, values = (torch.cat(column) for column in zip(none, *entries, strict=True))
    index = torch.stack([flat // columns, flat % columns])
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(index, values, (hmm.states, columns)).coalesce()
