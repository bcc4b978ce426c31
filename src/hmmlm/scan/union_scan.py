"""The forward recursion of a union of HMMs, by those of its components, and what it carries between windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.numerics.support import spans
from hmmlm.ops.common import NEG_INF, Carry, Scan, finite, log_normalize, logsumexp


class Segments(NamedTuple):
    """The stretches of a batch between restarts, as sequences of their own."""

    tokens: Tensor  # [S, T'] −1 beyond a length
    lengths: Tensor | None  # [S]
    row: Tensor  # [S] the sequence of the batch that each belongs to
    restart: Tensor | None  # [S, T'] bool, True only at position 0; None: nowhere
    last: Tensor  # [B] the last segment of each sequence
    start: Tensor | None = None  # [S] the position of each in its sequence; None: 0

    @classmethod
    def of(cls, tokens: Tensor, lengths: Tensor | None, restart: Tensor | None) -> Segments:
        rows, steps = tokens.shape
        every = torch.arange(rows, device=tokens.device)
        first = None if restart is None else restart & (torch.arange(steps, device=tokens.device) == 0)
        if restart is None or not bool(restart[:, 1:].any()):
            return cls(tokens, lengths, every, first, every)
        place = torch.arange(steps, device=tokens.device)
        ends = torch.full_like(every, steps) if lengths is None else lengths
        begins = (restart | (place == 0)) & (place < ends[:, None])
        row, start = begins.nonzero(as_tuple=True)
        last = torch.cat([row[1:] != row[:-1], torch.ones_like(row[:1], dtype=torch.bool)])
        sizes = torch.where(last, ends[row], start.roll(-1)) - start
        inside = torch.arange(int(sizes.max()), device=tokens.device)
        cut = tokens[row[:, None], (start[:, None] + inside).clamp(max=steps - 1)]
        again = torch.zeros_like(cut, dtype=torch.bool)
        again[:, 0] = restart[row, start]
        return cls(cut.masked_fill(inside >= sizes[:, None], -1), sizes, row, again, last.nonzero().squeeze(1), start)

    def take(self, values: Tensor) -> Tensor:
        """Return values [B, T, …] of the batch by segment [S, T', …]; any beyond a length."""
        if self.start is None:
            return values
        steps = self.start[:, None] + torch.arange(self.tokens.shape[1], device=values.device)
        return values[self.row[:, None], steps.clamp(max=values.shape[1] - 1)]

    def add_up(self, values: Tensor) -> Tensor:
        """Return the sum [B] of the values [S] of each sequence's segments."""
        return values.new_zeros(len(self.last)).index_add(0, self.row, values)


Scanner = Callable[[Tensor, Tensor | None, Carry | None, Tensor | None], Scan]
"""The scan of an HMM, or of a module that makes one: of tokens, lengths, a carry and restarts."""


def scan_components(
    scans: Sequence[Scanner],
    sizes: Sequence[int],
    log_weights: Tensor,
    tokens: Tensor,
    lengths: Tensor | None,
    carry: Carry | None,
    restart: Tensor | None,
) -> Scan:
    """Scan a union of components with `sizes` [K] states and log_weights [K]; see `HMM.scan`.

    A restart chooses a component again, so that each stretch between two restarts is a sequence of its own.
    """
    cut = Segments.of(tokens, lengths, restart)
    given = None if carry is None else split_carry(carry.take(cut.row), sizes)
    carries, joint = list[Carry](), list[Tensor]()
    for k, scan in enumerate(scans):
        log_weight, own = log_weights[k].double(), None
        if given is not None:
            log_mass, own = given[k]
            log_weight = log_mass if cut.restart is None else torch.where(cut.restart[:, 0], log_weight, log_mass)
        result = scan(cut.tokens, cut.lengths, own, cut.restart)
        carries.append(result.carry)
        joint.append(log_weight + result.log_likelihood.double())
    log_joint = torch.stack(joint)  # in float64: a component may be unlikely
    total = cut.add_up(logsumexp(log_joint, 0)).to(log_weights.dtype)
    total = torch.where(total.detach() == NEG_INF, NEG_INF, total)  # impossible: no gradient of other segments
    if any(own.log_probs.dim() < 2 for own in carries):  # none is wanted
        return Scan(total, Carry(total.new_empty(0)))
    final = log_normalize(log_joint.detach()[:, cut.last].t()).t()  # [K, B]
    return Scan(total, join_carries([own.take(cut.last) for own in carries], final, sizes))


def split_carry(carry: Carry, sizes: Sequence[int]) -> list[tuple[Tensor, Carry]]:
    """Return the log-mass [B] of each component in a carry, and its carry given the component."""
    widths, every = list(sizes), list(spans(sizes))
    if carry.states is not None:  # of a scan: the states of a component are side by side, in every row as many
        ends = torch.tensor([span.stop for span in every], device=carry.states.device)
        widths = torch.bucketize(carry.states[0], ends, right=True).bincount(minlength=len(sizes)).tolist()
    log_probs = carry.log_probs.split(widths, 1)
    states = [None] * len(widths) if carry.states is None else list(carry.states.split(widths, 1))
    result = []
    for own, names, span in zip(log_probs, states, every, strict=True):
        log_mass = torch.logsumexp(own, 1)
        # A component without mass has weight zero, so that any distribution will do.
        conditional = torch.where(log_mass[:, None] > NEG_INF, own - finite(log_mass)[:, None], -math.log(own.shape[1]))
        result.append((log_mass, Carry(conditional, None if names is None else names - span.start)))
    return result


def join_carries(carries: Sequence[Carry], log_weights: Tensor, sizes: Sequence[int]) -> Carry:
    """Return the carry of a union from those of its components and their log-weights [K, B]."""
    log_probs = [own.log_probs + weight[:, None] for own, weight in zip(carries, log_weights, strict=True)]
    states = []
    for own, span in zip(carries, spans(sizes), strict=True):
        every = torch.arange(span.start, span.stop, device=own.log_probs.device)
        states.append(every.expand(len(own.log_probs), -1) if own.states is None else own.states + span.start)
    return Carry(torch.cat(log_probs, 1), torch.cat(states, 1))
