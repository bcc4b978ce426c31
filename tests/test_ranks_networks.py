"""Teachers, and the next words that a network draws, in several processes: the same as in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.network_runs import write_pairs
from helpers.ranks import run_ranks
from helpers.runs import records
from test_learning_next_words import pairs_config
from test_ranks_training import assert_close, train_in_float64
from test_teachers_gpt import tiny_teacher

from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.training import read_config
from hmmlm.distillation.next_words import NEXT_WORDS
from hmmlm.training.networks import train_baseline, train_teacher

pytestmark = pytest.mark.slow
SEEDS = frozenset({"rng.cpu"})
"""Several processes draw the seeds of dropout masks, which this network has none of."""


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train_network(config: dict[str, Any], out: Path, resume: bool = False) -> None:
    with float64():
        assert train_teacher(read_config(TeacherConfig, config), out, resume).finished


def test_a_teacher_is_the_same_whatever_the_number_of_processes(tmp_path: Path) -> None:
    corpus = write_pairs(tmp_path)
    config = tiny_teacher(corpus, epochs=2, checks_per_epoch=1).dump()
    train_network(config, tmp_path / "1")
    run_ranks(2, train_network, config, tmp_path / "2")
    assert_close(tmp_path / "2", tmp_path / "1", SEEDS)
    longer = tiny_teacher(corpus, epochs=3, checks_per_epoch=1).dump()
    run_ranks(2, train_network, longer, tmp_path / "1", True)
    train_network(longer, tmp_path / "2", resume=True)
    assert len(records(tmp_path / "2", "valid")) == 3
    assert_close(tmp_path / "2", tmp_path / "1", SEEDS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    config = {
        "data": str(write_pairs(folder)),
        "model": {"kind": "feedforward", "order": 2, "hidden": 8, "layers": 1, "dropout": 0.0},
        "batches": {"batch_size": 8, "length": 16},
        "train": {"epochs": 1, "tensorboard": False, "device": "cpu"},
    }
    with float64():
        assert train_baseline(read_config(BaselineConfig, config), folder / "run").finished
    return folder / "run"


def test_next_words_are_drawn_once_and_shared(teacher: Path, tmp_path: Path) -> None:
    config = pairs_config(teacher, epochs=1, drawn=4).dump()
    config["batches"]["batch_size"] = 5  # which two processes do not share evenly
    train_in_float64(config, tmp_path / "1")
    run_ranks(2, train_in_float64, config, tmp_path / "2")
    ours, theirs = (np.load(tmp_path / name / NEXT_WORDS) for name in ("1", "2"))
    assert np.array_equal(ours, theirs)
    assert_close(tmp_path / "2", tmp_path / "1")
