"""The recursions that queries share, in log space: the filter, and messages from later tokens.

They are written once for every kind of HMM, over the operations that it implements (`hmmlm.hmm.protocol`). Batches are
sorted by length, so that step t processes the first rows only.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.checks import ArrayLike, check_batch
from hmmlm.hmm.lattice import Lattice, SortedBatch, first_rows
from hmmlm.hmm.protocol import Primitives, Support
from hmmlm.ops.common import NEG_INF, finite, logsumexp

_WINDOW_CELLS = 2**25  # tokens × states of a window of queries that need no more than one at a time
_WINDOW_STEPS = 2**13


class Recursions(Primitives):
    """An HMM with its recursions over batches."""

    def _batch(self, tokens: ArrayLike, lengths: ArrayLike | None) -> SortedBatch:
        """Check and sort a batch."""
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        steps = checked.shape[1]
        if sizes is None:
            order, active = torch.arange(len(checked), device=self.device), [len(checked)] * steps
            inside = checked.new_ones((), dtype=torch.bool)
        else:
            order = sizes.argsort(descending=True, stable=True)
            checked = checked[order]
            inside = torch.arange(steps, device=self.device) < sizes[order, None]
            active = [rows for rows in inside.sum(0).tolist() if rows]
            checked = checked.masked_fill(~inside, -1)
        missing = ((checked < 0) & inside).any(0).tolist()
        return SortedBatch(checked, active, missing, order)

    def _observations(self, batch: SortedBatch, log_missing: Tensor | None = None) -> Iterator[tuple[Support, Tensor]]:
        """Yield the support and the emission scores [n, K] of each step; see `observe`."""
        for t, rows in enumerate(batch.active):
            yield self.observe(batch.tokens[:rows, t], batch.missing[t], log_missing)

    def _forward(
        self, batch: SortedBatch, log_initial: Tensor | None = None, log_missing: Tensor | None = None
    ) -> Lattice:
        """Run the filter over a batch.

        `log_initial` [B, Z] is the logarithm of the filtered distribution before it, rows as in the batch.
        """
        lattice = Lattice(batch, [], [], [], [])
        for observed in self._observations(batch, log_missing):
            self.filter_step(lattice, observed, log_initial)
        return lattice

    def filter_step(
        self, lattice: Lattice, observed: tuple[Support, Tensor], log_initial: Tensor | None = None
    ) -> None:
        """Add a step with the support and scores of `observe` to a lattice; `log_initial` is used in the first."""
        support, scores = observed
        t, rows = len(lattice.supports), len(scores)
        if t:
            predicted = self.pull(lattice.log_filtered[-1][:rows], first_rows(lattice.supports[-1], rows), support)
        elif log_initial is not None:
            predicted = self.pull(log_initial, None, support)
        else:
            predicted = self.restrict(self.log_start_scores().expand(rows, -1), support)
        joint = predicted + scores
        scale = logsumexp(joint, 1)
        lattice.supports.append(support)
        lattice.scores.append(scores)
        lattice.log_filtered.append(joint - finite(scale)[:, None])
        lattice.log_scales.append(scale)

    def _windows(self, batch: SortedBatch, log_initial: Tensor | None) -> Iterator[tuple[int, Lattice]]:
        """Run the filter over a batch in windows of bounded size; yield the first step of each, and its lattice.

        What a window passes on is in log space: a state that a later window needs may have any probability.
        """
        size = max(1, min(_WINDOW_STEPS, _WINDOW_CELLS // (len(batch.tokens) * self.states)))
        for first in range(0, len(batch.active), size):
            here = slice(first, first + size)
            active = batch.active[here]
            rows = active[0]
            part = SortedBatch(batch.tokens[:rows, here], active, batch.missing[here], batch.order[:rows])
            lattice = self._forward(part, None if log_initial is None else log_initial[:rows])
            yield first, lattice
            log_initial = self.spread(lattice.log_filtered[-1], lattice.supports[-1], NEG_INF)

    def _messages(self, lattice: Lattice) -> list[Tensor]:
        """Return log p(x_t+1.. | z_t) / p(x_t+1.. | x_1..t) [n, K] for each step, for possible sequences."""
        messages: list[Tensor] = []
        for t in reversed(range(len(lattice.supports))):
            message = torch.zeros_like(lattice.log_filtered[t])
            if messages:
                ahead = lattice.scores[t + 1] + messages[-1]
                rows = len(ahead)
                moved = self.push(ahead, first_rows(lattice.supports[t], rows), lattice.supports[t + 1])
                # Normalized at every step, so that rounding errors do not add up over a long sequence.
                moved = moved - logsumexp(lattice.log_filtered[t][:rows] + moved, 1)[:, None]
                message = torch.cat([moved, message[rows:]])
            messages.append(message)
        return messages[::-1]

    def _possible(self, tokens: ArrayLike, lengths: ArrayLike | None, log_missing: Tensor | None = None) -> Lattice:
        """Run the filter.

        Raise an InputError that names the first impossible sequence and its first impossible token.
        """
        model = self.detach()
        lattice = model._forward(model._batch(tokens, lengths), log_missing=log_missing)
        batch = lattice.batch
        impossible = (lattice.log_likelihood() == NEG_INF).nonzero().flatten()
        if len(impossible):
            row = int(impossible[batch.order[impossible].argmin()])
            position = next(t for t, scale in enumerate(lattice.log_scales) if float(scale[row]) == NEG_INF)
            raise InputError(
                f"sequence {int(batch.order[row])} is impossible under this model: token "
                f"{int(batch.tokens[row, position])} at position {position} has probability zero given the tokens "
                "before it"
            )
        return lattice

    def _gather(self, lattice: Lattice, values: list[Tensor], fill: float = 0.0) -> Tensor:
        """Return values over supports as [B, T, Z], original order, `fill` outside supports and beyond lengths."""
        shape = (*lattice.batch.tokens.shape, self.states)
        result = torch.full(shape, fill, dtype=self.dtype, device=self.device)
        for t, value in enumerate(values):
            result[lattice.batch.order[: len(value)], t] = self.spread(value, lattice.supports[t], fill)
        return result
