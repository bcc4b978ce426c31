"""Training in several processes: the same model as in one, and checkpoints that any number of processes resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.runs import records, tiny_config, write_text

from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.learning.train import train
from hmmlm.runs.checkpoint import read_checkpoint

MINI_BATCH = {"kind": "baum-welch", "pseudocount": 0.1, "momentum": 0.5, "step": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": {"clip": 0.5}},
    "baum-welch": {"optimizer": MINI_BATCH},
    "full batch": {"optimizer": {**MINI_BATCH, "full_batch": True}},
    "neural": {"model": {"kind": "neural", "blocks": 2, "hidden": 8, "dropout": 0.5}},
    "chunks": {"batches": {"kind": "chunks"}},
}


def train_in_float64(config: dict[str, Any], out: Path, resume: bool = False) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert train(read_config(RunConfig, config), out, resume).finished
    finally:
        torch.set_default_dtype(torch.float32)


def assert_close(run: Path, other: Path) -> None:
    """Check that two runs have the same losses and parameters, up to the order of sums in float64."""
    for event in ("train", "valid"):
        losses = [[(r["step"], r["tokens"], r["loss"]) for r in records(folder, event)] for folder in (run, other)]
        assert losses[0] == [pytest.approx(record, abs=1e-9) for record in losses[1]]
    ours, theirs = (read_checkpoint(folder / "last")[0] for folder in (run, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_same_model_whatever_the_number_of_processes(kind: str, tmp_path: Path) -> None:
    sections = {**SETTINGS[kind], "batches": {"batch_size": 5, "length": 8, **SETTINGS[kind].get("batches", {})}}
    sections["train"] = {"epochs": 5, "checks_per_epoch": 1, "checkpoint_every": 30}
    config = tiny_config(write_text(tmp_path, 80), **sections).dump()
    train_in_float64(config, tmp_path / "1")
    assert records(tmp_path / "1", "valid")[-1]["step"] >= 50
    for count in (2, 4):
        run_ranks(count, train_in_float64, config, tmp_path / str(count))
        assert_close(tmp_path / str(count), tmp_path / "1")
