"""README as a new user follows it, and the options and recipes of the guides; `test_docs` runs the guides."""

import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import ParsedError, only_parse, options_of

from hmmlm.cli.main import main
from hmmlm.config.recipe import load_recipe
from hmmlm.report import page
from hmmlm.report.results import RunResults

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
ONE_EPOCH = ["--train.epochs", "1"]
SMALL = {
    "train": ["--model.num-states", "64", *ONE_EPOCH],
    "teacher": ONE_EPOCH,
    "baseline": ONE_EPOCH,
    "explore": ["--export", "page.html"],
}
"""Options that make the commands of the README fast, and end."""
WORDS = "the a of list None text line another returns value is returned sentence yours item"


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(file: Path) -> list[list[str]]:
    """Return the arguments of every `hmmlm` command in the sh blocks of a file."""
    lines = [line for block in blocks(file, "sh") for line in block.replace("\\\n", " ").splitlines()]
    found = [re.fullmatch(r"(?:\.venv/bin/)?hmmlm (.*)", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a user with a text, in which every command of the README was run in order, with SMALL."""
    folder, chance = tmp_path_factory.mktemp("user"), random.Random(0)
    lines = ("the " + " ".join(chance.choices(WORDS.split(), k=10)) + " a list" for _ in range(100))
    (folder / "my.txt").write_text("\n".join(lines) + "\n")
    assert len(commands(ROOT / "README.md")) > 8
    write_report = page.write_report

    def write_first(results: RunResults) -> Path:  # the plots of a report take longer than its training
        report = results.run / "report.html"
        return report if report.exists() or results.run.name != "mine" else write_report(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(page, "write_report", write_first)
        for argv in commands(ROOT / "README.md")[1:]:  # without `hmmlm demo`, which has tests of its own
            assert main([*argv, *([] if "--resume" in argv else SMALL.get(argv[0], []))]) == 0, argv
    return folder


@pytest.mark.slow
def test_every_command_of_the_readme_runs(folder: Path) -> None:
    for name in ("report.html", "best/model.safetensors", "history.jsonl", "last/state.json"):
        assert (folder / "runs" / "mine" / name).exists()
    assert (folder / "runs" / "teacher" / "best" / "model.safetensors").exists()
    assert (folder / "runs" / "distilled" / "clusters.safetensors").exists()
    (baseline,) = (folder / "baselines").iterdir()
    assert (baseline / "perplexity.json").exists()


def test_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    pieces = blocks(ROOT / "README.md", "python")
    assert pieces
    names: dict[str, Any] = {}
    for piece in pieces:
        exec(piece, names)
    line = names["lm"].generate("the", must=["a list"], never=["None"], max_new_tokens=20, seed=1)
    assert "a list" in line and "None" not in line


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_every_command_can_be_parsed(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for recipe in blocks(file, "toml"):
        (folder / "mine.toml").write_text(recipe)
        load_recipe(folder / "mine.toml")
    only_parse(monkeypatch)
    for argv in commands(file):
        with pytest.raises(ParsedError):
            main(argv)


def test_every_option_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known = {option for command in ("train", "teacher", "baseline") for option in options_of(command)}
    named = {
        option for file in PAGES for option in re.findall(r"--[a-z]+\.[a-z-]+\b", file.read_text(encoding="utf-8"))
    }
    assert named and named <= known, named - known
