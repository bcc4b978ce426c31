"""`hmmlm demo`: two minutes from nothing to a model, a report and something to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hmmlm.cli.parse import parse

DESCRIPTION = """Train a model on the English that every Python carries (the language reference
and the docstrings of the standard library), in about two minutes on two
cores, and show what it learnt.

examples:
  hmmlm demo
  hmmlm demo --out runs/first"""


@dataclass(frozen=True)
class Arguments:
    out: Path | None = None
    """Folder of the run; None: runs/demo- and the time."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "demo", DESCRIPTION)

    from rich.console import Console

    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.experiments.demo import demo
    from hmmlm.learning.config import load_recipe
    from hmmlm.learning.folders import new_folder
    from hmmlm.learning.progress import terminal_progress

    with new_folder(arguments.out, "runs", "demo") as out:
        result = demo(load_recipe("demo"), out, terminal_progress(), Console())
    if not result.finished:
        print(result.message)
        return INTERRUPTED
    return 0
