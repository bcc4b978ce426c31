"""Progress: plain lines, the live display, and perplexities as text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hmmlm.runs import progress as progress_module
from hmmlm.runs.progress import LineProgress, LiveProgress, perplexity_text


def test_plain_lines_show_amount_speed_and_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    progress = LineProgress()
    with progress.phase("train", 4000, done=1000) as phase:
        now += 2.0
        phase.advance(500, loss="5.0")
        now += 28.0
        phase.advance(1000, loss="4.5")
        now += 4.0
        phase.advance(0)
        with progress.phase("valid", 10):
            pass
    progress.note("a line")
    lines = capsys.readouterr().out.splitlines()
    # 250, then 36 tokens a second: no estimate yet.
    assert lines[0] == "train: 2,500 of 4,000 tokens, 50 tokens/s, loss 4.5"
    assert [line.split(":")[0] for line in lines] == ["train", "train", "a line"]


def test_the_time_of_a_phase_is_shown_once_its_rate_is_steady(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step, which compiles, says nothing about the others."""
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    with LineProgress().phase("train", 4000) as phase:
        now += 4.0
        phase.advance(40)
        assert capsys.readouterr().out == "train: 40 of 4,000 tokens, 10 tokens/s\n"
        now += 8.0
        phase.advance(720)
        now += 8.0
        phase.advance(800)
        assert capsys.readouterr().out == "train: 1,560 of 4,000 tokens, 78 tokens/s, 0:26 left\n"


def test_a_phase_without_any_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress()
    with progress.phase("tokenizer", unit="lines"):
        pass
    with progress.phase("encoding", unit="documents") as phase:
        phase.advance(3)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["encoding: 3 documents"]


def test_live_display_shows_phase_and_figures() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    progress = LiveProgress(console)
    with progress.phase("train", 100) as phase:
        phase.advance(50, loss="4.50")
        with progress.phase("valid", 10) as inner:
            inner.advance(5)
            progress.note("valid perplexity 12.0")
            progress.display.refresh()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(text in shown for text in ("train", "valid", "loss 4.50", "valid perplexity 12.0"))


def test_perplexities_as_text() -> None:
    values = (12.34, 1234.56, 9_999_999.0, 1e7, 1.26e54, float("inf"), float("nan"))
    shown = ["12.3", "1,234.6", "9,999,999.0", "1.0e7", "1.3e54", "inf", "nan"]
    assert [perplexity_text(value) for value in values] == shown
    assert perplexity_text(2.345, 2) == "2.35" and perplexity_text(1234.5, 0) == "1,234"
