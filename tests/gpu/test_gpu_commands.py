"""Commands on a GPU print what they print on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from helpers.commands import write_corpus

from hmmlm.cli.main import main

SMALL = ["--batches.batch-size", "4", "--batches.length", "8", "--train.epochs", "1", "--no-train.tensorboard"]


@pytest.fixture(scope="module", params=["scalar", "neural"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder / "animals.txt")
    blocks = ["--model.blocks", "2", "--model.hidden", "8"] if request.param == "neural" else []
    model = ["--model.kind", request.param, "--model.num-states", "8", "--tokenizer.vocab-size", "14", *blocks]
    argv = ["train", "--data", str(corpus), *model, *SMALL, "--quiet", "--out", str(folder / "run")]
    assert main(argv) == 0  # the report too is evaluated on the GPU
    assert json.loads((folder / "run" / "results.json").read_text())["model"]["test"]["unknown_share"] > 0
    return folder / "run"


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "RUN", "--json"],
        ["score", "RUN", "TEXT", "--tokens", "--format", "json"],
        ["compare", "RUN", "RUN", "--data", "TEXT", "--json"],
        ["sample", "RUN", "--seed", "1", "--max-new-tokens", "5"],
        ["infill", "RUN", "the ___ sees", "--no-allow-unk"],
        ["inspect", "RUN", "--contexts", "--text", "the cat"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_command_agrees_with_the_cpu(
    argv: list[str], run: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(run), "TEXT": str(run.parent / "animals.txt")}
    printed = []
    for name in ("cpu", device.type):
        capsys.readouterr()
        assert main([*(places.get(part, part) for part in argv), "--device", name]) == 0
        printed.append(capsys.readouterr().out)
    assert device.type in printed[1] or argv[0] != "eval"
    numbers = [[float(word) for word in text.replace(",", " ").split() if _is_number(word)] for text in printed]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-2, abs=1e-2)


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).replace("-", "", 1).isdigit()
