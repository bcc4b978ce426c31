"""The gradient of `generic_scan`: expected counts, from the filter and the messages of later tokens.

Those of a transition are the derivative of Σ_n x_n A y_n, in bulk, with x the filtered distributions and y the scaled
messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import some_rows
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.underflow import FLOOR, TOLERANCE
from hmmlm.scan.composition import Composition, parameters_of
from hmmlm.scan.generic_filter import Run, Words
from hmmlm.scan.lattice import Lattice, Packed, SortedBatch, Stack
from hmmlm.scan.recursions import messages_back
from hmmlm.scan.steps import Steps, pass_back


class Gradient:
    """Sums of the gradients of the tensors of an HMM, by name."""

    def __init__(self, hmm: Composition) -> None:
        self.hmm = hmm
        self.totals = {
            name: torch.zeros_like(value) for name, value in parameters_of(hmm).items() if name != "log_start"
        }

    def _add(self, role: str, found: dict[str, Tensor]) -> None:
        for name, value in found.items():
            self.totals[f"{role}.{name}"] += value.to(self.hmm.dtype)

    def add_scaled(self, run: Run, lattice: Lattice, seed: Tensor, seed_score: Tensor) -> Tensor:
        """Add those of log-likelihoods and of words' scores, times seeds [B]; return those of the first step [B, K]."""
        seed = torch.where(run.total == NEG_INF, 0.0, seed)
        seed, seed_score = (each.index_fill(0, run.rows, 0.0) for each in (seed, seed_score))
        size, change = seed.abs(), list[Tensor]()
        if run.words is not None:
            change = self._add_words(lattice.batch, run.words, seed_score)
            size = size + seed_score.abs().to(size)
        # A weight is a posterior divided by a prediction, which is sure where it matters (see `generic_filter`); one
        # that is too large for that belongs to a state that the past excludes.
        most = (2 * TOLERANCE[self.hmm.dtype] / FLOOR[self.hmm.dtype] * size)[:, None]
        messages, weights = pass_back(
            run.steps,
            lattice,
            seed,
            lambda t, arrived: arrived + change[t] if change else arrived,
            lambda own: own.where((own.abs() <= most[: len(own)]) & (most[: len(own)] > 0), 0.0),
        )
        counted = Packed(lattice.batch, (size > 0)[lattice.batch.row, None])
        posteriors = lattice.filtered.map(lambda f, message, own: (f * message).where(own, 0.0), messages, counted)
        self._add_counts(self.hmm, lattice, run.steps, posteriors, weights, torch.ones_like(seed))
        return posteriors[0]

    def add_exact(self, run: Run, seed: Tensor) -> Tensor:
        """Add those of sequences in log space, times seed [m]; return those of the first step [m, K]."""
        assert run.exact is not None
        lattice, (messages, weights) = run.exact, messages_back(run.model, run.exact)
        given = Packed(lattice.batch, seed[lattice.batch.row, None])
        posteriors = lattice.filtered.map(
            lambda f, message, own: (f + message).exp().where(own != 0, 0.0) * own, messages, given
        )
        weights = weights.map(lambda weight, own: weight.where(own != 0, NEG_INF), given)
        self._add_counts(run.model, lattice, Steps(LOG, run.model.transition), posteriors, weights, seed)
        return posteriors[0]

    def _add_counts(
        self,
        hmm: Composition,
        lattice: Lattice,
        steps: Steps,
        posteriors: Packed,
        weights: Packed,
        seed: Tensor,
    ) -> None:
        """Add expected counts from posteriors [n, K], and weights y_t [n, K] with p(z_t−1, z_t | x) = f_t−1 A y_t."""
        self._add("transition", steps.gradient(lattice.pairs(lattice.filtered, weights), seed))
        for row, t, share, support in lattice.rows(posteriors):
            tokens = lattice.batch.tokens[row, t]
            known = (tokens >= 0).nonzero()[:, 0]
            self._add("emission", hmm.emission.gradient(tokens[known], share[known], some_rows(support, known)))

    def _add_words(self, batch: SortedBatch, words: Words, seed: Tensor) -> list[Tensor]:
        """Add the gradients of words' scores, times seed [B]; return those of the states before [n, K] for each step.

        log p(word | past) = log Σ_i f_i b_i of the filtered distribution f, b_i = Σ_j A_ij p(word | j). A word adds
        f_i b_i / Σ f b − f_i to the expected count of state i, which the backward pass carries further back.
        """
        count = len(words.word) // len(batch.before)
        given = seed[batch.row[batch.active[0] :]].repeat_interleave(count) / count
        weight = words.weight * given.to(words.weight)[:, None]
        row = torch.arange(len(weight), device=weight.device)
        pair = Stack(row, row, words.before, words.source), Stack(row, row, weight, words.support)
        self._add("transition", words.steps.gradient([pair], torch.ones_like(weight[:, 0])))
        self._add("emission", self.hmm.emission.gradient(words.word, words.predicted * weight, words.support))
        ahead = words.steps.backward(1, weight, words.source, words.support)
        change = ahead - (ahead * words.before).sum(1, keepdim=True)
        return list(change.unflatten(0, (-1, count)).sum(1).split(batch.active[1:]))
