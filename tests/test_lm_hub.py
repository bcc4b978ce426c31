"""Models in the layout of the Hugging Face hub, and their cards."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import hmmlm
from hmmlm.data.words import WordTokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel

WORDS = ["<unk>", "<eos>", "the", "cat", "dog", "sat"]
CONFIG = {
    "data": "/home/someone/my|text.txt",
    "train": {"epochs": 3, "seed": None},
    "model": {"kind": "scalar"},
    "next_words": {"teacher": None, "weight": 0.5},
}


@pytest.fixture
def lm() -> LanguageModel:
    return LanguageModel(HMM.random(4, len(WORDS)), WordTokenizer(WORDS), CONFIG)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    figures = {
        name: {split: {"perplexity": ppl + i, "unknown_share": 0.125} for i, split in enumerate(("valid", "test"))}
        for name, ppl in (("model", 12.34), ("5-gram", 15.0))
    }
    file = tmp_path / "results.json"
    file.write_text(json.dumps(figures))
    return file


def test_a_model_is_saved_with_a_card_and_loaded_by_its_folder(
    lm: LanguageModel, results: Path, tmp_path: Path
) -> None:
    lm.save_pretrained(tmp_path / "out", results)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    again = hmmlm.load(tmp_path / "out", "cpu")
    assert again.score(["the cat sat"]).tolist() == lm.score(["the cat sat"]).tolist() and again.config == lm.config
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "hmmlm" and front["pipeline_tag"] == "text-generation"
    assert front["license"] == "unknown" and "Not chosen yet: set `license`" in card and "next_words" not in card
    for line in ("| states | 4 |", "| data | my\\|text.txt |", "| train.epochs | 3 |", "| 5-gram | 15.0 | 16.0 |"):
        assert line in card.splitlines()
    assert "12.5% of the test words" in card and "closed" in card and "someone" not in card and "seed |" not in card


def test_the_python_of_a_card_runs(lm: LanguageModel, tmp_path: Path) -> None:
    lm.save_pretrained(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Results" not in card
    (code,) = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    exec(code.replace("owner/name", str(tmp_path / "out")), {})


def test_the_results_of_the_run_of_a_model_are_found(lm: LanguageModel, results: Path, tmp_path: Path) -> None:
    lm.folder = results.parent
    lm.save_pretrained(tmp_path / "out")
    assert "| 5-gram | 15.0 | 16.0 |" in (tmp_path / "out" / "README.md").read_text().splitlines()


def test_a_card_that_exists_is_kept(lm: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    lm.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_other_files_are_no_results(lm: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"model": {"test": 1}}')
    with pytest.raises(InputError, match=r"other\.json is not the results\.json of a training run"):
        lm.save_pretrained(tmp_path / "out", tmp_path / "other.json")
    with pytest.raises(InputError, match="missing"):
        lm.save_pretrained(tmp_path / "out", tmp_path / "missing.json")
    assert not (tmp_path / "out").exists()


def hub(saved: Path, calls: list[Any], online: bool, cached: bool) -> SimpleNamespace:
    """Return a stand-in for huggingface_hub with one model."""

    def model_info(name: str, **options: Any) -> None:
        calls.append((name, options["revision"]))
        if not online:
            raise OSError("no route to host\nmore")

    def snapshot_download(name: str, *, local_files_only: bool = False, allow_patterns: list[str], **_: Any) -> str:
        assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"} <= set(allow_patterns)
        if local_files_only and not cached:
            raise OSError("not cached")
        return str(saved)

    return SimpleNamespace(model_info=model_info, snapshot_download=snapshot_download)


@pytest.mark.parametrize(("online", "cached"), [(True, False), (False, True), (False, False)])
def test_a_model_is_found_by_its_name(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: bool, cached: bool
) -> None:
    lm.save(tmp_path / "snapshot")
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(tmp_path / "snapshot", calls, online, cached))
    if online or cached:
        assert hmmlm.load("owner/name", "cpu", revision="v1").hmm.num_states == 4
    else:
        with pytest.raises(InputError, match=r"no model owner/name: .*does not supply it \(no route to host\)"):
            hmmlm.load("owner/name", revision="v1")
    assert calls == [("owner/name", "v1")]


def test_the_newest_run_is_loaded_by_its_name(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="there are no runs in the folder runs"):
        hmmlm.load("latest")
    lm.save(tmp_path / "runs" / "mine" / "best")
    config = {"data": "my.txt", "tokenizer": {}, "train": {}, "initialization": {}}
    (tmp_path / "runs" / "mine" / "config.json").write_text(json.dumps(config))
    found = hmmlm.load("latest", "cpu")
    assert isinstance(found, LanguageModel) and found.folder == Path("runs/mine")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"no model at runs/mien: the folder does not exist$"):
        hmmlm.load("runs/mien")  # not the name of somebody's model


def test_what_is_no_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("one", "a/b/c", tmp_path / "none"):
        with pytest.raises(InputError, match="the folder does not exist"):
            hmmlm.load(name)
    with pytest.raises(InputError, match="huggingface_hub, which reads the hub, is not installed"):
        hmmlm.load("owner/name")
    with pytest.raises(InputError, match="a model is a folder, not 5"):
        hmmlm.load(5)  # type: ignore[arg-type]
