"""Recipes of the package: each is a valid configuration and starts with a comment that explains it."""

import json
from importlib import resources
from pathlib import Path

import pytest
from helpers.commands import failure

import hmmlm
from hmmlm.cli.main import main
from hmmlm.config.networks import BaselineConfig
from hmmlm.config.recipe import load_recipe, recipe_names, recipe_values
from hmmlm.config.training import read_config


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_has_an_explanation(name: str) -> None:
    config = load_recipe(name)
    assert config.model.num_states > 0
    text = (resources.files("hmmlm.config") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")


@pytest.mark.parametrize("name", recipe_names("baseline"))
def test_every_recipe_of_a_baseline_is_valid_and_has_an_explanation(name: str) -> None:
    config = read_config(BaselineConfig, recipe_values(name, command="baseline"))
    assert config.model.hidden > 0
    text = (resources.files("hmmlm.config") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert name not in recipe_names()


def test_a_recipe_is_of_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "for `hmmlm baseline`, not for `hmmlm train`" in failure(capsys, "train", "--recipe", "ptb-awd-lstm")
    assert "for `hmmlm train`, not for `hmmlm baseline`" in failure(capsys, "baseline", "--recipe", "ptb-vl-hmm")
    assert "nearest: ptb-awd-lstm" in failure(capsys, "baseline", "--recipe", "ptb-awd-lsm")


def test_a_baseline_starts_from_a_recipe(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\na dog ran\nthe dog sat\nthe cat ran home\n" * 10)
    options = "--model.hidden 8 --batches.batch-size 2 --train.epochs 1 --train.precision 32-true --quiet"
    arguments = ["baseline", "--recipe", "ptb-awd-lstm", "--data", str(text), "--out", str(tmp_path / "run")]
    assert main([*arguments, *options.split()]) == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["model"]["kind"], saved["model"]["hidden"], saved["model"]["embedding"]) == ("awd-lstm", 8, 400)


def test_the_recipe_of_the_demo_exists() -> None:
    assert "demo" in recipe_names()


@pytest.mark.slow
def test_a_run_without_choices_has_settings_for_its_text(tmp_path: Path) -> None:
    """From the command line and from Python; the default recipe still is one, for a text with too few words for it."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\na dog ran\nthe dog sat\nthe cat ran home\n" * 10)
    arguments = ["train", "--data", str(text), "--out", str(tmp_path / "run"), "--train.epochs", "1", "--quiet"]
    assert main(arguments) == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["model"]["kind"], saved["model"]["num_states"], saved["train"]["epochs"]) == ("scalar", 16, 1)
    assert "chosen" not in saved
    arguments = ["train", "--recipe", "default", *arguments[1:3], "--out", str(tmp_path / "named"), *arguments[5:]]
    assert main(arguments) == 0
    saved = json.loads((tmp_path / "named" / "config.json").read_text())
    assert (saved["model"]["kind"], saved["model"]["num_states"], saved["train"]["epochs"]) == ("neural", 4096, 1)
    assert max(json.loads((tmp_path / "named" / "blocks.json").read_text())) == 3  # nine words: at most four blocks
    lm = hmmlm.train(text, tmp_path / "other", model={"num_states": 4}, train={"epochs": 1})
    assert (lm.hmm.kind, lm.hmm.num_states) == ("dense × categorical", 4)
