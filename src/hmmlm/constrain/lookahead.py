"""The recursion of a guide: p(r more tokens end in an accepting automaton state | automaton state, HMM state).

See guide.py for the formula. It is written over a semiring, with values relative to the largest of each row. For
a matrix it runs in probabilities; where a sum may have lost anything to underflow, and for other kinds, in log space.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

from hmmlm.constrain.automaton import Automaton
from hmmlm.constrain.budget import SLOW, spend
from hmmlm.constrain.guided import has_kernels
from hmmlm.emissions.columns import log_group_sums
from hmmlm.hmm.hmm import HMM
from hmmlm.numerics.semirings import LOG, PROBABILITY, Semiring
from hmmlm.ops.common import NEG_INF, finite, logsumexp
from hmmlm.ops.pieces import MOST, at_once
from hmmlm.ops.underflow import FLOOR, exp, least_sum
from hmmlm.transitions import Dense

_CACHED = 2**18  # largest intermediate on a CPU: several operations read it again
LONG = 256  # tokens of a constraint above which its recursion is in float64
NEGLIGIBLE = 1e-6  # change of a log-probability
_FIRST_ROWS = 256  # of a table, which mostly decide whether it has changed
_CHECKED = 16  # steps from one look at the results to the next
_BLOCK = 1024  # states of a program


class AcceptanceTable(NamedTuple):
    """The recursion after one number of tokens."""

    row_of: Tensor  # [S] the row of each automaton state; −1 without one
    log_probs: Tensor  # [rows, Z]


class Values(NamedTuple):
    """Values of a semiring, relative to exp(offset) of each row.

    Log-probabilities of many tokens are large numbers, whose rounding errors would add up.
    """

    relative: Tensor  # [rows, Z]
    offset: Tensor  # [rows] float64


def acceptance_tables(
    hmm: HMM, automaton: Automaton, edges: WeightedEdges, live: Sequence[Tensor], length: int
) -> list[AcceptanceTable]:
    """Compute the recursion for 0, 1, … more tokens: up to `length` − 1, or until all that follow are the same.

    Args:
        live: of `live_states`.
    """
    rows_of = [torch.where(mask, mask.cumsum(0) - 1, -1) for mask in live]
    rows_of += rows_of[-1:] * (length - len(rows_of))
    model = hmm
    if length > LONG and hmm.dtype == torch.float32:  # rounding errors would hide a change, and add up
        model = hmm.to(torch.float64)
        edges = WeightedEdges(model, automaton)
    tables = _run(PROBABILITY, model, edges, rows_of, hmm.dtype) if isinstance(model.transition, Dense) else []
    return tables or _run(LOG, model, edges, rows_of, hmm.dtype)


def _run(
    ring: Semiring, hmm: HMM, edges: WeightedEdges, rows_of: Sequence[Tensor], dtype: torch.dtype
) -> list[AcceptanceTable]:
    """Run the recursion in a semiring; return no table if a sum of probabilities may have underflowed.

    It is linear, with coefficients of at least 0, so the relative change never grows from one step to the next: it ends
    once this change, at every step that is left, changes nothing.
    """
    count, device = int(rows_of[0].max()) + 1, hmm.device
    before = torch.zeros(count, hmm.num_states, dtype=hmm.dtype, device=device)
    values = Values(ring.from_log(before), torch.zeros(count, dtype=torch.float64, device=device))
    tables, suspect = [AcceptanceTable(rows_of[0], before.to(dtype))], torch.zeros((), dtype=torch.int32, device=device)
    step = _kernel_step if ring is PROBABILITY and has_kernels(hmm) else _step
    for r in range(1, len(rows_of)):
        terms = edges.find_terms(rows_of[r - 1], rows_of[r])
        if not terms.rows:  # nothing is accepted, nor after more tokens
            tables.append(AcceptanceTable(rows_of[r], before[:0].to(dtype)))
            break
        after, values = step(ring, hmm, edges, terms, values, suspect)
        tables.append(AcceptanceTable(rows_of[r], after.to(dtype)))
        left = len(rows_of) - r
        if r % _CHECKED == 0 or left == 1:
            if bool(suspect):
                return []
            if rows_of[r] is rows_of[r - 1] and _converged(before, after, left, dtype):
                break
        before = after
    return [] if bool(suspect) else tables


def _step(
    ring: Semiring, hmm: HMM, edges: WeightedEdges, terms: _Terms, values: Values, suspect: Tensor
) -> tuple[Tensor, Values]:
    """Return the next table [rows, Z], and its values.

    Of probabilities, terms below FLOOR may be lost: one for each edge in a sum over edges, one for each state in a sum
    over states. Sums of 10⁶ times as much have not changed; others set `suspect`.
    """
    total, top = edges.add(ring, values, terms)
    moved = hmm.transition.backward_step(ring, total)
    peak = moved.amax(1, keepdim=True)
    if ring is LOG:
        log_relative = relative = moved - finite(peak)
        offset = top + finite(peak)[:, 0]
    else:
        suspect |= ~(moved.amin() >= least_sum(hmm.num_states + terms.most, moved.dtype))  # or NaN
        relative = moved.div_(peak)
        log_relative, offset = relative.log(), top + peak[:, 0].double().log()
    return log_relative + offset[:, None], Values(relative, offset)


def _kernel_step(
    ring: Semiring, hmm: HMM, edges: WeightedEdges, terms: _Terms, values: Values, suspect: Tensor
) -> tuple[Tensor, Values]:
    """See `_step`; in probabilities, on a GPU."""
    from hmmlm.constrain.lookahead_kernels import divide_kernel, edges_kernel  # needs Triton

    transition, states, top = hmm.transition, hmm.num_states, values.offset.new_empty(terms.rows)
    assert isinstance(transition, Dense)
    total, moved = torch.empty(2, terms.rows, states, device=top.device)
    log_probs = torch.empty_like(total)
    edges_kernel[(terms.rows, -(-states // _BLOCK))](
        *values, edges.weights, terms.first, terms.kept, terms.from_row, total, top, states, BLOCK=_BLOCK
    )
    torch.mm(total, transition.matrix(forward=False).probs, out=moved)
    least = least_sum(states + terms.most, torch.float32)
    divide_kernel[(terms.rows,)](moved, top, total, log_probs, suspect, states, least, BLOCK=_BLOCK)
    return log_probs, Values(total, top)


class _Terms(NamedTuple):
    """What a step of the recursion adds up."""

    kept: Tensor  # [n] the edges, by source
    source: Tensor  # [n] their rows after the step
    from_row: Tensor  # [n] their rows before it
    first: Tensor  # [rows + 1] the first edge of each row
    rows: int
    most: int  # terms of a sum


class WeightedEdges:
    """The edges of an automaton and log p(a token of the edge | z), for one step of the recursion."""

    def __init__(self, hmm: HMM, automaton: Automaton) -> None:
        source, target, of_cell = automaton.edges
        hopeful = automaton.hopeful()
        useful = hopeful[target] & hopeful[source]
        number = torch.full_like(source, -1)
        number[useful] = torch.arange(int(useful.sum()))
        edge_of = number[of_cell]  # [S, C]; −1: leads nowhere
        self._device = hmm.device
        self._rows_at_once = at_once(hmm.num_states, MOST if hmm.log_start.is_cuda else _CACHED)
        self._ends = source[useful], target[useful]
        counts = self._ends[0].bincount(minlength=automaton.num_states)
        self._firsts = [0, *counts.cumsum(0).tolist()]  # the first edge of each automaton state
        log_classes = hmm.emission.group_log_probs(automaton.class_of.to(hmm.device), automaton.classes)  # [C, Z]
        edge, of_class = edge_of[edge_of >= 0], torch.arange(automaton.classes).expand_as(edge_of)[edge_of >= 0]
        order = edge.argsort(stable=True)
        self.log_weights = self._log_sums(log_classes, of_class[order], edge[order])  # [E, Z]
        self.weights = exp(self.log_weights)
        self._before = self._after = torch.empty(0)
        self._terms = _Terms(*(torch.empty(0),) * 4, 0, 0)

    def _log_sums(self, log_classes: Tensor, of_class: Tensor, edge: Tensor) -> Tensor:
        """Compute log Σ p(class | z) over the classes of each edge [E, Z], for pairs of both, sorted by edge."""
        result = log_classes.new_full((len(self._ends[0]), log_classes.shape[1]), NEG_INF)
        first = 0
        while first < len(edge):
            last = min(first + self._rows_at_once, len(edge))
            if last < len(edge) and int(edge[last]) > int(edge[first]):  # whole edges
                last = int(torch.searchsorted(edge, edge[last]))
            low, high = int(edge[first]), int(edge[last - 1]) + 1
            chosen = log_classes[of_class[first:last].to(self._device)]
            sums = log_group_sums(chosen, (edge[first:last] - low).to(self._device), high - low)
            result[low:high] = torch.logaddexp(result[low:high], sums)
            first = last
        return result

    def add(self, ring: Semiring, values: Values, terms: _Terms) -> tuple[Tensor, Tensor]:
        """Compute Σ_edges p(edge | z) ahead(target, z) as values of a semiring [rows, Z], relative to exp of an offset.

        Returns:
            The sums, and the offset [rows]: the largest of a target.
        """
        kept, source, from_row, _, rows, _ = terms
        probs = values.relative.exp() if ring is LOG else values.relative
        top = torch.full((rows,), NEG_INF, dtype=torch.float64, device=self._device)
        offset = values.offset[from_row]
        top = top.scatter_reduce(0, source, offset, "amax")
        log_factor = (offset - top[source]).to(probs.dtype)
        factor = log_factor.exp()[:, None]
        total = torch.zeros(rows, probs.shape[1], dtype=probs.dtype, device=self._device)
        size, floor = self._rows_at_once, FLOOR[probs.dtype]
        for first in range(0, len(kept), size):
            piece = slice(first, first + size)
            each = probs[from_row[piece]].mul_(self.weights[kept[piece]]).mul_(factor[piece])
            total.index_add_(0, source[piece], threshold(each, floor, 0.0, inplace=True))  # denormal numbers are slow
        if ring is PROBABILITY:
            return total, top
        suspect = (total.amin(1) < least_sum(terms.most, total.dtype)).nonzero()[:, 0]
        result = total.log_()
        if len(suspect):  # some sums may have underflowed: in log space
            chosen = torch.isin(source, suspect).nonzero()[:, 0]
            number = torch.full((rows,), -1, device=self._device)
            number[suspect] = torch.arange(len(suspect), device=self._device)
            log_terms = self.log_weights[kept[chosen]] + values.relative[from_row[chosen]] + log_factor[chosen, None]
            result[suspect] = log_group_sums(log_terms, number[source[chosen]], len(suspect))
        return result, top

    def read_from(self, state: int, before: AcceptanceTable) -> Tensor:
        """Compute one row of `read` [Z], that of an automaton state."""
        first, last = self._firsts[state : state + 2]
        places = before.row_of[self._ends[1][first:last]]
        kept = (places >= 0).nonzero()[:, 0]
        edges, places = (kept + first).to(self._device), places[kept].to(self._device)
        return logsumexp(self.log_weights[edges] + before.log_probs[places], 0)

    def find_terms(self, before: Tensor, after: Tensor) -> _Terms:
        """Return the terms of a step from rows `before` [S] to rows `after` [S]; those of the last step are kept."""
        if before is not self._before or after is not self._after:
            source, target = self._ends
            kept = (before[target] >= 0).nonzero()[:, 0]
            rows, source = int(after.max()) + 1, after[source[kept]]
            counts = source.bincount(minlength=rows)
            first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            # All of them on the CPU, then to the device: nothing has to wait for it.
            tensors = (kept, source, before[target[kept]], first)
            kept, source, from_row, first = (each.to(self._device) for each in tensors)
            self._terms = _Terms(kept, source, from_row, first, rows, int(counts.max()) if rows else 1)
            self._before, self._after = before, after
        return self._terms


def live_states(automaton: Automaton, length: int) -> list[Tensor]:
    """Return masks [S] of the automaton states from which 0, 1, … tokens may be accepted, until they repeat."""
    source, target, _ = automaton.edges
    live = [automaton.accepting]
    while len(live) < length:
        spend(SLOW + 4 * len(source))
        mask = torch.zeros_like(automaton.accepting)
        mask[source[live[-1][target]]] = True
        live.append(mask)
        if torch.equal(mask, live[-2]):
            break
    return live


def _converged(before: Tensor, after: Tensor, left: int, dtype: torch.dtype) -> bool:
    """Return whether no value changed, from before to after [rows, Z], so that `left` such changes would matter."""
    tolerance = max(NEGLIGIBLE / left, 2 * torch.finfo(dtype).eps)  # the rounding of sums of the model's own rows
    return all(
        torch.allclose(after[rows], before[rows], rtol=0.0, atol=tolerance)  # −inf equals −inf
        for rows in (slice(0, _FIRST_ROWS), slice(_FIRST_ROWS, None))
    )
