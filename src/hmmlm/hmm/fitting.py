"""Fitting to sequences, with the names of hmmlearn: expectation maximization, scores, states, information criteria."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hmmlm.checks import ArrayLike, as_batch, as_tensor, check_batch, check_count, check_number
from hmmlm.emissions import Emission
from hmmlm.errors import InputError
from hmmlm.hmm.labels import labels_as_rows
from hmmlm.hmm.queries import Queries
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.ops.pieces import at_once
from hmmlm.scan.composition import with_parts
from hmmlm.transitions import Dense, Transition

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
        pseudocount: float | Mapping[str, float] = 0.0,
        labels: ArrayLike | None = None,
        allowed_transitions: ArrayLike | None = None,
    ) -> Self:
        """Return the model after expectation maximization (Baum-Welch) on all sequences; this one stays unchanged.

        Every iteration raises the likelihood, unless there are pseudocounts. It stops after `iterations`, or when the
        log-likelihood per token rises by less than `tolerance`. For a corpus, use `hmmlm.train`.

        Args:
            pseudocount: added to every expected count, or one for each of "start", "transition" and "emission".
            labels: what is known about states, as in `log_likelihood`; one after another, [N] or [N, Z], if tokens are.
            allowed_transitions: [Z, Z] bool, of a dense transition; the others have probability zero.
        """
        check_count("iterations", iterations, 1)
        check_number("tolerance", tolerance)
        added = _each_table(pseudocount)
        checked, sizes, inside = self._batch(tokens, lengths)
        known = None if labels is None else labels_as_rows(labels, checked, sizes if inside is not None else None)
        total = int(checked.numel() if sizes is None else sizes.sum())
        rows = at_once(checked.shape[1] * self.num_states, 2**25)
        pieces = [
            (
                checked[i : i + rows],
                None if sizes is None else sizes[i : i + rows],
                None if known is None else known[i : i + rows],
            )
            for i in range(0, len(checked), rows)
        ]
        model, before = self.detach(), NEG_INF
        if allowed_transitions is not None:
            model = _restrict(model, allowed_transitions)
        for _ in range(iterations):
            counts = [model.expected_counts(*piece) for piece in pieces]
            start, transition, emission, log_likelihood = map(_add_up, zip(*counts, strict=True))
            if float(log_likelihood) == NEG_INF:
                model._given(known, checked, sizes, Queries._possible)  # names the impossible token
            if float(log_likelihood) - before < tolerance * total:
                break
            before = float(log_likelihood)
            model = with_parts(
                model,
                maximize_rows(start, model.log_start, added["start"]),
                model.transition.maximize(_by_name(transition, model.transition), added["transition"]),
                model.emission.maximize(_by_name(emission, model.emission), added["emission"]),
            )
            if allowed_transitions is not None:
                model = _restrict(model, allowed_transitions)
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


def _each_table(pseudocount: float | Mapping[str, float]) -> dict[str, float]:
    """Return the pseudocount of each table, 0 for those that are left out."""
    names = ("start", "transition", "emission")
    if not isinstance(pseudocount, Mapping):
        check_number("pseudocount", pseudocount)
        return dict.fromkeys(names, pseudocount)
    given = dict(pseudocount)
    if not given.keys() <= set(names):
        raise InputError(f"pseudocount is for {', '.join(names)}, not for {', '.join(map(str, given.keys() - names))}")
    for name, value in given.items():
        check_number(f"pseudocount of {name}", value)
    return {name: given.get(name, 0.0) for name in names}


def _restrict(model: Self, allowed: ArrayLike) -> Self:
    """Return the model without the transitions that are not allowed [Z, Z], the others in proportion."""
    given = as_tensor(allowed, "allowed_transitions").to(model.device)
    if not isinstance(model.transition, Dense):
        raise InputError(f"allowed_transitions needs a dense transition, not a {model.transition.kind} one")
    if given.dtype != torch.bool or given.shape != model.transition.log_probs.shape:
        raise InputError(f"allowed_transitions must be booleans {list(model.transition.log_probs.shape)}")
    kept = model.transition.log_probs.masked_fill(~given, NEG_INF)
    lost = (kept.amax(1) == NEG_INF).nonzero().flatten()
    if len(lost):
        raise InputError(
            f"allowed_transitions leaves state {int(lost[0])} without a transition of positive probability"
        )
    return with_parts(model, model.log_start, Dense(kept.log_softmax(1)), model.emission)


def _by_name(counts: Any, part: Transition | Emission) -> dict[str, Tensor]:
    """Return the counts of each tensor of a transition or emission."""
    return counts if isinstance(counts, dict) else {next(iter(part.parameters())): counts}


def _add_up(counts: Sequence[Any]) -> Any:
    if isinstance(counts[0], dict):
        return {name: _add_up([each[name] for each in counts]) for name in counts[0]}
    return sum(counts[1:], counts[0])
