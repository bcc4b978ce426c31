"""Figures of the studies: bars and lines of their rows beside the numbers that the paper prints."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from hmmlm.report.plots import BLUE, GRAY, GREEN, ORANGE, PURPLE, logarithmic, new_figure
from papers.rows import MeasuredRow, Results, main_rows
from papers.study import Bars, Lines, Study

COLORS, MARKERS = (BLUE, ORANGE, GREEN, PURPLE, "#56b4e9", "#e69f00", "#000000"), "os^DvPX"
DASHES = (":", "-", "--")
PAPER_COLOR, INK = "#bbbbbb", "#222222"
OURS, PAPER = "here", "paper"
Spread = tuple[float, float, float]
"""Min, mean and max over the seeds."""
SeriesName = tuple[str, str]
"""Series and style; the style may be empty."""


def draw(study: Study, results: Results) -> Figure | None:
    """Return the figure of a study with results; None if it has no drawing or nothing to show yet."""
    rows = results[study.name]
    drawing, drawn = study.drawing, _drawn(study, rows)
    if drawing is None or not has_figure(study, rows):
        return None
    if isinstance(drawing, Bars):
        return _bars(drawing, drawn)
    figure = _lines(drawing, drawn)
    if drawing.star is not None:
        _draw_star(figure, drawing, results.get(drawing.star.study or study.name, []))
    return figure


def has_figure(study: Study, rows: Sequence[MeasuredRow]) -> bool:
    """Return whether a study has rows to draw; of lines, more than a single x."""
    least = 2 if isinstance(study.drawing, Lines) else 1
    return len({row.plan.x if least == 2 else row.name for row in _drawn(study, rows)}) >= least


def _drawn(study: Study, rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Return the rows of a figure: declared ones with a finite value."""
    if study.drawing is None:
        return []
    declared, metric = {row.name for row in study.rows}, study.drawing.metric
    finite = (row for row in main_rows(rows) if math.isfinite(row.mean(metric) or math.nan))
    return [row for row in finite if row.name in declared and row.plan.drawn]


def _bars(drawing: Bars, rows: Sequence[MeasuredRow]) -> Figure:
    series: dict[str, dict[str, Spread]] = {}
    printed: dict[str, Spread] = {}
    for row in rows:
        label = row.plan.bar or row.name
        series.setdefault(row.plan.series or OURS, {})[label] = _spread(row, drawing.metric)
        if drawing.metric in row.plan.paper:
            printed[label] = (row.plan.paper[drawing.metric],) * 3
    if printed:
        series[PAPER] = printed
    labels = list(dict.fromkeys(row.plan.bar or row.name for row in rows))
    return bars(labels, series, drawing.axis)


def _lines(drawing: Lines, rows: Sequence[MeasuredRow]) -> Figure:
    series: dict[SeriesName, dict[float, Spread]] = {}
    printed: dict[SeriesName, dict[float, float]] = {}
    ticks = {}
    for row in rows:
        name, x = (row.plan.series or OURS, row.plan.style), row.plan.x
        assert x is not None, "a Study checks that rows drawn as lines have one"
        series.setdefault(name, {})[x] = _spread(row, drawing.metric)
        ticks[x] = row.plan.tick or drawing.tick(x)
        if drawing.metric in row.plan.paper:
            printed.setdefault(name, {})[x] = row.plan.paper[drawing.metric]
    return lines(series, printed, ticks, drawing)


def _draw_star(figure: Figure, drawing: Lines, rows: Sequence[MeasuredRow]) -> None:
    """Draw the star of a figure if its row has a result; the legend names the row."""
    assert drawing.star is not None
    row = next((row for row in main_rows(rows) if row.name == drawing.star.row), None)
    if row is None or row.plan.x is None or (mean := row.mean(drawing.metric)) is None:
        return
    axes = figure.axes[0]
    axes.plot([row.plan.x], [mean], color=INK, marker="*", ms=13, ls="", label=row.name)
    _legend_above(axes, len(axes.get_legend_handles_labels()[1]))


def _spread(row: MeasuredRow, metric: str) -> Spread:
    values = row.values(metric)
    return min(values), sum(values) / len(values), max(values)


def bars(labels: Sequence[str], series: Mapping[str, Mapping[str, Spread]], axis: str) -> Figure:
    """Draw horizontal bars grouped by label, one per series; whiskers from min to max."""
    count = len(series)
    figure, axes = new_figure(7.2, 0.9 + len(labels) * (0.22 * count + 0.16))
    height = 0.8 / count
    largest = max(spread[2] for spreads in series.values() for spread in spreads.values())
    colors = cycle(COLORS)
    for place, (name, spreads) in enumerate(series.items()):
        color = PAPER_COLOR if name == PAPER else next(colors)
        at = {label: labels.index(label) + (place - (count - 1) / 2) * height for label in spreads}
        axes.barh(list(at.values()), [mean for _, mean, _ in spreads.values()], 0.92 * height, color=color, label=name)
        for label, (low, mean, high) in spreads.items():
            if low < high:
                axes.plot([low, high], [at[label]] * 2, color=INK, lw=1.2, marker="|", ms=5)
            text = f"{mean:,.0f}" if name == PAPER and mean == int(mean) else f"{mean:,.1f}"
            offset = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(text, (high, at[label]), fontsize=8, color=INK, **offset)
    axes.set_yticks(range(len(labels)), [re.sub(r"2\^(\d+)", r"$2^{\1}$", label) for label in labels], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.45, -0.55)  # the first row on top
    axes.set_xlim(0, 1.14 * largest)
    axes.grid(False, axis="y")
    axes.set_xlabel(axis)
    if count > 1:
        _legend_above(axes, count)
    return figure


def lines(
    series: Mapping[SeriesName, Mapping[float, Spread]],
    printed: Mapping[SeriesName, Mapping[float, float]],
    ticks: Mapping[float, str],
    drawing: Lines,
) -> Figure:
    """Draw one line per series over a logarithmic x; whiskers from min to max, crosses for the paper's values."""
    figure, axes = new_figure(7.2, 4.2)
    looks = dict(zip(dict.fromkeys(name for name, _ in series), zip(cycle(COLORS), cycle(MARKERS)), strict=False))
    styles = dict.fromkeys(style for _, style in series)
    dashes = dict(zip(styles, cycle(DASHES if len(styles) > 1 else "-"), strict=False))
    for (name, style), spreads in series.items():
        color, marker = looks[name]
        places = sorted(spreads)
        low, mean, high = (list(part) for part in zip(*(spreads[x] for x in places), strict=True))
        label = f"{name}, {style}" if style else name
        if drawing.slopes and len(places) > 1:
            label += f": slope {slope(places, mean):z.1f}"  # z: no sign on a zero
        axes.plot(places, mean, color=color, marker=marker, ms=5, lw=1.6, ls=dashes[style], label=label)
        axes.vlines(places, low, high, color=color, lw=1.2)
        theirs = printed.get((name, style), {})
        axes.plot(list(theirs), list(theirs.values()), color=color, marker="x", ms=8, mew=2, ls="")
        if len(series) == 1:
            _number_points(axes, spreads, theirs)
    if printed:
        axes.plot([], [], color=GRAY, marker="x", ms=8, mew=2, ls="", label=PAPER)
    axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [ticks[x] for x in sorted(ticks)])
    axes.set_xticks([], minor=True)
    axes.margins(y=0.12)
    axes.set_xlabel(drawing.x_axis)
    axes.set_ylabel(drawing.axis)
    means = [mean for spreads in series.values() for _, mean, _ in spreads.values()]
    if drawing.top is not None:
        axes.set_ylim(0.98 * min(means), drawing.top)
    elif drawing.slopes or max(means) > 3 * min(means):  # a few large values would flatten the rest
        logarithmic(axes)
    shown = len(series) + bool(printed)
    if shown > 1:
        _legend_above(axes, 2 if len(styles) > 1 else shown)
    return figure


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of a line through the logarithms of points, by least squares."""
    return statistics.linear_regression([math.log(value) for value in x], [math.log(value) for value in y]).slope


def _number_points(axes: Any, spreads: Mapping[float, Spread], printed: Mapping[float, float]) -> None:
    """Write means at the points of a line, on the side where neither the line nor the paper's value is."""
    places = sorted(spreads)
    for place, x in enumerate(places):
        low, mean, high = spreads[x]
        beside = [spreads[other][1] for other in (*places[max(place - 1, 0) : place], *places[place + 1 : place + 2])]
        below = printed[x] > mean if x in printed else bool(beside) and sum(beside) / len(beside) > mean
        offset = {"xytext": (0, -7 if below else 7), "textcoords": "offset points", "ha": "center"}
        outline = [withStroke(linewidth=3, foreground="white")]
        where = {**offset, "va": "top" if below else "bottom", "path_effects": outline}
        axes.annotate(f"{mean:,.1f}", (x, low if below else high), fontsize=8, color=INK, **where)


def _legend_above(axes: Any, columns: int) -> None:
    longest = max(map(len, axes.get_legend_handles_labels()[1]))
    fit = max(1, 110 // (longest + 8))  # about as many characters fit side by side
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(columns, 4, fit), fontsize=9)
