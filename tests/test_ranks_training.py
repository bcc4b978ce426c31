"""Training in several processes: the same model as in one, and checkpoints that any number of processes resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_teacher import LVD, use_fake_teacher
from helpers.network_runs import write_pairs
from helpers.ranks import run_ranks
from helpers.runs import planted, records, tiny_config, write_prepared, write_text

from hmmlm.config.networks import BaselineConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data.batches import Batch
from hmmlm.data.files import PERPLEXITY
from hmmlm.distillation.kmeans import Clusters
from hmmlm.learning.learners import mask_padding
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.training.networks import train_baseline
from hmmlm.training.train import train

pytestmark = pytest.mark.slow
MINI_BATCH = {"kind": "baum-welch", "pseudocount": 0.1, "momentum": 0.5, "step": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": {"max_grad_norm": 0.5}},
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


def assert_close(run: Path, other: Path, ignored: frozenset[str] = frozenset()) -> None:
    """Check that two runs have the same losses and parameters, up to the order of sums in float64.

    Args:
        ignored: tensors of the checkpoint that may differ.
    """
    for event in ("train", "valid"):
        losses = [[(r["step"], r["tokens"], r["loss"]) for r in records(folder, event)] for folder in (run, other)]
        assert losses[0] == [pytest.approx(record, abs=1e-9) for record in losses[1]]
    ours, theirs = (read_checkpoint(folder / "last")[0] for folder in (run, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ((n, t) for n, t in ours.items() if n not in ignored):
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_same_model_whatever_the_number_of_processes(kind: str, tmp_path: Path) -> None:
    sections = {**SETTINGS[kind], "batches": {"batch_size": 5, "length": 8, **SETTINGS[kind].get("batches", {})}}
    sections["train"] = {"epochs": 3, "checks_per_epoch": 1, "checkpoint_every": 30}
    config = tiny_config(write_text(tmp_path, 80), **sections).dump()
    train_in_float64(config, tmp_path / "1")
    assert records(tmp_path / "1", "valid")[-1]["step"] >= 50
    for count in (2, 4):
        run_ranks(count, train_in_float64, config, tmp_path / str(count))
        assert_close(tmp_path / str(count), tmp_path / "1")


def train_with_teacher(config: dict[str, Any], out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_fake_teacher(patch)
        train_in_float64(config, out)


@pytest.mark.parametrize("start", [{**LVD, "labels": "cached"}, {**LVD, "kind": "counts"}], ids=["lvd", "counts"])
def test_distillation_is_shared(start: dict[str, Any], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        data = write_prepared(tmp_path / "tokens", planted(use_fake_teacher(patch).hmm, 160, 16))
    batches = {"kind": "chunks", "batch_size": 5, "length": 16}
    sections = {"initialization": start, "batches": batches, "train": {"epochs": 2, "checks_per_epoch": 1}}
    config = tiny_config(data, model={"num_states": 6}, **sections).dump()
    train_with_teacher(config, tmp_path / "1")
    assert records(tmp_path / "1", "valid")[-1]["step"] >= 50
    run_ranks(2, train_with_teacher, config, tmp_path / "2")
    ours, theirs = (Clusters.load(tmp_path / name / "clusters.safetensors") for name in ("1", "2"))
    assert ours.points == theirs.points and torch.equal(ours.sizes, theirs.sizes)
    assert_close(tmp_path / "2", tmp_path / "1")


def train_lstm(config: dict[str, Any], out: Path) -> None:
    assert train_baseline(read_config(BaselineConfig, config), out).finished


def test_a_baseline_learns_in_two_processes(tmp_path: Path) -> None:
    """Dropout masks belong to sequences, so that the network is another one, and as good."""
    config = {
        "data": str(write_pairs(tmp_path)),
        "model": {"hidden": 16, "layers": 1, "dropout": 0.1},
        "batches": {"batch_size": 8, "length": 16},
        "optimizer": {"lr": 0.02},
        "train": {"epochs": 6, "tensorboard": False, "device": "cpu", "checks_per_epoch": 1},
    }
    run_ranks(2, train_lstm, config, tmp_path / "run")
    scores = json.loads((tmp_path / "run" / PERPLEXITY).read_text())
    assert scores["test"] < 2.6  # at best 2
    assert scores["valid"] == pytest.approx(min(r["perplexity"] for r in records(tmp_path / "run", "valid")), rel=1e-5)


def test_padding_counts_nothing_even_if_it_is_impossible() -> None:
    scores = torch.tensor([-2.0, -torch.inf], requires_grad=True)
    padding = Batch(torch.zeros(2, 1, dtype=torch.long), None, None, carry=False, is_padding=True)
    (gradient,) = torch.autograd.grad(mask_padding(scores, padding).sum(), scores)
    assert mask_padding(scores, padding).tolist() == [0.0, 0.0] and gradient.tolist() == [0.0, 0.0]
    assert mask_padding(scores, padding._replace(is_padding=False)) is scores
