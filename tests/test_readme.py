"""The README as a new user takes it: every command and every piece of Python, in order, on a small text."""

import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hmmlm.cli.main import main

README = (Path(__file__).parent.parent / "README.md").read_text()
NAMED = "runs/my-20260101-120000"
RUN = "runs/first"
TEXT = "the a of list None text line another returns value is returned sentence yours item"


class Other:
    """Another model: it likes all words alike."""

    def generate(self, prompt: Tensor, logits_processor: list[Callable[..., Tensor]], max_new_tokens: int,
                 do_sample: bool) -> Tensor:  # fmt: skip
        said = prompt
        for _ in range(max_new_tokens):
            scores = logits_processor[0](said, torch.zeros(1, 18))
            said = torch.cat([said, scores.softmax(1).multinomial(1)], 1)
        return said


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, chance = tmp_path_factory.mktemp("user"), random.Random(0)
    lines = ("the " + " ".join(chance.choices(TEXT.split(), k=10)) + " a list" for _ in range(300))
    (folder / "my.txt").write_text("\n".join(lines) + "\n")
    assert main(["train", "--data", str(folder / "my.txt"), "--out", str(folder / RUN)]) == 0
    return folder


def test_every_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith(".venv/bin/hmmlm ")]
    assert len(commands) > 8
    for line in commands:
        arguments = shlex.split(line.replace(NAMED, RUN), comments=True)
        assert main(arguments[1:]) == 0, line
        assert capsys.readouterr().out, line
    (made,) = (folder / "runs").glob("tokens-*")
    assert (made / "report.html").exists()


def test_every_piece_of_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": Other(), "prompt": torch.tensor([[5]])}
    first, *others = blocks("python")
    exec(first, names)
    for block in others:
        *lines, last = block.replace(NAMED, RUN).rstrip().splitlines()
        exec("\n".join(lines), names)
        result = eval(last.split("  #")[0], names)
        assert isinstance(result, Tensor)
    said = names["lm"].tokenizer.decode(result[0, 1:].tolist())
    assert "a list" in said.split("<eos>")[0] and "None" not in said.split("<eos>")[0]
