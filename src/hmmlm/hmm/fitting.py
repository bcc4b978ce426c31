"""Fitting to sequences, with the names of hmmlearn: expectation maximization, scores, states, information criteria."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hmmlm.checks import ArrayLike, as_batch, check_batch, check_count, check_number
from hmmlm.emissions import Emission
from hmmlm.hmm.queries import Queries
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.ops.pieces import at_once
from hmmlm.scan.composition import with_parts
from hmmlm.transitions import Transition

Self = TypeVar("Self", bound="Fitting")


class Fitting(Queries):
    """What hmmlearn offers, under its names.

    Sequences are what every query takes, or as in hmmlearn one sequence after another, [N] or [N, 1], with lengths that
    sum to N; an array of one dimension or column without lengths is one sequence.
    """

    def fit(
        self: Self,
        tokens: ArrayLike,
        lengths: ArrayLike | None = None,
        iterations: int = 100,
        tolerance: float = 1e-4,
        pseudocount: float = 0.0,
    ) -> Self:
        """Return the model after expectation maximization (Baum-Welch) on all sequences; this one stays unchanged.

        Every iteration raises the likelihood, unless there are pseudocounts. It stops after `iterations`, or when the
        log-likelihood per token rises by less than `tolerance`. For a corpus, use `hmmlm.train`.

        Args:
            pseudocount: added to every expected count.
        """
        check_count("iterations", iterations, 1)
        check_number("tolerance", tolerance)
        check_number("pseudocount", pseudocount)
        checked, sizes, _ = self._batch(tokens, lengths)
        total = int(checked.numel() if sizes is None else sizes.sum())
        rows = at_once(checked.shape[1] * self.num_states, 2**25)
        pieces = [
            (checked[i : i + rows], None if sizes is None else sizes[i : i + rows])
            for i in range(0, len(checked), rows)
        ]
        model, before = self.detach(), NEG_INF
        for _ in range(iterations):
            counts = [model.expected_counts(*piece) for piece in pieces]
            start, transition, emission, log_likelihood = map(_add_up, zip(*counts, strict=True))
            if float(log_likelihood) == NEG_INF:
                model._possible(checked, sizes)  # names the impossible token
            if float(log_likelihood) - before < tolerance * total:
                break
            before = float(log_likelihood)
            model = with_parts(
                model,
                maximize_rows(start, model.log_start, pseudocount),
                model.transition.maximize(_by_name(transition, model.transition), pseudocount),
                model.emission.maximize(_by_name(emission, model.emission), pseudocount),
            )
        return model

    def score(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> float:
        """Compute the log-likelihood of all sequences together, natural log."""
        checked, sizes, _ = self._batch(tokens, lengths)
        with torch.no_grad():
            return float(self.log_likelihood(checked, sizes).double().sum())

    def predict(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Find the most likely states as `viterbi` does: [B, T], or [N] of sequences one after another."""
        checked, sizes, inside = self._batch(tokens, lengths)
        states = self.viterbi(checked, sizes)[0]
        return states if inside is None else states[inside]

    def predict_proba(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute p(z_t | x) as `posterior` does: [B, T, Z], or [N, Z] of sequences one after another."""
        checked, sizes, inside = self._batch(tokens, lengths)
        probs = self.posterior(checked, sizes)
        return probs if inside is None else probs[inside]

    @property
    def num_parameters(self) -> int:
        """The number of free parameters: a distribution has one less than entries."""
        return self.num_states - 1 + self.transition.num_parameters + self.emission.num_parameters

    def aic(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> float:
        """Compute Akaike's information criterion, 2 · parameters − 2 · log-likelihood; less is better."""
        return 2 * self.num_parameters - 2 * self.score(tokens, lengths)

    def bic(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> float:
        """Compute the Bayesian information criterion, parameters · log(tokens) − 2 · log-likelihood; less is better."""
        checked, sizes, _ = self._batch(tokens, lengths)
        total = math.log(checked.numel() if sizes is None else int(sizes.sum()))
        return self.num_parameters * total - 2 * self.score(checked, sizes)

    def _batch(self, tokens: ArrayLike, lengths: ArrayLike | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return tokens [B, T], lengths [B], and a mask [B, T] of the tokens if they were one after another."""
        given, own, joined = as_batch(tokens, lengths)
        checked, sizes = check_batch(given, own, self.vocab_size, self.device)
        steps = torch.arange(checked.shape[1], device=self.device)
        return checked, sizes, steps < sizes[:, None] if joined and sizes is not None else None


def _by_name(counts: Any, part: Transition | Emission) -> dict[str, Tensor]:
    """Return the counts of each tensor of a transition or emission."""
    return counts if isinstance(counts, dict) else {next(iter(part.parameters())): counts}


def _add_up(counts: Sequence[Any]) -> Any:
    if isinstance(counts[0], dict):
        return {name: _add_up([each[name] for each in counts]) for name in counts[0]}
    return sum(counts[1:], counts[0])
