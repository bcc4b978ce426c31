"""Plots of a run. Each function takes plain numbers and labels and returns a matplotlib figure; none touches files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from hmmlm.runs.progress import perplexity_text

# Okabe & Ito: distinct for color-blind readers and in grayscale.
BLUE, ORANGE, GREEN, PURPLE, GRAY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666"
MAX_PERPLEXITY = 1e100  # on an axis: near the largest float, matplotlib cannot place ticks
LABEL_GAP = 0.05  # least distance of labels beside an axis, as a fraction of its height
Series = Sequence[tuple[float, float]]


def learning_curve(train: Series, valid: Series, baselines: Mapping[str, float]) -> Figure:
    """Plot perplexity against training tokens.

    Args:
        train: (tokens, perplexity) on the training text.
        valid: (tokens, perplexity) on the validation text.
        baselines: perplexity by name, drawn as horizontal lines.
    """
    figure, axes = new_figure(7.2, 4.2)
    axes.plot(*_columns(train), color=BLUE, lw=1, alpha=0.7, label="training (running)")
    axes.plot(*_columns(valid), color=ORANGE, lw=2, marker="o", ms=4, label="validation")
    baselines = {name: value for name, value in baselines.items() if value < MAX_PERPLEXITY}
    colors = dict(zip(baselines, (GREEN, PURPLE, GRAY), strict=False))
    for name, value in baselines.items():
        axes.axhline(value, color=colors[name], ls="--", lw=1.2)
    if valid:
        best = min(valid, key=lambda point: point[1])
        axes.annotate(
            perplexity_text(best[1]),
            best,
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=ORANGE,
            fontsize=10,
            fontweight="bold",
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
        # The axis starts at the first validation check: the loss of the initial model would flatten the rest.
        low = min(p for _, p in (*train, *valid, *enumerate(baselines.values())))
        high = max(valid[0][1], *baselines.values(), low)
        axes.set_ylim(min(0.85 * low, MAX_PERPLEXITY / 10), min(1.6 * high, MAX_PERPLEXITY))
    logarithmic(axes)
    _label_lines(axes, {f"{name} {perplexity_text(p)}": (p, colors[name]) for name, p in baselines.items()})
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_xlim(left=0)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("perplexity (log scale)")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 1))
    return figure


def _label_lines(axes: Axes, lines: Mapping[str, tuple[float, str]]) -> None:
    """Label horizontal lines, label → (y, color), at the right of a logarithmic axis; move close labels apart."""
    low, high = map(math.log, axes.get_ylim())
    position = -math.inf
    for label, (y, color) in sorted(lines.items(), key=lambda line: line[1][0]):
        position = max((math.log(y) - low) / (high - low), position + LABEL_GAP)
        axes.annotate(
            label,
            (1, position),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            color=color,
            fontsize=9,
            annotation_clip=False,
        )


def learning_rate(rates: Series) -> Figure:
    """Plot (tokens, learning rate); for Baum-Welch the rate is its step size."""
    figure, axes = new_figure(7.2, 2.4)
    axes.plot(*_columns(rates), color=BLUE, lw=1.5)
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("learning rate")
    return figure


def transitions(matrix: NDArray[np.float64], labels: Sequence[str]) -> Figure:
    """Plot transition probabilities among some states.

    Args:
        matrix: [N, N] p(next state | state), row = from-state.
        labels: [N] of the states.
    """
    side = max(4.5, 0.2 * len(labels) + 2.2)
    figure, axes = new_figure(side + 1.8, side)
    # √p: most of a row's mass is in a few cells, and the others should stay visible.
    image = axes.imshow(np.sqrt(matrix), cmap="Blues", vmin=0, vmax=np.sqrt(max(matrix.max(), 1e-9)), aspect="equal")
    # parse_math=False here and below: a word such as "$x^$" is not mathtext.
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8, parse_math=False)
    axes.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
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


def posterior(probs: NDArray[np.float64], words: Sequence[str], states: Sequence[str], path: Sequence[int]) -> Figure:
    """Plot the posterior over states at each word of a text, and its Viterbi path.

    Args:
        probs: [T, N] p(state | text).
        words: [T] labels of the words.
        states: [N] labels of the states.
        path: [T] indices into `states`.
    """
    width, height = max(5.5, 0.5 * len(words) + 2.4), max(2.8, 0.24 * len(states) + 1.3)
    figure, axes = new_figure(width, height)
    image = axes.imshow(probs.T, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.plot(range(len(path)), path, color=ORANGE, lw=1.2, marker="o", ms=4, label="Viterbi path")
    axes.set_xticks(
        range(len(words)), words, rotation=45, ha="right", rotation_mode="anchor", fontsize=9, parse_math=False
    )
    axes.set_yticks(range(len(states)), states, fontsize=8, parse_math=False)
    axes.tick_params(length=0)
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    bar.set_label("p(state | sentence)")
    bar.outline.set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, fontsize=9)
    return figure


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """Return an empty figure of `width` by `height` inches, and its axes."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.grid(True, color="#e5e5e5", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    return figure, axes


def logarithmic(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers at ticks close enough to read values off."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    between = (1.5, 2.0, 3.0, 5.0, 7.0) if high < 1e4 * low else ()  # over many decades, powers of ten suffice
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, *between)))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if value < 10 else perplexity_text(value, 0))
    )
    axes.yaxis.set_minor_formatter(NullFormatter())


def short(value: float, _: int = 0) -> str:
    """Format 12,000,000 as 12M; the second argument makes this a matplotlib tick formatter."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def _columns(points: Series) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
