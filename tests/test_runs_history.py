"""The history of a run: truncated at the checkpoint, robust against a kill, and the same for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hmmlm.errors import InputError
from hmmlm.runs.history import History, read_history


def test_history_is_truncated_at_the_checkpoint(tmp_path: Path) -> None:
    with History(tmp_path, 0) as history:
        for step in (2, 4, 6):
            history.write("train", step, loss=1.0 / step)
        history.write("valid", 6, perplexity=math.inf)
    with History(tmp_path, 4) as history:
        history.write("train", 6, loss=9.0)
    records = read_history(tmp_path / "history.jsonl")
    assert [(r["step"], r["loss"]) for r in records] == [(2, 0.5), (4, 0.25), (6, 9.0)]


def test_a_truncated_last_line_is_left_out_and_a_foreign_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"event": "train", "step": 1}\n{"event": "tra')
    assert [r["step"] for r in read_history(path)] == [1]
    path.write_text('{"event": "train", "step": 1}\nhello\n')
    with pytest.raises(InputError, match=r"history\.jsonl, line 2"):
        read_history(path)


def test_infinity_is_null_in_the_history_and_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with History(tmp_path, 0, tensorboard=True) as history:
        history.write("valid", 3, perplexity=math.inf, loss=2.5)
    assert read_history(tmp_path / "history.jsonl") == [{"event": "valid", "step": 3, "perplexity": None, "loss": 2.5}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(3, 2.5)]
