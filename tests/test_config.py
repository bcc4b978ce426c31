"""Configuration: round trips, defaults by kind, recipes, and errors that name the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.recipe import load_recipe, recipe_names
from hmmlm.config.run import RunConfig
from hmmlm.config.sections import BaumWelchConfig, FileTokenizerConfig
from hmmlm.config.training import TrainingConfig, read_config
from hmmlm.errors import InputError
from hmmlm.models.neural import NeuralConfig
from hmmlm.models.scalar import ScalarConfig


@pytest.mark.parametrize(
    "values",
    [
        {"data": "my.txt", "tokenizer": {"kind": "file", "file": "t.json"}, "optimizer": {"betas": [0.8, 0.9]}},
        {"model": {"kind": "neural", "blocks": 2, "clusters": "x.paths"}, "batches": {"kind": "chunks"}},
        {"optimizer": {"kind": "baum-welch", "step": 0.5}, "schedule": {"kind": "plateau"}},
        {"initialization": {"kind": "lvd", "teacher": "x", "cache": "shared"}, "tokenizer": {"kind": "bpe"}},
    ],
)
def test_round_trip_through_json(values: dict[str, Any]) -> None:
    config = read_config(RunConfig, values)
    assert read_config(RunConfig, json.loads(json.dumps(config.dump()))) == config


def test_values_are_converted_to_their_types() -> None:
    values = {"tokenizer": {"kind": "file", "file": "t.json"}, "optimizer": {"betas": [0.8, 0.9]}}
    config = read_config(RunConfig, values)
    assert isinstance(config.tokenizer, FileTokenizerConfig) and config.tokenizer.file == Path("t.json")
    assert config.optimizer.kind == "adamw" and config.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model": {"statse": 3}},
            r"unknown setting model\.statse for model\.kind = 'scalar'; .*mean model\.num_states\?",
        ),
        ({"modle": {}}, r"unknown setting modle; did you mean model\?"),
        ({"lr": 1}, r"unknown setting lr; did you mean optimizer\.lr\?"),
        ({"model": {"momentum": 1}}, r"model\.momentum for .*; did you mean optimizer\.momentum\?"),
        ({"optimizer": {"kind": "baum-welch", "stp": 1}}, r"optimizer\.stp .*; did you mean optimizer\.step\?"),
        (
            {"initialization": {"kind": "lvd", "teacher": "x", "kmeans": {"tokns": 3}}},
            r"unknown setting initialization\.kmeans\.tokns .*; did you mean initialization\.kmeans\.tokens\?",
        ),
        ({"qqqqzzzz": 1}, "unknown setting qqqqzzzz$"),
        ({"model": {"num_states": 0}, "extra": 1}, "unknown setting extra"),
        ({"model": {"num_states": 0}}, r"model\.num_states: .*greater than 0 \(given 0\)"),
        ({"model": {"num_states": "many"}}, r"model\.num_states: .*\(given 'many'\)"),
        ({"model": 3}, r"model: .*\(given 3\)"),
        ({"optimizer": {"lr": float("nan")}}, r"optimizer\.lr: .*finite number \(given nan\)"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer\.betas\.1: Input should be less than 1 \(given 1\.0\)"),
        ({"optimizer": {"kind": "sgd"}}, r"optimizer\.kind: unknown kind 'sgd': use 'adamw', 'baum-welch'"),
        ({"model": {"kind": ["scalar"]}}, r"model\.kind: unknown kind .*: use 'scalar', 'linear'"),
        ({"optimizer": {"kind": "baum-welch", "step": 1.5}}, r"optimizer\.step: .*\(given 1\.5\)"),
        ({"schedule": {"warmup": -1}}, r"schedule\.warmup: .*\(given -1\)"),
        ({"train": {"epochs": None}}, "train: give `epochs` or `max_tokens`"),
        ({"tokenizer": {"kind": "file"}}, r"tokenizer\.file: required for tokenizer\.kind = 'file'"),
        ({"model": {"kind": "neural", "num_states": 10, "blocks": 3}}, r"model: states \(10\) must be a multiple"),
        ({"model": {"dropout": 0.5}}, r"model: dropout = 0\.5 needs blocks: set blocks"),
        (
            {"optimizer": {"kind": "baum-welch"}, "model": {"kind": "linear"}},
            r"optimizer\.kind = 'baum-welch' needs a model of tables, such as 'scalar'",
        ),
    ],
)
def test_errors_name_the_field_and_the_value_on_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_config(RunConfig, values, "my.toml")
    assert str(caught.value).startswith("my.toml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "kind", "field", "kinds"),
    [
        ("tokenizer", "word", {"file": "x"}, "'file'"),
        ("tokenizer", "bpe", {"lowercase": True}, "'word'"),
        ("batches", "chunks", {"reset_at_eos": True}, "'stream'"),
        ("model", "scalar", {"hidden": 8}, "'linear', 'mlp', 'transformer', 'neural', 'uniform'"),
        ("model", "transformer", {"blocks": 4}, "'scalar', 'linear', 'mlp', 'neural'"),
        ("optimizer", "adamw", {"momentum": 0.5}, "'baum-welch'"),
        ("schedule", "constant", {"patience": 3}, "'plateau'"),
        ("initialization", "none", {"teacher": "x"}, "'lvd', 'counts'"),
    ],
)
def test_a_field_of_another_kind_is_refused(section: str, kind: str, field: dict[str, Any], kinds: str) -> None:
    (name,) = field
    with pytest.raises(InputError) as caught:
        read_config(RunConfig, {section: {"kind": kind, **field}})
    assert str(caught.value) == (
        f"configuration: unknown setting {section}.{name} for {section}.kind = {kind!r}; it is a setting of {kinds}"
    )


def test_fields_left_out_keep_their_defaults_and_configurations_are_frozen() -> None:
    config = read_config(RunConfig, {"model": {"num_states": 7}})
    assert config.model_copy(update={"model": RunConfig().model}) == RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.data = "other"


@pytest.mark.parametrize("kind", ["scalar", "linear", "mlp", "transformer", "neural", "uniform", "pretrained"])
def test_adamw_defaults_follow_the_model_family(kind: str) -> None:
    model = {"kind": kind, "teacher": "x"} if kind == "pretrained" else {"kind": kind}
    config = read_config(RunConfig, {"model": model})
    assert config.optimizer.kind == "adamw"
    defaults = type(config.model).optimizer_defaults
    assert defaults and {name: getattr(config.optimizer, name) for name in defaults} == defaults
    changed = read_config(RunConfig, {"model": model, "optimizer": {"lr": 0.5}})
    assert changed.optimizer == config.optimizer.model_copy(update={"lr": 0.5})
    assert RunConfig(model=config.model).optimizer == config.optimizer  # of a model that is already an object


def test_rates_of_families_differ() -> None:
    rates = {model.kind: RunConfig(model=model).optimizer.lr for model in (ScalarConfig(), NeuralConfig())}  # type: ignore[union-attr]
    assert rates == {"scalar": 1.0, "neural": 0.003}


@pytest.mark.parametrize("kind", [TeacherConfig, BaselineConfig])
def test_networks_keep_the_defaults_of_their_sections(kind: type[TrainingConfig]) -> None:
    default = kind()
    changed = read_config(kind, {"batches": {"length": 7}, "optimizer": {"lr": 0.5}})
    assert changed.batches == default.batches.model_copy(update={"length": 7})
    assert changed.optimizer == default.optimizer.model_copy(update={"lr": 0.5})


# --- recipes ---


def test_recipe_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('data = "x.txt"\n[model]\nnum_states = 12\n')
    assert load_recipe(path).model.num_states == 12
    path.write_text("[model]\nstate = 12\n")
    with pytest.raises(
        InputError, match=r"mine\.toml: unknown setting model\.state .*; did you mean model\.num_states\?"
    ):
        load_recipe(path)


def test_recipe_extends_a_file_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('data = "x.txt"\n[model]\nnum_states = 12\n')
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n[train]\nseed = 3\n')
    config = load_recipe(tmp_path / "mine.toml")
    assert (config.data, config.model.num_states, config.train.seed) == ("x.txt", 12, 3)
    (tmp_path / "base.toml").write_text('extends = "mine.toml"\n')
    with pytest.raises(InputError, match="which extends it in turn"):
        load_recipe(tmp_path / "mine.toml")


def test_recipe_extends_a_recipe_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "ptb-vl-hmm"\n[model]\nnum_states = 256\n')
    base, config = load_recipe("ptb-vl-hmm"), load_recipe(tmp_path / "mine.toml")
    assert config == base.model_copy(update={"model": base.model.model_copy(update={"num_states": 256})})


def test_a_section_of_another_kind_keeps_the_fields_that_both_have(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "ptb-vl-hmm"\n[model]\nkind = "scalar"\nnum_states = 256\n')
    assert load_recipe(tmp_path / "mine.toml").model == ScalarConfig(num_states=256, blocks=128, dropout=0.5)
    # A base that leaves out the default kind loses nothing when the kind is written.
    (tmp_path / "mine.toml").write_text('extends = "ptb-vl-hmm"\n[optimizer]\nkind = "adamw"\n')
    assert load_recipe(tmp_path / "mine.toml") == load_recipe("ptb-vl-hmm")


def test_recipe_errors(tmp_path: Path) -> None:
    near = recipe_names()[0]
    with pytest.raises(InputError, match=f"no recipe named '{near}x'; nearest: .*{near}"):
        load_recipe(near + "x")
    with pytest.raises(InputError, match="does not exist"):
        load_recipe(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(InputError, match=r"broken\.toml: not valid TOML: .*line 1"):
        load_recipe(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"broken\.toml cannot be read"):
        load_recipe(broken)


@pytest.mark.parametrize("kind", [RunConfig, TeacherConfig, BaselineConfig])
def test_every_number_has_an_upper_bound(kind: type[BaseModel]) -> None:
    def unbounded(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            if node.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & node.keys():
                yield path
            for key, value in node.items():
                yield from unbounded(value, f"{path}/{key}")
        elif isinstance(node, list):
            for i, value in enumerate(node):
                yield from unbounded(value, f"{path}/{i}")

    assert list(unbounded(kind.model_json_schema(), "")) == []


@pytest.mark.parametrize("kind", [RunConfig, TeacherConfig, BaselineConfig])
def test_a_number_that_has_to_be_positive_is_so_in_float32(kind: type[BaseModel]) -> None:
    schema = json.dumps(kind.model_json_schema())
    assert not re.findall(r'"exclusiveMinimum": 0[^{}]*"type": "number"', schema), "give the least number with ge="
    least = [float(value) for value in re.findall(r'"minimum": ([\d.e-]+)[^{}]*"type": "number"', schema)]
    assert least and all(value == 0 or torch.tensor(value) > torch.finfo(torch.float32).tiny for value in least)


def test_settings_that_full_batches_imply() -> None:
    mini = read_config(RunConfig, {"optimizer": {"kind": "baum-welch"}})
    assert isinstance(mini.optimizer, BaumWelchConfig) and mini.schedule.kind == "cosine"
    assert (mini.optimizer.full_batch, mini.optimizer.step, mini.optimizer.pseudocount) == (False, 0.1, 1e-4)
    for flag in (True, "true"):  # as in a recipe, and as on the command line
        full = read_config(RunConfig, {"optimizer": {"kind": "baum-welch", "full_batch": flag}})
        assert isinstance(full.optimizer, BaumWelchConfig) and full.schedule.kind == "constant"
        assert (full.optimizer.step, full.optimizer.pseudocount, full.schedule.warmup) == (1.0, 0.0, 0.0)
    given = {"optimizer": {"kind": "baum-welch", "full_batch": True, "step": 0.5}, "schedule": {"kind": "cosine"}}
    kept = read_config(RunConfig, given)
    assert isinstance(kept.optimizer, BaumWelchConfig) and (kept.optimizer.step, kept.schedule.kind) == (0.5, "cosine")
