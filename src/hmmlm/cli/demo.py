"""`hmmlm demo`: two minutes from nothing to a model and its report."""

from __future__ import annotations

from pathlib import Path

from hmmlm.cli.parse import Arguments, parse

DESCRIPTION = """Train a model on English text that every Python installation contains (the language reference
and the docstrings of the standard library), in less than two minutes on two cores; compare it with
n-grams; and show an exact infill, texts that must contain words, and the states of a sentence.

examples:
  hmmlm demo
  hmmlm demo --out runs/first"""


class DemoArguments(Arguments):
    out: Path | None = None
    """Folder of the run; None: runs/demo- and the time."""


def run(argv: list[str]) -> int:
    arguments = parse(DemoArguments, argv, "demo", DESCRIPTION)

    from rich.console import Console

    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.config.recipe import load_recipe
    from hmmlm.report.demo import run_demo
    from hmmlm.runs.commands import program
    from hmmlm.runs.folders import new_folder
    from hmmlm.runs.progress import terminal_progress
    from hmmlm.terminal import printable

    with new_folder(arguments.out, "runs", "demo") as out:
        result = run_demo(load_recipe("demo"), out, terminal_progress(), Console())
    if not result.finished:
        again = f"{program()} train --resume {result.out}"
        print(f"stopped at step {result.steps:,}, saved; continue with: {printable(again)}")
        return INTERRUPTED
    return 0
