"""The recursions that queries share, in log space: the filter, messages from later tokens, and best paths.

They are written once, over the steps of a transition and the scores of an emission. Batches are sorted by length, so
that step t processes the first rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hmmlm.checks import ArrayLike, check_batch
from hmmlm.errors import ImpossibleError
from hmmlm.numerics.semirings import LOG, MAX_PLUS
from hmmlm.numerics.support import Support, restrict, some_rows, spread, state_ids
from hmmlm.ops.common import NEG_INF, Carry, log_normalize, logsumexp
from hmmlm.ops.pieces import at_once
from hmmlm.ops.scan import path_loops_pay
from hmmlm.scan.blocked_stream import filter_stream, is_stream
from hmmlm.scan.composition import matrices
from hmmlm.scan.lattice import Lattice, Packed, SortedBatch, Supports, endings
from hmmlm.scan.products import filter_dense, messages_dense
from hmmlm.scan.steps import Steps, add_step, pass_back

if TYPE_CHECKING:
    from hmmlm.scan.composition import Composition

_WINDOW_STEPS = 2**13  # of queries that need no more than a window of bounded size at a time
_STEPS_PER_SHIFT = 16  # of best paths, between two subtractions of the largest score: float32 suffices for any length


def sort_batch(hmm: Composition, tokens: ArrayLike, lengths: ArrayLike | None) -> SortedBatch:
    """Check and sort a batch."""
    checked, sizes = check_batch(tokens, lengths, hmm.vocab_size, hmm.device)
    steps = checked.shape[1]
    if sizes is None:
        order, active = torch.arange(len(checked), device=hmm.device), [len(checked)] * steps
        inside = checked.new_ones((), dtype=torch.bool)
    else:
        order = sizes.argsort(descending=True, stable=True)
        checked = checked[order]
        inside = torch.arange(steps, device=hmm.device) < sizes[order, None]
        active = [rows for rows in inside.sum(0).tolist() if rows]
        checked = checked.masked_fill(~inside, -1)
    missing = ((checked < 0) & inside).any(0).tolist()
    return SortedBatch(checked, active, missing, order)


def log_initial(hmm: Composition, carry: Carry | None, batch: SortedBatch) -> Tensor | None:
    """Return log p(z | x) [B, Z] of a carry, rows as in the batch."""
    return None if carry is None else carry.over_all(hmm.num_states)[batch.order].to(hmm.dtype)


def observe(
    hmm: Composition,
    batch: SortedBatch,
    log_missing: Tensor | None = None,
    prepare: Callable[[Tensor], tuple[Tensor, ...]] = lambda scores: (scores,),
) -> tuple[Supports, list[Packed]]:
    """Return the supports of all steps, and what `prepare` makes of emission scores [n, K]; see `Emission.score`.

    All steps are prepared together if no token is missing.
    """
    if not any(batch.missing):
        support, scores = hmm.emission.score(batch.tokens[batch.row, batch.step], missing=False)
        return Supports(batch, support), [Packed(batch, values) for values in prepare(scores)]
    found = [
        hmm.emission.score(batch.tokens[:rows, t], batch.missing[t], log_missing) for t, rows in enumerate(batch.active)
    ]
    columns = zip(*(prepare(scores) for _, scores in found), strict=True)
    return Supports(batch, [support for support, _ in found]), [Packed(batch, list(values)) for values in columns]


def run_filter(
    hmm: Composition, batch: SortedBatch, log_initial: Tensor | None = None, log_missing: Tensor | None = None
) -> Lattice:
    """Run the filter over a batch, as `forward` does; in products of probabilities or tiles where these serve."""
    found = filter_dense(hmm, batch, log_initial, log_missing)
    if found is None and is_stream(hmm, batch):
        return filter_stream(hmm, batch, log_initial)
    return forward(hmm, batch, log_initial, log_missing) if found is None else found


def run_messages(hmm: Composition, lattice: Lattice) -> Packed:
    """Return log p(x_t+1.. | z_t) / p(x_t+1.. | x_1..t) [n, K] for each step, for possible sequences."""
    found = None if lattice.stacked is None else messages_dense(hmm, lattice)
    return messages_back(hmm, lattice)[0] if found is None else found


def find_best_paths(hmm: Composition, batch: SortedBatch) -> tuple[Tensor, Tensor]:
    """Find the most likely states [B, T] (−1 beyond a length) and their log-probability with the tokens [B], float64.

    In compiled loops where these are faster.
    """
    parameters = matrices(hmm)
    pays = parameters is not None and path_loops_pay(hmm.num_states, len(batch.tokens), hmm.device)
    if parameters is None or not pays or hmm.impl not in ("auto", "compiled"):
        return best_paths(hmm, batch)
    from hmmlm.ops.scan import compiled  # needs numba

    return compiled.best_paths(parameters, batch.tokens, batch.active)


def forward(
    hmm: Composition,
    batch: SortedBatch,
    log_initial: Tensor | None = None,
    log_missing: Tensor | None = None,
    first: Tensor | None = None,
) -> Lattice:
    """Run the filter in log space over a batch.

    Args:
        log_initial: [B, Z] the logarithm of the filtered distribution before it, rows as in the batch.
        first: [B, K] log p(z_1) over the support of the first tokens, in its place.
    """
    supports, (scores,) = observe(hmm, batch, log_missing)
    lattice, steps = Lattice.begin(batch, supports, scores), Steps(LOG, hmm.transition)
    if first is None:
        first = predict_first(hmm, batch, supports[0], log_initial)
    for _ in batch.active:
        add_step(steps, lattice, first)
    return lattice


def predict_first(hmm: Composition, batch: SortedBatch, support: Support, log_initial: Tensor | None) -> Tensor:
    """Return log p(z_1) [n, K] over the support of the first tokens; see `forward`."""
    if log_initial is None:
        return restrict(hmm.log_start.expand(len(batch.tokens), -1), support)
    return hmm.transition.forward_step(LOG, log_initial, None, support)


def last_filtered(hmm: Composition, lattice: Lattice) -> Tensor:
    """Return log p(z | x) [B, Z] at the last tokens in float64, rows as in the batch."""
    pieces = [
        spread(lattice.filtered[t][ended], some_rows(lattice.supports[t], ended), hmm.num_states, NEG_INF)
        for t, ended in endings(lattice.batch.active)
    ]
    return log_normalize(torch.cat(pieces[::-1]).double())


def windows(hmm: Composition, batch: SortedBatch, log_initial: Tensor | None) -> Iterator[tuple[int, Lattice]]:
    """Run the filter over a batch in windows of bounded size; yield the first step of each, and its lattice.

    What a window passes on is in log space: a state that a later window needs may have any probability.
    """
    size = min(_WINDOW_STEPS, at_once(len(batch.tokens) * hmm.num_states, 2**25))
    for first in range(0, len(batch.active), size):
        here = slice(first, first + size)
        active = batch.active[here]
        rows = active[0]
        part = SortedBatch(batch.tokens[:rows, here], active, batch.missing[here], batch.order[:rows])
        lattice = run_filter(hmm, part, None if log_initial is None else log_initial[:rows])
        yield first, lattice
        log_initial = spread(lattice.filtered[-1], lattice.supports[-1], hmm.num_states, NEG_INF)


def messages_back(hmm: Composition, lattice: Lattice) -> tuple[Packed, Packed]:
    """Compute `run_messages` in log space, a step at a time; also return the weights of `pass_back`."""

    def normalize(t: int, arrived: Tensor) -> Tensor:
        # At every step, so that rounding errors do not add up over a long sequence.
        return arrived - logsumexp(lattice.filtered[t][: len(arrived)] + arrived, 1)[:, None]

    last = torch.zeros_like(lattice.scales[0])
    return pass_back(Steps(LOG, hmm.transition), lattice, last, normalize, lambda weights: weights)


def best_paths(hmm: Composition, batch: SortedBatch) -> tuple[Tensor, Tensor]:
    """Compute `find_best_paths`: the forward recursion in max-plus, then a step back at a time."""
    supports, (scores,) = observe(hmm, batch)
    lattice, steps = Lattice.begin(batch, supports, scores), Steps(MAX_PLUS, hmm.transition)
    first = predict_first(hmm, batch, supports[0], None)
    for t in range(len(batch.active)):
        add_step(steps, lattice, first, normalize=t % _STEPS_PER_SHIFT == 0)
    log_prob = lattice.log_likelihood()
    for t, ending in endings(batch.active):
        log_prob[ending] += lattice.filtered[t][ending].amax(1)
    path, states = torch.full_like(batch.tokens, -1), torch.empty(0, dtype=torch.long, device=hmm.device)
    for t in reversed(range(len(lattice.supports))):
        best, support, rows = lattice.filtered[t], lattice.supports[t], states.shape[0]
        if rows:
            into = hmm.transition.log_columns(states, some_rows(support, slice(rows)))
            best = torch.cat([best[:rows] + into, best[rows:]])
        states = state_ids(support, best.argmax(1))
        path[: states.shape[0], t] = states
    return path, log_prob


def run_possible(hmm: Composition, batch: SortedBatch, log_missing: Tensor | None = None) -> Lattice:
    """Run the filter.

    Raise an InputError that names the first impossible sequence and its first impossible token.
    """
    lattice = run_filter(hmm, batch, log_missing=log_missing)
    impossible = (lattice.log_likelihood() == NEG_INF).nonzero().flatten()
    if len(impossible):
        row = int(impossible[batch.order[impossible].argmin()])
        position = next(t for t, scale in enumerate(lattice.scales) if float(scale[row]) == NEG_INF)
        raise ImpossibleError(int(batch.order[row]), position, f"token {int(batch.tokens[row, position])}")
    return lattice


def gather(hmm: Composition, lattice: Lattice, values: Packed) -> Tensor:
    """Return values over supports as [B, T, Z], original order, zero outside supports and beyond lengths."""
    batch, blocks = lattice.batch, lattice.supports.blocks
    everywhere = lattice.supports.is_one and lattice.supports.whole is None
    if everywhere and batch.is_even and len(batch.active) == batch.tokens.shape[1]:
        return values.padded(0.0).transpose(0, 1).contiguous()
    result = torch.zeros(*batch.tokens.shape, hmm.num_states, dtype=hmm.dtype, device=hmm.device)
    if blocks is not None:  # written without spreading them first
        result.unflatten(2, (-1, blocks.width))[batch.order[batch.row], batch.step, blocks.blocks] = values.whole
        return result
    for row, step, own, support in lattice.rows(values):
        result[batch.order[row], step] = spread(own, support, hmm.num_states, 0.0)
    return result
