"""Two processes that share a GPU, with sums over Gloo: the same losses as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.runs import records, tiny_config, write_text

from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.training.train import train

MODELS: dict[str, dict[str, Any]] = {
    "scalar": {"num_states": 64},
    "neural": {"kind": "neural", "num_states": 64, "blocks": 2, "hidden": 16},
}


def train_on_gpu(config: dict[str, Any], out: Path) -> None:
    assert train(read_config(RunConfig, config), out).finished


@pytest.mark.parametrize("kind", MODELS)
def test_two_processes_on_one_gpu(kind: str, tmp_path: Path) -> None:
    config = tiny_config(
        write_text(tmp_path, 80), model=MODELS[kind], batches={"batch_size": 5}, train={"device": "cuda"}
    ).dump()
    for count in (1, 2):
        run_ranks(count, train_on_gpu, config, tmp_path / str(count))
    ours, theirs = ([r["loss"] for r in records(tmp_path / str(count), "valid")] for count in (1, 2))
    assert ours == pytest.approx(theirs, abs=1e-3)
