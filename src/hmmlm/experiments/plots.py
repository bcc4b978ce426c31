"""Figures of a run. Each function takes plain numbers and returns a matplotlib figure; nothing here knows of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from hmmlm.learning.progress import perplexity_text

# Okabe & Ito: told apart by colour-blind readers and in grey.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666"
LARGEST = 1e100  # perplexity on an axis: near the largest float, ticks cannot be computed
Series = Sequence[tuple[float, float]]


def learning_curve(train: Series, valid: Series, baselines: Mapping[str, float]) -> Figure:
    """Perplexity against training tokens; baselines as horizontal lines. Series are (tokens, perplexity)."""
    figure, axes = new_figure(7.2, 4.2)
    axes.plot(*_columns(train), color=BLUE, lw=1, alpha=0.7, label="training (running)")
    axes.plot(*_columns(valid), color=ORANGE, lw=2, marker="o", ms=4, label="validation")
    baselines = {name: value for name, value in baselines.items() if value < LARGEST}
    for (name, value), colour in zip(baselines.items(), (GREEN, PURPLE, GREY), strict=False):
        axes.axhline(value, color=colour, ls="--", lw=1.2)
        axes.annotate(
            f"{name} {perplexity_text(value, 0)}", (1, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", ha="left", va="center", color=colour, fontsize=9, annotation_clip=False,
        )  # fmt: skip
    if valid:
        best = min(valid, key=lambda point: point[1])
        axes.annotate(
            perplexity_text(best[1], 0), best, xytext=(0, 8), textcoords="offset points", ha="center", va="bottom",
            color=ORANGE, fontsize=10, fontweight="bold",
        )  # fmt: skip
        # The first readings, of a random model, would flatten everything that matters.
        low = min(p for _, p in (*train, *valid, *enumerate(baselines.values())))
        high = max(valid[0][1], *baselines.values(), low)
        axes.set_ylim(min(0.85 * low, LARGEST / 10), min(1.6 * high, LARGEST))
    logarithmic(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_xlim(left=0)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("perplexity (log scale)")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 1))
    return figure


def logarithmic(axes: Axes) -> None:
    """A logarithmic y with plain numbers, close enough to read off it."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    between = (1.5, 2.0, 3.0, 5.0, 7.0) if high < 1e4 * low else ()  # over many decades, powers of ten say enough
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, *between)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: perplexity_text(value, 0)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def learning_rate(rates: Series) -> Figure:
    """Rate (or step of Baum-Welch) against training tokens."""
    figure, axes = new_figure(7.2, 2.4)
    axes.plot(*_columns(rates), color=BLUE, lw=1.5)
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("learning rate")
    return figure


def transitions(matrix: NDArray[np.float64], labels: Sequence[str]) -> Figure:
    """p(next state | state) among some states, [N,N], row = from-state; a label each."""
    side = max(4.5, 0.2 * len(labels) + 2.2)
    figure, axes = new_figure(side + 1.8, side)
    # √: most of a row's mass is in a few cells, and the rest should not vanish
    image = axes.imshow(np.sqrt(matrix), cmap="Blues", vmin=0, vmax=np.sqrt(max(matrix.max(), 1e-9)), aspect="equal")
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel("to state")
    axes.set_ylabel("from state")
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.035, pad=0.02)
    ticks = np.array([p for p in (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if p <= matrix.max()])
    bar.set_ticks(list(np.sqrt(ticks)), labels=[f"{p:g}" for p in ticks])
    bar.set_label("transition probability")
    bar.outline.set_visible(False)
    return figure


def posterior(
    probs: NDArray[np.float64], words: Sequence[str], states: Sequence[str], path: Sequence[int | None]
) -> Figure:
    """p(state | sentence) at each word, [T,N] over the states that matter; `path`: row of its Viterbi state."""
    width, height = max(5.5, 0.5 * len(words) + 2.4), max(2.8, 0.24 * len(states) + 1.3)
    figure, axes = new_figure(width, height)
    image = axes.imshow(probs.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    points = [(t, row) for t, row in enumerate(path) if row is not None]
    axes.plot(*_columns(points), color=ORANGE, lw=1.2, marker="o", ms=4, label="Viterbi path")
    axes.set_xticks(range(len(words)), words, rotation=45, ha="right", rotation_mode="anchor", fontsize=9)
    axes.set_yticks(range(len(states)), states, fontsize=8)
    axes.tick_params(length=0)
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    bar.set_label("p(state | sentence)")
    bar.outline.set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, fontsize=9)
    return figure


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """An empty figure of so many inches, and its axes."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.grid(True, color="#e5e5e5", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    return figure, axes


def _columns(points: Series) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def short(value: float, _: int = 0) -> str:
    """12,000,000 as 12M."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"
