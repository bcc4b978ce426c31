"""Figures of the studies: bars and lines of their rows, the paper's printed figures beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from hmmlm.experiments.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, logarithmic, new_figure, short
from hmmlm.experiments.summary import Row, main_rows

COLOURS, MARKERS = (BLUE, ORANGE, GREEN, PURPLE, "#56b4e9", "#e69f00", "#000000"), "os^DvPX"
DASHES = (":", "-", "--")
PAPER_COLOUR, INK = "#bbbbbb", "#222222"
OURS, PAPER = "here", "the paper"
Spread = tuple[float, float, float]
"""Least, mean and largest over the seeds."""


@dataclass(frozen=True)
class Drawing:
    """How the rows of a study become a figure: their names say which label or x and which series they are."""

    pattern: str
    """Of the names of rows, with groups `label` (bars) or `x` (lines) and perhaps `series`; others are left out."""
    axis: str = ""
    """What x is; bars have none."""
    tick: Callable[[float], str] = "{:,.0f}".format
    """An x as text."""
    placed: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Where rows whose name has no number stand, and what is written there."""
    ours: str = OURS
    """What the rows without a series are called."""
    paired: bool = False
    """Whether series are named “what, which”: what has a colour then, and which a dash."""
    top: float | None = None
    """Where the axis of perplexities ends; lines may leave it."""


def _power(value: float) -> str:
    return f"$2^{{{math.log2(value):.0f}}}$"


def _plainly(value: float) -> str:
    return f"{value:.6f}".rstrip("0")


def _decade(value: float) -> str:
    power = math.log10(value)
    return f"$10^{{{power:.0f}}}$" if math.isclose(power, round(power)) else ""


_X = r"(?P<x>2\^\d+|\d+(?:\.\d+)?(?:e-\d+|M)?)"
_EVERY_ROW = Drawing("(?P<label>.*)")
_CHIU_ROWS = Drawing("PTB, (?P<label>.*)")
_CAPACITY = Drawing(rf"\d+ states, (?P<series>.*), {_X} parameters", "parameters of the network", _power)
DRAWINGS = {
    "chiu2020-table3": _CHIU_ROWS, "chiu2020-table4": _CHIU_ROWS,
    "chiu2020-table4-no-decay": _CHIU_ROWS, "chiu2020-table4-released": _CHIU_ROWS,
    "chiu2020-figure3": Drawing(
        f"PTB, {_X} states(?:, (?P<series>.*))?", "states", _power, ours="half of the states dropped"
    ),
    "chiu2020-figure4": Drawing(f"PTB, {_X} blocks, (?P<series>.*)", "blocks"),
    "lee2025-table1": _EVERY_ROW, "lee2025-table2": _EVERY_ROW, "lee2025-table3": _EVERY_ROW,
    "lee2025-tuned": Drawing(r"(?P<series>\d+ states), (?P<label>.*)"),
    "lee2025-figure1": Drawing(f"{_X} states, (?P<series>.*)", "states"),
    "lee2025-figure2": _CAPACITY, "lee2025-figure11": _CAPACITY, "lee2025-figure12": _CAPACITY,
    "lee2025-figure3": _EVERY_ROW,
    "lee2025-figure4": Drawing("(?P<label>.*?), (?P<series>no LVD|LVD)"),
    "lee2025-figure5": Drawing("LVD, (?P<label>.*)"),
    "lee2025-figure5-cpu": Drawing(f"(?P<series>.*), rate {_X}", "peak learning rate", _plainly),
    "lee2025-figure6": Drawing(f"(?P<series>random|pretrained(?: body)?), rate {_X}", "peak learning rate", _plainly),
    "lee2025-apart": Drawing(
        f"(?P<series>.*, (?:random|pretrained(?: as it comes)?)), rate {_X}", "peak learning rate", _decade,
        paired=True, top=340,
    ),
    "lee2025-table4-cpu": Drawing(
        f"stories15M, (?P<series>.*), rate {_X}", "peak learning rate", _plainly, top=330
    ),
    "lee2025-figure7": Drawing("(?P<label>.*), (?P<series>random|pretrained(?: body)?)"),
    "lee2025-figure8": Drawing(
        f"LVD for {_X} tokens", "tokens of latent variable distillation", short,
        {"no LVD": (2e4, "0"), "LVD to the end": (5e8, "all")},
    ),
    "lee2025-table4": _EVERY_ROW,
}  # fmt: skip


def draw(study: str, rows: Sequence[Row]) -> Figure | None:
    """The figure of a study; none where it has none or nothing to show."""
    if study not in DRAWINGS:
        return None
    drawing = DRAWINGS[study]
    # each paper prints one of them for nearly all it measures
    chiu = study.startswith("chiu2020")
    split, what = ("valid", "validation perplexity, PTB") if chiu else ("test", "test perplexity")
    metric, unit = f"{split}_perplexity", f"{what} (lower is better)"
    points: list[tuple[str, str, Row]] = []  # label or x, series, row
    for row in main_rows(rows):
        match = re.fullmatch(drawing.pattern, row.name)
        if row.name in drawing.placed:
            points.append((row.name, "", row))
        elif match:
            points.append((match.groupdict().get("label") or match["x"], match.groupdict().get("series") or "", row))
    points = [point for point in points if (mean := point[2].mean(metric)) is not None and math.isfinite(mean)]
    if not points:
        return None
    if drawing.axis:
        return _lines(drawing, points, metric, unit)
    series: dict[str, dict[str, Spread]] = {}
    for label, name, row in points:
        series.setdefault(name or drawing.ours, {})[label] = _spread(row, metric)
    printed = {label: (row.paper[metric],) * 3 for label, _, row in points if metric in row.paper}
    if printed:
        series[PAPER] = printed
    return bars(list(dict.fromkeys(label for label, _, _ in points)), series, unit)


def _lines(drawing: Drawing, points: Sequence[tuple[str, str, Row]], metric: str, unit: str) -> Figure | None:
    """None where there is one point so far: that is no line."""
    series: dict[str, dict[float, Spread]] = {}
    printed: dict[str, dict[float, float]] = {}
    ticks = {}
    for text, name, row in points:
        x, tick = drawing.placed.get(text) or (number(text), drawing.tick(number(text)))
        series.setdefault(name or drawing.ours, {})[x] = _spread(row, metric)
        ticks[x] = tick
        if metric in row.paper:
            printed.setdefault(name or drawing.ours, {})[x] = row.paper[metric]
    if len(ticks) == 1:
        return None
    return lines(series, printed, ticks, drawing.axis, unit, drawing.paired, drawing.top)


def _spread(row: Row, metric: str) -> Spread:
    values = row.values(metric)
    return min(values), sum(values) / len(values), max(values)


def number(text: str) -> float:
    """2^14, 0.1M or any plain number."""
    if text.startswith("2^"):
        return 2.0 ** float(text[2:])
    return 1e6 * float(text[:-1]) if text.endswith("M") else float(text)


def bars(labels: Sequence[str], series: Mapping[str, Mapping[str, Spread]], unit: str) -> Figure:
    """Horizontal bars, a group a label and a bar a series that has it; whiskers from least to largest."""
    count = len(series)
    figure, axes = new_figure(7.2, 0.9 + len(labels) * (0.22 * count + 0.16))
    height = 0.8 / count
    largest = max(spread[2] for spreads in series.values() for spread in spreads.values())
    colours = cycle(COLOURS)
    for place, (name, spreads) in enumerate(series.items()):
        colour = PAPER_COLOUR if name == PAPER else next(colours)
        at = {label: labels.index(label) + (place - (count - 1) / 2) * height for label in spreads}
        axes.barh(list(at.values()), [mean for _, mean, _ in spreads.values()], 0.92 * height, color=colour, label=name)
        for label, (low, mean, high) in spreads.items():
            if low < high:
                axes.plot([low, high], [at[label]] * 2, color=INK, lw=1.2, marker="|", ms=5)
            axes.annotate(
                f"{mean:,.0f}" if name == PAPER and mean == int(mean) else f"{mean:,.1f}", (high, at[label]),
                xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK,
            )  # fmt: skip
    axes.set_yticks(range(len(labels)), [re.sub(r"2\^(\d+)", r"$2^{\1}$", label) for label in labels], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.45, -0.55)  # the first row on top
    axes.set_xlim(0, 1.14 * largest)
    axes.grid(False, axis="y")
    axes.set_xlabel(unit)
    if count > 1:
        _legend_above(axes, count)
    return figure


def lines(
    series: Mapping[str, Mapping[float, Spread]], printed: Mapping[str, Mapping[float, float]],
    ticks: Mapping[float, str], axis: str, unit: str, paired: bool = False,
    top: float | None = None,
) -> Figure:  # fmt: skip
    """A line a series over a logarithmic x, whiskers from least to largest, crosses for what the paper prints of it."""
    figure, axes = new_figure(7.2, 4.2)
    styles = _styles(series, paired)
    for name, spreads in series.items():
        colour, marker, dash = styles[name]
        places = sorted(spreads)
        low, mean, high = (list(part) for part in zip(*(spreads[x] for x in places), strict=True))
        axes.plot(places, mean, color=colour, marker=marker, ms=5, lw=1.6, ls=dash, label=name)
        axes.vlines(places, low, high, color=colour, lw=1.2)
        theirs = printed.get(name, {})
        axes.plot(list(theirs), list(theirs.values()), color=colour, marker="x", ms=8, mew=2, ls="")
        if len(series) == 1:
            _number_points(axes, spreads, theirs)
    if printed:
        axes.plot([], [], color=GREY, marker="x", ms=8, mew=2, ls="", label=PAPER)
    axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [ticks[x] for x in sorted(ticks)])
    axes.set_xticks([], minor=True)
    axes.margins(y=0.12)
    axes.set_xlabel(axis)
    axes.set_ylabel(unit)
    means = [mean for spreads in series.values() for _, mean, _ in spreads.values()]
    if top is not None:
        axes.set_ylim(0.98 * min(means), top)
    elif max(means) > 3 * min(means):  # else the few largest would flatten what matters
        logarithmic(axes)
    shown = len(series) + bool(printed)
    if shown > 1:
        _legend_above(axes, 2 if paired else shown)
    return figure


def _styles(names: Iterable[str], paired: bool) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and dash of each series."""
    parts = {name: name.split(", ", 1) if paired else [name, ""] for name in names}
    looks = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    look = dict(zip(dict.fromkeys(what for what, _ in parts.values()), looks, strict=False))
    dashes = cycle(DASHES if paired else "-")
    dash = dict(zip(dict.fromkeys(which for _, which in parts.values()), dashes, strict=False))
    return {name: (*look[what], dash[which]) for name, (what, which) in parts.items()}


def _number_points(axes: Any, spreads: Mapping[float, Spread], printed: Mapping[float, float]) -> None:
    """Means at the points of a line, on the side where neither the line nor the paper's figure is."""
    places = sorted(spreads)
    for place, x in enumerate(places):
        low, mean, high = spreads[x]
        beside = [spreads[other][1] for other in (*places[max(place - 1, 0) : place], *places[place + 1 : place + 2])]
        below = printed[x] > mean if x in printed else bool(beside) and sum(beside) / len(beside) > mean
        axes.annotate(
            f"{mean:,.1f}", (x, low if below else high), xytext=(0, -7 if below else 7), textcoords="offset points",
            ha="center", va="top" if below else "bottom", fontsize=8, color=INK,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def _legend_above(axes: Any, columns: int) -> None:
    longest = max(map(len, axes.get_legend_handles_labels()[1]))
    fit = max(1, 110 // (longest + 8))  # about as many letters stand side by side
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(columns, 4, fit), fontsize=9)
