"""Figures of studies: every row drawn, numbers, whiskers, colors and dashes."""

import pytest
from helpers.papers_runs import DRAWN, record, results_of, rows_of

from papers.catalogue import STUDIES
from papers.drawing import bars, draw, lines
from papers.study import TEST, Bars, Lines, Study


@pytest.mark.parametrize("study", DRAWN, ids=lambda study: study.name)
def test_figures_have_every_drawn_row(study: Study) -> None:
    assert study.drawing is not None
    records = [record(row.name, 100.0) for row in study.rows]
    for run in records:
        run["metrics"][study.drawing.metric] = 100.0
    rows = rows_of(study.name, records)
    drawn = [row for row in rows if row.plan.drawn]
    figure = draw(study, {study.name: rows})
    assert figure is not None
    (axes,) = figure.axes
    if isinstance(study.drawing, Bars):
        printed = {row.plan.bar or row.name for row in drawn if study.drawing.metric in row.plan.paper}
        assert sum(len(container) for container in axes.containers) == len(drawn) + len(printed)
    else:
        assert sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() not in "x|*") == len(drawn)


def test_a_star_is_a_row_of_any_study() -> None:
    def stars(name: str, **more: str) -> list[tuple[float, float]]:
        study = STUDIES[name]
        records = {name: [record(row.name, 300.0) for row in study.rows if row.drawn]}
        for other, row in more.items():
            records.setdefault(other.replace("_", "-"), []).append(record(row, 450.0))
        figure = draw(study, results_of(records))
        assert figure is not None
        lines = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
        return [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines]

    assert stars("lee2025-figure2") == []
    assert stars("lee2025-figure2", lee2025_figure1="512 states, scalar") == [(512 + 512**2 + 512 * 32_000, 450.0)]
    assert stars("lee2025-figure11", lee2025_figure1="256 states, scalar") == []  # of another text
    assert stars("lee2025-figure11", lee2025_figure11="256 states, scalar") == [(256 + 256**2 + 256 * 32_000, 450.0)]


def test_bars_carry_their_numbers_and_whiskers() -> None:
    series = {"here": {"a": (9, 10, 12), "b": (5, 5, 5)}, "paper": {"b": (7, 7, 7)}}
    (axes,) = bars(["a", "b"], series, "perplexity").axes
    assert [text.get_text() for text in axes.texts] == ["10.0", "5.0", "7"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[9, 12]]  # one seed has none
    assert axes.get_xlim()[0] == 0 and axes.get_xlabel() == "perplexity"


def test_lines_are_sorted_by_x_with_the_values_of_the_paper() -> None:
    ticks = {2.0: "two", 4.0: "four"}
    here, there = ("here", ""), ("there", "")
    series = {here: {4.0: (1, 2, 3), 2.0: (5, 5, 5)}, there: {4.0: (7, 7, 7)}}
    (axes,) = lines(series, {here: {4.0: 2.5}}, ticks, Lines(TEST, "perplexity", "states")).axes
    ours, paper, *_ = axes.lines
    assert list(ours.get_xdata()) == [2, 4] and list(ours.get_ydata()) == [5, 2]
    assert list(paper.get_xdata()) == [4] and list(paper.get_ydata()) == [2.5]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["two", "four"]


def test_lines_name_their_slopes() -> None:
    points = {1.0: (3, 3, 3), 2.0: (12, 12, 12), 4.0: (48, 48, 48)}
    drawing = Lines(TEST, "ms", "multiple", slopes=True)
    (axes,) = lines({("states", ""): points, ("batch", ""): {1.0: (3, 3, 3)}}, {}, {1.0: "1"}, drawing).axes
    assert [line.get_label() for line in axes.lines if line.get_marker() in "os"] == ["states: slope 2.0", "batch"]
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_lines_of_a_series_share_colors_and_those_of_a_style_dashes() -> None:
    point = {1.0: (1, 1, 1), 10.0: (9, 9, 9)}
    names = [(series, style) for series in ("a", "b") for style in ("random", "pretrained")]
    drawing = Lines(TEST, "perplexity", "rate", top=5.0)
    (axes,) = lines(dict.fromkeys(names, point), {}, {1.0: "", 10.0: ""}, drawing).axes
    labels = [f"{series}, {style}" for series, style in names]
    looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines if line.get_label() in labels]
    assert looks[0][0] == looks[1][0] != looks[2][0] == looks[3][0]
    assert looks[0][1] == looks[2][1] != looks[1][1] == looks[3][1]
    assert axes.get_ylim()[1] == 5
