"""Models and runs of earlier versions: models are loaded and evaluated; runs of 0.1 are not resumed.

Versions 0.1 and 0.2 wrote models of the same format: version 1, of kinds dense, blocked and, by 0.2, union.
"""

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
from safetensors.torch import load_file, save_file
from torch import Tensor

import hmmlm
from hmmlm.cli.main import main
from hmmlm.data.tokenizers import Tokenizer, WordTokenizer
from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel
from hmmlm.models.neural import Neural
from hmmlm.scan.composition import kinds_of, matrices
from hmmlm.structure.blocks import Blocks
from hmmlm.training.prepare import Prepared
from hmmlm.training.train import train
from hmmlm.transitions import Factored


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


def old_tensors(hmm: HMM) -> tuple[str, dict[str, Tensor]]:
    """Return the kind and the tensors of a model by the names of version 0.2."""
    if len(hmm.components) > 1:
        found = {"log_weights": hmm.log_weights}
        for i, component in enumerate(hmm.components):
            kind, tensors = old_tensors(component)
            found |= {f"components.{i}.{kind}.{name}": tensor for name, tensor in tensors.items()}
        return "union", found
    transition, emission = hmm.transition, hmm.emission
    if isinstance(transition, Factored) and isinstance(emission, Blocked):
        return "blocked", {
            "block_of_word": emission.block_of_word,
            "u": transition.u,
            "w": transition.w,
            "log_normalizer": transition.log_normalizer,
            "log_start": hmm.log_start,
            "log_emission": emission.log_probs,
        }
    found = matrices(hmm)
    assert found is not None
    return "dense", dict(zip(("log_start", "log_transition", "log_emission"), found, strict=True))


def save_old_model(folder: Path, hmm: HMM, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Write a model as versions 0.1 and 0.2 did."""
    kind, tensors = old_tensors(hmm)
    header = {
        "format": "hmmlm language model",
        "version": 1,
        "model": kind,
        "states": hmm.num_states,
        "vocab_size": hmm.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer": tokenizer.fingerprint(),
        "training": config,
    }
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True)
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(header, indent=1) + "\n")
    metadata = {"format": "hmmlm language model", "tokenizer": tokenizer.fingerprint()}
    save_file(tensors, folder / "model.safetensors", metadata=metadata)


def make_hmm(kind: str) -> HMM:
    if kind == "dense":
        return random_hmm(4, 6, seed=1, dtype=torch.float32)
    if kind == "union":
        parts = [make_hmm("dense"), make_hmm("blocked"), random_hmm(3, 6, seed=2, dtype=torch.float32)]
        return HMM.union(parts, [0.5, 0.3, 0.2])
    blocks = Blocks.from_clusters(torch.tensor([0, 1, 0, 1, 0, 1]), 4)
    return Neural(blocks, hidden=4, generator=torch.Generator().manual_seed(0))().detach()


def write_old_run(run: Path, hmm: HMM, data: Prepared, reset: bool) -> None:
    """Write the folder of a run of version 0.1: token files, the best model, a checkpoint and a history."""
    config = training(hmm.num_states, "none" if matrices(hmm) is not None else "brown", reset)
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
    kinds = {"dense": "dense × categorical", "blocked": "factored × blocked"}
    assert (lm.hmm.kind, lm.hmm.num_states, lm.restarts) == (kinds[kind], 4, reset)
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


KINDS = {
    "dense": {"transition.kind": "dense", "emission.kind": "categorical"},
    "blocked": {"transition.kind": "factored", "emission.kind": "blocked"},
    "union": {
        "transition.kind": "union",
        "transition.0.kind": "dense",
        "transition.1.kind": "factored",
        "transition.2.kind": "dense",
        "emission.kind": "union",
        "emission.0.kind": "categorical",
        "emission.1.kind": "blocked",
        "emission.2.kind": "categorical",
    },
}
TOKENIZER = WordTokenizer(["<unk>", "<eos>", "a", "b", "c", "d"])


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_of_version_0_2_has_the_same_numbers(kind: str, tmp_path: Path) -> None:
    hmm = make_hmm(kind)
    save_old_model(tmp_path / "old", hmm, TOKENIZER, {"model": {"states": 4}})
    found = hmmlm.load(tmp_path / "old").hmm
    assert kinds_of(found) == kinds_of(hmm) == KINDS[kind]
    assert found.tensors().keys() == hmm.tensors().keys()
    for name, tensor in hmm.tensors().items():
        if (kind, name) == ("union", "log_start"):  # weights and starts are added again
            torch.testing.assert_close(found.log_start, tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found.tensors()[name], tensor), name
    torch.testing.assert_close(found.log_weights, hmm.log_weights)
    torch.testing.assert_close(found.log_likelihood([[2, 3, 4, 1]]), hmm.log_likelihood([[2, 3, 4, 1]]))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_of_version_0_2_is_saved_in_the_present_format(kind: str, tmp_path: Path) -> None:
    save_old_model(tmp_path / "old", make_hmm(kind), TOKENIZER, {})
    old = hmmlm.load(tmp_path / "old")
    old.save(tmp_path / "new")
    header = json.loads((tmp_path / "new" / "config.json").read_text())
    assert header["version"] == 2 and "model" not in header
    assert {name: value for name, value in header.items() if name.endswith("kind")} == KINDS[kind]
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == old.hmm.tensors().keys()
    new = hmmlm.load(tmp_path / "new").hmm
    assert kinds_of(new) == KINDS[kind]
    assert all(torch.equal(new.tensors()[name], tensor) for name, tensor in old.hmm.tensors().items())


def change_config(folder: Path, changes: dict[str, Any], removed: tuple[str, ...] = ()) -> None:
    header = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in header.items() if key not in removed}))


def change_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Write tensors in place of others; None removes one. There is no checksum."""
    metadata = {"format": "hmmlm language model", "tokenizer": TOKENIZER.fingerprint()}
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata=metadata)


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        hmmlm.load(folder)
    message = str(error.value)
    assert str(folder) in message and "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in old_tensors(make_hmm(kind))[1]])
def test_damaged_tensors_of_version_0_2_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    tensor = old_tensors(make_hmm(kind))[1][name].clone()
    wrong: dict[str, Tensor | None] = {
        "missing": None,
        "another rank": tensor[None],
        "a number": tensor.flatten()[0].clone(),
        "too short": tensor[:-1].clone(),
        "empty": tensor[:0],
        "half precision": tensor.half(),
        "flags": tensor > 0,
    }
    if tensor.is_floating_point():
        wrong |= {"nan": torch.full_like(tensor, torch.nan), "integers": tensor.long()}
    else:
        wrong |= {"beyond the blocks": tensor + 2, "negative": tensor - 1}
    for what, changed in wrong.items():
        save_old_model(tmp_path / what, make_hmm(kind), TOKENIZER, {})
        change_tensors(tmp_path / what, {name: changed})
        refusal(tmp_path / what)


def test_models_of_version_0_2_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    tmp_path /= "model"
    save_old_model(tmp_path, make_hmm("dense"), TOKENIZER, {})
    for kind in ("quantum", None, 3, ["dense"], {"dense": 1}, "blocked", "union"):
        change_config(tmp_path, {"model": kind})
        message = refusal(tmp_path)
        if kind == "quantum":
            assert "a model of kind 'quantum'; this hmmlm reads dense, blocked and union" in message
    change_config(tmp_path, {}, removed=("model",))
    assert "this hmmlm reads dense, blocked and union" in refusal(tmp_path)
    change_config(tmp_path, KINDS["dense"] | {"version": 2})  # the tensors have the names of version 1
    assert "model.safetensors has no transition.log_probs" in refusal(tmp_path)


def test_half_a_union_of_version_0_2_is_refused(tmp_path: Path) -> None:
    save_old_model(tmp_path / "union", make_hmm("union"), TOKENIZER, {})
    whole = load_file(tmp_path / "union" / "model.safetensors")
    for i in range(3):
        save_old_model(tmp_path / str(i), make_hmm("union"), TOKENIZER, {})
        change_tensors(tmp_path / str(i), {name: None for name in whole if name.startswith(f"components.{i}.")})
        refusal(tmp_path / str(i))
    for what, changes in {
        "all": {name: None for name in whole if name.startswith("components.")},
        "two kinds": {"components.0.blocked.u": torch.zeros(4, 2)},
        "unknown kind": {"components.3.quantum.u": torch.zeros(4, 2), "log_weights": torch.full((4,), 0.25).log()},
        "weights": {"log_weights": whole["log_weights"] + 1},
        "another vocabulary": {"components.0.dense.log_emission": torch.full((4, 5), 0.2).log()},
        "another dtype": {"components.0.dense.log_start": whole["components.0.dense.log_start"].double()},
        "a larger component": {"components.2.dense.log_start": torch.full((5,), 0.2).log()},
    }.items():
        save_old_model(tmp_path / what, make_hmm("union"), TOKENIZER, {})
        change_tensors(tmp_path / what, dict(changes))
        refusal(tmp_path / what)


def test_kinds_that_do_not_fit_the_tensors_are_refused(tmp_path: Path) -> None:
    LanguageModel(make_hmm("union"), TOKENIZER).save(tmp_path)
    nested = {f"transition.{'0.' * depth}kind": "union" for depth in range(2000)}
    for changes, removed, message in (
        ({"transition.kind": "quantum"}, (), "transition.kind is 'quantum'; this hmmlm reads dense, factored"),
        ({"emission.kind": None}, (), "emission.kind is 'None'; this hmmlm reads categorical, blocked"),
        ({"transition.1.kind": "quantum"}, (), "transition.1.kind is 'quantum'"),
        ({}, ("transition.kind",), "transition.kind is None"),
        ({}, ("emission.kind",), "emission.kind is None"),
        ({}, ("transition.2.kind",), "components"),
        ({}, ("emission.2.kind",), "components"),
        ({}, ("emission.0.kind",), ""),
        ({"emission.kind": "categorical"}, (), "has no emission.log_probs"),
        ({"transition.3.kind": "dense", "emission.3.kind": "categorical"}, (), "has no transition.3.log_probs"),
        ({"transition.0.kind": "factored"}, (), "has no transition.0.u"),
        ({"emission.0.kind": "union"}, (), ""),
        (nested, (), ""),
    ):
        before = (tmp_path / "config.json").read_text()
        change_config(tmp_path, dict(changes), removed)
        assert message in refusal(tmp_path)
        (tmp_path / "config.json").write_text(before)
    assert len(hmmlm.load(tmp_path).hmm.components) == 3


def test_components_whose_transition_and_emission_have_different_sizes_are_refused(tmp_path: Path) -> None:
    """They have the same number of states in all."""
    parts = [random_hmm(states, 6, seed=1, dtype=torch.float32) for states in (2, 3)]
    LanguageModel(HMM.union(parts), TOKENIZER).save(tmp_path)
    first, second = (part.emission.dense() for part in parts)
    change_tensors(tmp_path, {"emission.0.log_probs": second, "emission.1.log_probs": first})
    refusal(tmp_path)


@pytest.mark.parametrize("role", ["transition", "emission"])
def test_half_a_union_of_one_model_is_no_endless_recursion(role: str, tmp_path: Path) -> None:
    LanguageModel(HMM.union([make_hmm("dense")]), TOKENIZER).save(tmp_path)
    kind, tensor = KINDS["dense"][f"{role}.kind"], load_file(tmp_path / "model.safetensors")[f"{role}.0.log_probs"]
    change_config(tmp_path, {f"{role}.kind": kind}, removed=(f"{role}.0.kind",))
    change_tensors(tmp_path, {f"{role}.log_probs": tensor, f"{role}.0.log_probs": None})
    refusal(tmp_path)


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
