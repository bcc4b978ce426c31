"""Token files: made once by `hmmlm data`, then used by many runs."""

import json
import shutil
from pathlib import Path

import pytest

from hmmlm.cli.main import main
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.errors import InputError
from hmmlm.training.train import train


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for split, count in (("train", 60), ("valid", 8), ("test", 8)):
        lines = [" ".join(f"w{(i * k) % 7}" for k in range(1, 9)) for i in range(count)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def configured(data: Path) -> dict:
    return {
        "data": str(data),
        "model": {"num_states": 4},
        "batches": {"batch_size": 4, "length": 8},
        "train": {"epochs": 1, "device": "cpu", "tensorboard": False},
    }


def test_a_prepared_folder_trains_like_its_text(texts: Path, tmp_path: Path) -> None:
    assert main(["data", str(texts), "--out", str(tmp_path / "prepared")]) == 0
    from_text = train(read_config(RunConfig, configured(texts), "text"), tmp_path / "a")
    shutil.rmtree(texts)
    from_tokens = train(read_config(RunConfig, configured(tmp_path / "prepared"), "tokens"), tmp_path / "b")
    assert from_tokens.best_perplexity == from_text.best_perplexity
    # A run needs nothing but its own folder, and does not change the token files that it was started from.
    record = json.loads((tmp_path / "b" / "config.json").read_text())
    assert record["tokenizer"]["kind"] == "file" and record["tokenizer"]["file"].endswith("prepared/tokenizer")
    before = (tmp_path / "prepared" / "data" / "train.bin").read_bytes()
    assert (tmp_path / "b" / "data" / "train.bin").read_bytes() == before
    shutil.rmtree(tmp_path / "prepared")
    again = read_config(
        RunConfig, {**configured(tmp_path / "prepared"), "train": {"epochs": 2, "device": "cpu"}}, "more"
    )
    assert train(again, tmp_path / "b", resume=True).epochs == 2


def test_damaged_token_files_are_refused(texts: Path, tmp_path: Path) -> None:
    assert main(["data", str(texts), "--out", str(tmp_path / "prepared")]) == 0
    with (tmp_path / "prepared" / "data" / "valid.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(InputError, match=r"prepared/data/valid\.bin is truncated or replaced"):
        train(read_config(RunConfig, configured(tmp_path / "prepared"), "tokens"), tmp_path / "run")


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "linear", "hidden": 8},
        {"kind": "mlp", "hidden": 8, "split": False},
    ],
)
def test_linear_and_mlp_train_on_brown_blocks(texts: Path, tmp_path: Path, model: dict) -> None:
    values = configured(texts)
    values["model"] = {**model, "num_states": 12, "blocks": 3, "dropout": 0.5}
    values["train"]["epochs"] = 3
    values["optimizer"] = {"lr": 0.03}
    result = train(read_config(RunConfig, values, "blocked"), tmp_path / "run")
    assert result.best_perplexity < 8  # a uniform guess: seven words, equally frequent, and <eos>


def test_transformers_have_no_blocks(texts: Path) -> None:
    values = configured(texts)
    values["model"] = {"kind": "transformer", "num_states": 12, "blocks": 3}
    with pytest.raises(InputError, match=r"blocked: unknown setting model\.blocks for model\.kind = 'transformer'"):
        read_config(RunConfig, values, "blocked")
