"""Configuration: round trips, recipes, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hmmlm.errors import InputError
from hmmlm.learning.config import RunConfig, config_from_dict, config_to_dict, load_recipe, recipe_names


def test_round_trip_through_json() -> None:
    config = config_from_dict(
        {"data": "my.txt", "tokenizer": {"kind": "file", "file": "t.json"}, "optimizer": {"betas": [0.8, 0.9]}}
    )
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert config.tokenizer.file == Path("t.json")
    assert config.optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"statse": 3}}, r"unknown field 'model\.statse'; did you mean 'model\.states'\?"),
        ({"modle": {}}, r"unknown field 'modle'; did you mean 'model'\?"),
        ({"rate": 1}, r"unknown field 'rate'; did you mean 'optimizer\.rate'\?"),
        ({"model": {"momentum": 1}}, r"'model\.momentum'; did you mean 'optimizer\.baum_welch\.momentum'\?"),
        ({"optimizer": {"baum_welch": {"stp": 1}}}, r"'optimizer\.baum_welch\.stp'; did you mean .*baum_welch\.step'"),
        ({"qqqqzzzz": 1}, "unknown field 'qqqqzzzz'$"),
        ({"model": {"states": 0}, "extra": 1}, "unknown field 'extra'"),
        ({"model": {"states": 0}}, r"model\.states: .*greater than 0 \(given 0\)"),
        ({"model": {"states": "many"}}, r"model\.states: .*\(given 'many'\)"),
        ({"model": 3}, r"model: .*\(given 3\)"),
        ({"optimizer": {"rate": float("nan")}}, r"optimizer\.rate: "),
        ({"optimizer": {"kind": "sgd"}}, r"optimizer\.kind: .*'adamw' or 'baum-welch'"),
        ({"optimizer": {"baum_welch": {"step": 1.5}}}, r"optimizer\.baum_welch\.step: "),
        ({"train": {"epochs": None}}, "train: give `epochs` or `max_tokens`"),
        ({"schedule": {"warmup_tokens": 5, "warmup_fraction": 0.1}}, "schedule: give `warmup_tokens` or"),
        ({"tokenizer": {"kind": "file"}}, "tokenizer: .*needs `file`"),
        ({"tokenizer": {"file": "x"}}, "tokenizer: `file` is only read with"),
    ],
)
def test_what_is_wrong_is_named_on_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        config_from_dict(values, "my.toml")
    assert str(caught.value).startswith("my.toml: ")
    assert "\n" not in str(caught.value)


def test_fields_left_out_keep_their_defaults_and_configurations_are_frozen() -> None:
    config = config_from_dict({"model": {"states": 7}})
    assert config.model_copy(update={"model": RunConfig().model}) == RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.data = "other"


def test_every_recipe_parses() -> None:
    assert recipe_names(), "the package has no recipes"
    for name in recipe_names():
        load_recipe(name)


def test_recipe_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('data = "x.txt"\n[model]\nstates = 12\n')
    assert load_recipe(path).model.states == 12
    path.write_text("[model]\nstate = 12\n")
    with pytest.raises(InputError, match=r"mine\.toml: unknown field 'model\.state'; did you mean 'model\.states'"):
        load_recipe(path)


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
