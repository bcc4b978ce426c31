"""The numbers of states that `HMM.choose` compares, as a table and a plot."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hmmlm.hmm.fitting import Fitting

Rows = tuple[Tensor, Tensor | None]
"""Tokens [B, T] and lengths [B]."""


class Candidate(NamedTuple):
    """A model and its figures, on the sequences that it was fitted to unless stated."""

    model: Any
    num_parameters: int
    tokens: int
    log_likelihood: float
    aic: float
    bic: float
    held_out: float
    """The log-likelihood per token of the held-out sequences; NaN if there are none."""

    @staticmethod
    def of(model: Fitting, fitted: Rows, held_out: Rows) -> Candidate:
        """Return a model with its figures."""
        tokens, unseen = (rows.numel() if sizes is None else int(sizes.sum()) for rows, sizes in (fitted, held_out))
        score = model.score(*held_out) / unseen if unseen else float("nan")
        figures = model.score(*fitted), model.aic(*fitted), model.bic(*fitted)
        return Candidate(model, model.num_parameters, tokens, *figures, score)


class Selection(NamedTuple):
    """The result of `HMM.choose`: the model of the number of states that was chosen, and what it was chosen from."""

    best: Any
    """The model, fitted to all sequences."""
    candidates: list[Candidate]

    def __repr__(self) -> str:
        """Return a table, with a star at the number of states that was chosen."""
        rows: list[tuple[str, ...]] = [("states", "parameters", "log-likelihood", "AIC", "BIC", "held-out per token")]
        for model, parameters, _, *figures, held_out in self.candidates:
            name = f"{model.num_states}{'*' if model.num_states == self.best.num_states else ''}"
            rows.append((name, str(parameters), *(f"{figure:,.1f}" for figure in figures), f"{held_out:.4f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)

    def plot(self) -> Any:
        """Return a figure of AIC, BIC and held-out likelihood by the number of states, all in nats per token."""
        from matplotlib.figure import Figure

        states = [each.model.num_states for each in self.candidates]
        curves = {
            "AIC / 2": [each.aic / (2 * each.tokens) for each in self.candidates],
            "BIC / 2": [each.bic / (2 * each.tokens) for each in self.candidates],
            "held-out −log p": [-each.held_out for each in self.candidates],
        }
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        for name, values in curves.items():
            axes.plot(states, values, marker="o", label=name)
        axes.axvline(self.best.num_states, color="gray", linestyle=":", label="chosen")
        axes.set(xlabel="states", ylabel="nats per token (less is better)", xticks=states)
        axes.legend(frameon=False)
        return figure
