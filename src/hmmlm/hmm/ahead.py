"""The recursion of a guide: p(r more tokens end in an accepting automaton state | automaton state, HMM state).

See constraints.py for the formula. With probabilities relative to the largest of each row, a step takes a few products.
If one of its sums may have lost anything to underflow, or there are many steps, it runs with log-probabilities instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold

from hmmlm.emissions.columns import log_group_sums
from hmmlm.hmm.automaton import Automaton
from hmmlm.hmm.hmm import HMM
from hmmlm.numerics.logmatrix import least_sum
from hmmlm.numerics.semirings import LOG
from hmmlm.ops.common import FLOOR, NEG_INF, exp, logsumexp
from hmmlm.transitions import Dense

CELLS = 2**24  # largest intermediate
_CACHED = 2**18  # largest one on a CPU: several operations read it again
LONG = 256  # tokens of a constraint above which its recursion is in float64
NEGLIGIBLE = 1e-6  # change of a log-probability
_FIRST_ROWS = 256  # of a table, which mostly decide whether it has changed
_CHECKED = 16  # steps from one test for convergence to the next
_BLOCK = 1024  # states of a program


class Ahead(NamedTuple):
    """The recursion after one number of tokens."""

    row_of: Tensor  # [S] the row of each automaton state; −1 without one
    log_probs: Tensor  # [rows, Z]


def tables_ahead(hmm: HMM, automaton: Automaton, edges: Edges, live: Sequence[Tensor], length: int) -> list[Ahead]:
    """Compute the recursion for 0, 1, … more tokens: up to `length` − 1, or until all that follow are the same.

    It is linear, with coefficients of at least 0, so the relative change never grows from one step to the next: it ends
    once this change, at every step that is left, changes nothing.

    Args:
        live: of `live_states`.
    """
    rows_of = [torch.where(mask, mask.cumsum(0) - 1, -1) for mask in live]
    rows_of += rows_of[-1:] * (length - len(rows_of))
    accepting = int(automaton.accepting.sum())
    zeros = torch.zeros(accepting, hmm.states, dtype=hmm.dtype, device=hmm.device)
    tables = [Ahead(rows_of[0], zeros)]
    if isinstance(hmm.transition, Dense) and length <= LONG and _add_products(hmm, edges, rows_of, tables):
        return tables
    del tables[1:]
    model = hmm
    if length > LONG and hmm.dtype == torch.float32:  # rounding errors would hide a change, and add up
        model = hmm.to(torch.float64)
        edges = Edges(model, automaton)
    before = _Step(rows_of[0], zeros.to(model.dtype), zeros.new_zeros(accepting, dtype=torch.float64))
    values = before.log_probs()
    for r in range(1, length):
        step = edges.read(before, rows_of[r])
        if len(step.relative):  # without rows, nothing is accepted
            step = _relative(step.row_of, model.transition.backward_step(LOG, step.relative), step.offset)
        after = step.log_probs()
        tables.append(Ahead(step.row_of, after.to(hmm.dtype)))
        if step.row_of is before.row_of and _converged(values, after, length - r, hmm.dtype):
            break
        before, values = step, after
    return tables


def _add_products(hmm: HMM, edges: Edges, rows_of: Sequence[Tensor], tables: list[Ahead]) -> bool:
    """Add tables to that of no token, from products of probabilities; return False if a sum may have underflowed.

    Terms below FLOOR may be lost: one for each edge in a sum over edges, one for each state in a sum over states. Sums
    of 10⁶ times as much have not changed.
    """
    length, dtype = len(rows_of), hmm.dtype
    step = _kernel_step if hmm.has_kernels else _product_step
    probs, offset = torch.ones_like(tables[0].log_probs), torch.zeros(len(tables[0].log_probs), dtype=torch.float64)
    offset = offset.to(probs.device)
    for first in range(1, length, _CHECKED):
        doubtful = torch.zeros((), dtype=torch.int32, device=hmm.device)
        for r in range(first, min(first + _CHECKED, length)):
            terms = edges.find_terms(rows_of[r - 1], rows_of[r])
            if not terms.rows:
                return False
            log_probs, probs, offset = step(hmm, edges, terms, probs, offset, doubtful)
            tables.append(Ahead(rows_of[r], log_probs))
        if bool(doubtful):
            return False
        before, after = tables[-2:]
        left = length + 1 - len(tables)
        if before.row_of is after.row_of and _converged(before.log_probs, after.log_probs, left, dtype):
            break
    return True


def _product_step(
    hmm: HMM, edges: Edges, terms: _Terms, probs: Tensor, offset: Tensor, doubtful: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next table [rows, Z], and its probabilities relative to an offset of each row [rows]."""
    total, top, _ = edges.add(probs, offset, terms)
    assert isinstance(hmm.transition, Dense)
    moved = hmm.transition.push_probs(total)
    doubtful |= ~(moved.amin() >= least_sum(hmm.states + terms.most, moved.dtype))  # or NaN
    peak = moved.amax(1, keepdim=True)
    offset = top + peak[:, 0].double().log()
    probs = moved.div_(peak)
    return probs.log().add_(offset[:, None]), probs, offset


def _kernel_step(
    hmm: HMM, edges: Edges, terms: _Terms, probs: Tensor, offset: Tensor, doubtful: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `_product_step`; for a GPU."""
    from hmmlm.ops.ahead_kernels import divide_kernel, edges_kernel  # needs Triton

    transition, states, top = hmm.transition, hmm.states, offset.new_empty(terms.rows)
    assert isinstance(transition, Dense)
    total, moved = torch.empty(2, terms.rows, states, device=probs.device)
    log_probs = torch.empty_like(total)
    edges_kernel[(terms.rows, -(-states // _BLOCK))](
        probs, offset, edges.weights, terms.first, terms.kept, terms.from_row, total, top, states, BLOCK=_BLOCK
    )
    torch.mm(total, transition.matrix(forward=False).scaled, out=moved)
    least = least_sum(states + terms.most, torch.float32)
    divide_kernel[(terms.rows,)](
        moved, transition.row_peaks, top, total, log_probs, doubtful, states, least, BLOCK=_BLOCK
    )
    return log_probs, total, top


class _Step(NamedTuple):
    """The recursion after one number of tokens: log-probabilities relative to an offset of each row.

    Log-probabilities of many tokens are large numbers, whose rounding errors would add up.
    """

    row_of: Tensor  # [S] as in `Ahead`
    relative: Tensor  # [rows, Z]
    offset: Tensor  # [rows] float64

    def log_probs(self) -> Tensor:
        return self.relative.double() + self.offset[:, None]


def _relative(row_of: Tensor, log_probs: Tensor, offset: Tensor) -> _Step:
    """Return log_probs [rows, Z] + offset [rows] relative to the largest value of each row."""
    peak = log_probs.amax(1).clamp_min(torch.finfo(log_probs.dtype).min)
    return _Step(row_of, log_probs - peak[:, None], offset + peak)


class _Terms(NamedTuple):
    """What a step of the recursion adds up."""

    kept: Tensor  # [n] the edges, by source
    source: Tensor  # [n] their rows after the step
    from_row: Tensor  # [n] their rows before it
    first: Tensor  # [rows + 1] the first edge of each row
    rows: int
    most: int  # terms of a sum


class Edges:
    """The edges of an automaton and log p(a token of the edge | z), for one step of the recursion."""

    def __init__(self, hmm: HMM, automaton: Automaton) -> None:
        source, target, of_cell = automaton.edges
        hopeful = automaton.hopeful()
        useful = hopeful[target] & hopeful[source]
        number = torch.full_like(source, -1)
        number[useful] = torch.arange(int(useful.sum()))
        cells = number[of_cell]  # [S, C]; −1: leads nowhere
        self._device = hmm.device
        self._ends = source[useful], target[useful]
        counts = self._ends[0].bincount(minlength=automaton.states)
        self._firsts = [0, *counts.cumsum(0).tolist()]  # the first edge of each automaton state
        log_classes = hmm.emission.group_log_probs(automaton.class_of.to(hmm.device), automaton.classes)  # [C, Z]
        edge, of_class = cells[cells >= 0], torch.arange(automaton.classes).expand_as(cells)[cells >= 0]
        order = edge.argsort(stable=True)
        self.log_weights = _log_sums(log_classes, of_class[order], edge[order], len(self._ends[0]))  # [E, Z]
        self.weights = exp(self.log_weights)
        self._before = self._after = torch.empty(0)
        self._terms = _Terms(*(torch.empty(0),) * 4, 0, 0)

    def read(self, before: _Step, row_of: Tensor) -> _Step:
        """Compute log Σ_edges p(edge | z) ahead(target, z) [rows, Z], for automaton states with rows row_of [S]."""
        terms = self.find_terms(before.row_of, row_of)
        total, top, log_factor = self.add(before.relative.exp(), before.offset, terms)
        faint = (total.amin(1) < least_sum(terms.most, total.dtype)).nonzero()[:, 0]
        result = total.log_()
        if len(faint):  # some sums may have underflowed: in log space
            chosen = torch.isin(terms.source, faint).nonzero()[:, 0]
            number = torch.full((terms.rows,), -1, device=self._device)
            number[faint] = torch.arange(len(faint), device=self._device)
            from_row, edge = terms.from_row[chosen], terms.kept[chosen]
            log_terms = self.log_weights[edge] + before.relative[from_row] + log_factor[chosen, None]
            result[faint] = log_group_sums(log_terms, number[terms.source[chosen]], len(faint))
        return _Step(row_of, result, top)

    def add(self, probs: Tensor, offset: Tensor, terms: _Terms) -> tuple[Tensor, Tensor, Tensor]:
        """Compute Σ_edges p(edge | z) ahead(target, z) [rows, Z], for probs [before, Z] relative to offset [before].

        Returns:
            The sums, relative to the largest offset of a target [rows], which is returned too, and the offset of each
            term [n] from it.
        """
        kept, source, from_row, _, rows, _ = terms
        top = torch.full((rows,), NEG_INF, dtype=torch.float64, device=self._device)
        offset = offset[from_row]
        top = top.scatter_reduce(0, source, offset, "amax")
        log_factor = (offset - top[source]).to(probs.dtype)
        factor = log_factor.exp()[:, None]
        total = torch.zeros(rows, probs.shape[1], dtype=probs.dtype, device=self._device)
        size, floor = _rows_at_once(probs), FLOOR[probs.dtype]
        for first in range(0, len(kept), size):
            piece = slice(first, first + size)
            each = probs[from_row[piece]].mul_(self.weights[kept[piece]]).mul_(factor[piece])
            total.index_add_(0, source[piece], threshold(each, floor, 0.0, inplace=True))  # denormal numbers are slow
        return total, top, log_factor

    def read_from(self, state: int, before: Ahead) -> Tensor:
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


def _log_sums(log_classes: Tensor, of_class: Tensor, edge: Tensor, edges: int) -> Tensor:
    """Compute log Σ p(class | z) over the classes of each edge [edges, Z], for pairs of both, sorted by edge."""
    result = torch.full((edges, log_classes.shape[1]), NEG_INF, dtype=log_classes.dtype, device=log_classes.device)
    size, first = _rows_at_once(log_classes), 0
    while first < len(edge):
        last = min(first + size, len(edge))
        if last < len(edge) and int(edge[last]) > int(edge[first]):  # whole edges
            last = int(torch.searchsorted(edge, edge[last]))
        low, high = int(edge[first]), int(edge[last - 1]) + 1
        chosen = log_classes[of_class[first:last].to(log_classes.device)]
        sums = log_group_sums(chosen, (edge[first:last] - low).to(log_classes.device), high - low)
        result[low:high] = torch.logaddexp(result[low:high], sums)
        first = last
    return result


def _rows_at_once(values: Tensor) -> int:
    """Return how many rows of intermediates as wide as values [n, Z] are computed at once."""
    return max(1, (CELLS if values.is_cuda else _CACHED) // values.shape[1])


def live_states(automaton: Automaton, length: int) -> list[Tensor]:
    """Return masks [S] of the automaton states from which 0, 1, … tokens may be accepted, until they repeat."""
    source, target, _ = automaton.edges
    live = [automaton.accepting]
    while len(live) < length:
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
