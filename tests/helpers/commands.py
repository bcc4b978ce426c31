"""Commands as a user runs them."""

import io
import os
import random
import re
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hmmlm.cli import parse as parsing
from hmmlm.cli.main import COMMANDS, main
from hmmlm.cli.parse import Parser, parse


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail with exit code 2 and one line on standard error; return the line."""
    capsys.readouterr()
    assert main(argv) == 2
    error = re.sub(r"^hmmlm: warning: renamed since [^\n]+\n", "", capsys.readouterr().err)  # of an older run
    assert re.fullmatch(r"hmmlm: error: [^\n]+\n", error), error
    return error


def help_text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that prints help; return what it prints."""
    capsys.readouterr()
    try:
        assert main(argv) == 0
    except SystemExit as end:  # argparse exits after its help
        assert end.code == 0
    return capsys.readouterr().out


def python_environment() -> dict[str, str]:
    """Return the environment of a Python process that imports the package from its sources."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}


def run_python(program: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process of its own."""
    command = [sys.executable, "-c", program, *argv]
    return subprocess.run(command, env=python_environment(), capture_output=True, text=True, **options)


class ParsedError(Exception):
    """Raised instead of running a command."""


def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every command parse its command line and raise a ParsedError."""

    def parse_and_raise(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        raise ParsedError

    for module in (parsing, *(import_module(f"hmmlm.cli.{command}") for command in COMMANDS)):
        monkeypatch.setattr(module, "parse", parse_and_raise, raising=False)


def options_of(command: str) -> set[str]:
    """Return the options that the parser of a command accepts."""
    made: list[Parser] = []

    class RecordedParser(Parser):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()), suppress(SystemExit):
        patch.setattr(parsing, "Parser", RecordedParser)
        main([command, "--help", "all"])
    return set(made[0]._option_string_actions)


def write_corpus(path: Path, lines: int = 200) -> Path:
    """Write a text of short sentences, and return the file."""
    rng = random.Random(0)
    nouns, verbs = ["cat", "dog", "bird", "fish"], ["sees", "hears", "likes"]
    text = [f"the {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)} ." for _ in range(lines)]
    path.write_text("".join(f"{i % 7} {line}\n" for i, line in enumerate(text)), encoding="utf-8")
    return path
