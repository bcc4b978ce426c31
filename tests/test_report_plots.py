"""Plots of a run."""

import warnings
from io import BytesIO

import numpy as np
import pytest
from matplotlib.figure import Figure

from hmmlm.report import plots


def draw(figure: Figure) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as a layout that does not fit
        figure.savefig(BytesIO(), format="png")


def test_plots_of_a_run_that_has_hardly_begun() -> None:
    empty = plots.learning_curve([], [], {"unigram": 300.0})
    assert empty.axes[0].get_ylabel().startswith("perplexity")
    one = plots.learning_curve([(10, 500.0)], [(10, 400.0)], {"unigram": 300.0, "bigram": 100.0})
    low, high = one.axes[0].get_ylim()
    assert low < 100 < 400 < high
    grid = plots.transitions(np.ones((1, 1)), ["0 the"])
    assert [tick.get_text() for tick in grid.axes[0].get_xticklabels()] == ["0 the"]
    for figure in (empty, one, grid, plots.learning_rate([])):
        draw(figure)


@pytest.mark.parametrize("value", [1.3e54, 1e304, float("inf")])
def test_huge_perplexities_can_be_drawn(value: float) -> None:
    valid = [(1000.0, min(value, 1e304)), (2000.0, 300.0)]
    figure = plots.learning_curve(valid, valid, {"unigram": 500.0, "bigram": value})
    draw(figure)
    axes = figure.axes[0]
    shown = [text.get_text() for text in (*axes.texts, *axes.get_yticklabels())]
    assert shown and max(map(len, shown)) < 20


@pytest.mark.parametrize("word", ["$x^$", r"$\frac{$", "$", "a$b$c", "\\alpha", "%", "_^{}"])
def test_words_are_not_parsed_as_mathtext(word: str) -> None:
    """`$x^$` is a syntax error of mathtext, and `a$b$c` would lose its dollars."""
    figures = (
        plots.transitions(np.full((2, 2), 0.5), [word, "the"]),
        plots.posterior(np.full((2, 2), 0.5), [word, "the"], [word, "the"], [0, 1]),
    )
    for figure in figures:
        draw(figure)
        for labels in (figure.axes[0].get_xticklabels(), figure.axes[0].get_yticklabels()):
            assert labels[0].get_text() == word
            assert not labels[0].get_parse_math()


def test_labels_of_close_baselines_do_not_overlap() -> None:
    valid = [(1.0, 400.0), (2.0, 120.0)]
    figure = plots.learning_curve([], valid, {"unigram": 101.0, "bigram": 100.0, "5-gram": 100.0})
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if "gram" in text.get_text()]
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (999, "999"), (12_000, "12k"), (2.5e6, "2.5M"), (3e9, "3B")])
def test_short_numbers(value: float, text: str) -> None:
    assert plots.short(value) == text
