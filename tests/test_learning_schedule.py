"""Schedules by their exact values; history and progress."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hmmlm.errors import InputError
from hmmlm.learning import progress as progress_module
from hmmlm.learning.config import ScheduleConfig
from hmmlm.learning.history import History, read_history
from hmmlm.learning.progress import LineProgress, LiveProgress
from hmmlm.learning.schedule import Plateau, rate_factor


def test_constant_with_and_without_warmup() -> None:
    assert rate_factor(ScheduleConfig(), 1, 100) == 1.0
    config = ScheduleConfig(warmup_tokens=40)
    assert [rate_factor(config, tokens, 100) for tokens in (10, 20, 40, 41, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_cosine_values() -> None:
    config = ScheduleConfig(kind="cosine", warmup_fraction=0.2, final_fraction=0.1)
    expected = {100: 0.5, 200: 1.0, 400: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 600: 0.55, 1000: 0.1, 1200: 0.1}
    for tokens, factor in expected.items():
        assert rate_factor(config, tokens, 1000) == pytest.approx(factor, abs=1e-12)


def test_warmup_longer_than_the_run_never_divides_by_zero() -> None:
    config = ScheduleConfig(kind="cosine", warmup_tokens=100)
    assert rate_factor(config, 100, 100) == 1.0
    assert rate_factor(config, 50, 80) == 0.5


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_cosine_stays_within_its_bounds_and_falls(tokens: int, total: int, warmup: float, final: float) -> None:
    config = ScheduleConfig(kind="cosine", warmup_fraction=warmup, final_fraction=final)
    here, later = rate_factor(config, tokens, total), rate_factor(config, tokens + 1, total)
    assert 0 < here <= 1 + 1e-12 or final == 0
    if tokens >= warmup * total:
        assert final - 1e-12 <= later <= here + 1e-12


def test_plateau_divides_after_patience_checks_without_a_best() -> None:
    plateau = Plateau(ScheduleConfig(kind="plateau", factor=4, patience=2))
    factors = []
    for loss in (3.0, 2.0, 2.0, 2.5, 1.9, 1.9, 1.9, 1.9, 1.9):
        plateau.check(loss)
        factors.append(plateau.factor)
    assert factors == [1, 1, 1, 1 / 4, 1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64]


def test_other_kinds_never_divide() -> None:
    plateau = Plateau(ScheduleConfig(patience=1))
    for _ in range(5):
        plateau.check(1.0)
    assert plateau.factor == 1.0


@pytest.mark.parametrize("losses", [[], [math.inf], [2.0, 3.0, 3.0, 3.0]])
def test_plateau_state_round_trip(losses: list[float]) -> None:
    config = ScheduleConfig(kind="plateau", patience=2)
    before, after = Plateau(config), Plateau(config)
    for loss in losses:
        before.check(loss)
    after.load(before.state())
    assert after == before
    assert all(math.isfinite(value) for value in before.state().values())


def test_history_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    with History(tmp_path, 0) as history:
        for step in (2, 4, 6):
            history.write("train", step, loss=1.0 / step)
        history.write("valid", 6, perplexity=math.inf)
    with History(tmp_path, 4) as history:
        history.write("train", 6, loss=9.0)
    records = read_history(tmp_path / "history.jsonl")
    assert [(r["step"], r["loss"]) for r in records] == [(2, 0.5), (4, 0.25), (6, 9.0)]


def test_history_survives_a_line_cut_by_a_kill_but_not_a_foreign_one(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"event": "train", "step": 1}\n{"event": "tra')
    assert [r["step"] for r in read_history(path)] == [1]
    path.write_text('{"event": "train", "step": 1}\nhello\n')
    with pytest.raises(InputError, match=r"history\.jsonl, line 2"):
        read_history(path)


def test_infinity_becomes_null_in_the_history_and_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with History(tmp_path, 0, tensorboard=True) as history:
        history.write("valid", 3, perplexity=math.inf, loss=2.5)
    assert read_history(tmp_path / "history.jsonl") == [{"event": "valid", "step": 3, "perplexity": None, "loss": 2.5}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(3, 2.5)]


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
        with progress.phase("valid", 10):
            pass
    progress.note("a line")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 2,500 of 4,000 tokens, 50 tokens/s, 0:30 left, loss 4.5"
    assert [line.split(":")[0] for line in lines] == ["train", "train", "a line"]


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
