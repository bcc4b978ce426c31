"""Models and runs of earlier versions: models are loaded and evaluated; runs of 0.1 are not resumed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import failure
from helpers.runs import planted, random_hmm, tiny_config, write_prepared, write_text
from safetensors.torch import save_file

import hmmlm
from hmmlm.cli.main import main
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.hmm import HMM, BlockedHMM
from hmmlm.learning.prepare import Prepared
from hmmlm.learning.train import train
from hmmlm.models.neural import Neural
from hmmlm.structure.blocks import Blocks


def training(states: int, structure: str, reset: bool) -> dict[str, Any]:
    """Return the main part of the configuration that version 0.1 wrote beside its models."""
    return {
        "data": "text.txt",
        "data_folder": None,
        "tokenizer": {"kind": "word", "file": None, "vocab_size": 10000, "min_count": None, "split": "words"},
        "batches": {
            "kind": "stream",
            "batch_size": 3,
            "length": 8,
            "shuffle": True,
            "reset_at_eos": reset,
            "eval_reset_at_eos": reset,
        },
        "model": {
            "states": states,
            "parameterization": "scalar" if structure == "none" else "neural",
            "structure": structure,
            "blocks": 128 if structure == "none" else 2,
            "form": "code",
            "factored": False,
        },
        "initialization": {"kind": "none", "teacher": None, "network": "own", "alike": 0.2},
        "optimizer": {"kind": "adamw", "rate": 0.1, "baum_welch": {"full_batch": True, "accumulate": 1}},
        "schedule": {"kind": "constant", "warmup_tokens": 0, "warmup_fraction": 0.0},
        "train": {"epochs": 1, "max_tokens": None, "seed": 0, "device": "auto"},
    }


def save_old_model(folder: Path, hmm: HMM | BlockedHMM, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Write a model as version 0.1 did."""
    kind = "blocked" if isinstance(hmm, BlockedHMM) else "dense"
    header = {
        "format": "hmmlm language model",
        "version": 1,
        "model": kind,
        "states": hmm.states,
        "vocab_size": hmm.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.fingerprint(),
        "training": config,
    }
    names = {
        "dense": ("log_start", "log_transition", "log_emission"),
        "blocked": ("block_of_word", "u", "w", "log_normalizer", "log_start", "log_emission"),
    }
    tensors = {name: hmm.tensors()[name].detach().contiguous() for name in names[kind]}
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(header, indent=1) + "\n")
    metadata = {"format": "hmmlm language model", "tokenizer": tokenizer.fingerprint()}
    save_file(tensors, folder / "model.safetensors", metadata=metadata)


def make_hmm(kind: str) -> HMM | BlockedHMM:
    if kind == "dense":
        return random_hmm(4, 6, seed=1, dtype=torch.float32)
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 0, 1, 0, 1]), 4)
    return Neural(blocks, hidden=4, generator=torch.Generator().manual_seed(0))().detach()


def write_old_run(run: Path, hmm: HMM | BlockedHMM, data: Prepared, reset: bool) -> None:
    """Write the folder of a run of version 0.1: token files, the best model, a checkpoint and a history."""
    config = training(hmm.states, "none" if isinstance(hmm, HMM) else "brown", reset)
    write_prepared(run, data)
    (run / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_old_model(run / "checkpoints" / "best-00000009", hmm, data.tokenizer, config)
    state = {"format": "hmmlm checkpoint", "version": 1, "config": config, "position": {"step": 9, "tokens": 99}}
    (run / "checkpoints" / "step-00000009").mkdir()
    (run / "checkpoints" / "step-00000009" / "state.json").write_text(json.dumps(state))
    save_file({"parameters.start": torch.zeros(4)}, run / "checkpoints" / "step-00000009" / "state.safetensors")
    for link, name in (("best", "best-00000009"), ("last", "step-00000009")):
        os.symlink(f"checkpoints/{name}", run / link, target_is_directory=True)
    record = {"event": "valid", "step": 9, "epoch": 0, "tokens": 99, "loss": 1.5, "perplexity": 4.5, "best": True}
    (run / "history.jsonl").write_text(json.dumps(record) + "\n")


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_a_model_of_version_0_1_is_loaded_and_evaluated(
    kind: str, reset: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hmm, data = make_hmm(kind), planted(random_hmm(4, 6, seed=1, dtype=torch.float32), 40, 10)
    write_old_run(tmp_path / "run", hmm, data, reset)
    lm = hmmlm.load(tmp_path / "run")
    assert (lm.hmm.kind, lm.hmm.states, lm.restarts) == (kind, 4, reset)
    assert lm.config["model"]["parameterization"] == ("scalar" if kind == "dense" else "neural")
    tokens = torch.tensor([[2, 3, 4, lm.tokenizer.eos_id]])
    torch.testing.assert_close(lm.score(["a b c"]), hmm.log_likelihood(tokens))

    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--splits", "valid,test"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[2:]] == [["valid", "100"], ["test", "100"]]
    for line in lines[2:]:
        tokens = data.tokens[line[0]]
        texts = np.split(tokens.tokens, tokens.documents[1:-1]) if reset else [tokens.tokens]  # they end without <eos>
        parts = [torch.tensor([part]) for text in texts for part in lm.sequences(text.tolist())]
        exact = sum(hmm.log_likelihood(part).item() for part in parts) / len(tokens)
        assert float(line[2]) == pytest.approx(math.exp(-exact), abs=0.006)


def test_a_model_of_version_0_1_is_saved_again_with_its_configuration(tmp_path: Path) -> None:
    data = planted(random_hmm(4, 6, seed=1, dtype=torch.float32), 8, 5)
    config = training(4, "none", True)
    save_old_model(tmp_path / "old", make_hmm("dense"), data.tokenizer, config)
    hmmlm.load(tmp_path / "old").save(tmp_path / "new")
    old, new = hmmlm.load(tmp_path / "old"), hmmlm.load(tmp_path / "new")
    assert new.config == old.config == config
    assert torch.equal(new.score(["a b", "c"]), old.score(["a b", "c"]))


def test_a_model_without_a_configuration_continues_through_eos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hmmlm eval` and `LanguageModel.perplexity` agree on it."""
    data = planted(random_hmm(4, 6, seed=1, dtype=torch.float32), 8, 5)
    save_old_model(tmp_path / "model", make_hmm("dense"), data.tokenizer, {})
    (tmp_path / "text.txt").write_text("a b\nc d a\n")
    lm = hmmlm.load(tmp_path / "model")
    capsys.readouterr()
    assert not lm.restarts
    assert main(["eval", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt")]) == 0
    perplexity = float(capsys.readouterr().out.splitlines()[-1].split()[2])
    assert perplexity == pytest.approx(lm.perplexity(["a b\nc d a"]), abs=0.006)


def test_a_run_of_version_0_1_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_old_run(run, make_hmm("dense"), planted(random_hmm(4, 6, seed=1, dtype=torch.float32), 8, 5), False)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for more in ([], ["--train.epochs", "3"]):
        error = failure(capsys, "train", "--resume", str(run), *more)
        assert f"{run / 'config.json'} does not belong to a run of `hmmlm train` of this version" in error
        assert "or start a new run" in error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_with_a_removed_setting_is_evaluated_and_resumed_unless_it_was_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny_config(write_text(tmp_path), train={"epochs": 1}), run)

    def set_removed(value: bool) -> None:
        for path in (run / "config.json", run / "best" / "config.json", run / "last" / "state.json"):
            content = json.loads(path.read_text())
            config = content.get("training", content.get("config", content))
            config["model"]["shard"] = value
            path.write_text(json.dumps(content, indent=1) + "\n")

    set_removed(True)
    error = failure(capsys, "train", "--resume", str(run), "--train.epochs", "2")
    assert "model.shard was removed: use blocks" in error
    set_removed(False)
    assert main(["eval", str(run)]) == main(["train", "--resume", str(run), "--train.epochs", "2", "--quiet"]) == 0
    assert "shard" not in json.loads((run / "config.json").read_text())["model"]
