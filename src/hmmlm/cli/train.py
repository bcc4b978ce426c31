"""`hmmlm train`: a run from a recipe and the command line, or the rest of a run that was stopped."""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hmmlm.cli.parse import parse
from hmmlm.errors import InputError
from hmmlm.learning.config import RunConfig, load_recipe, recipe_names

DESCRIPTION = """Train a hidden Markov language model and write its report.

{recipes}

Every setting can be changed below. Ctrl-C saves and stops; --resume goes on as
if nothing had happened.

examples:
  hmmlm train --data my.txt
  hmmlm train --data my.txt --model.states 512 --train.epochs 20 --out runs/mine
  hmmlm train --resume runs/mine
  hmmlm train --resume runs/mine --train.epochs 40
  hmmlm train --config my-recipe.toml --train.seed 1
  hmmlm train --data my.txt --init lvd --teacher PATH
    (short for --initialization.kind lvd --initialization.teacher PATH)"""


@dataclass(frozen=True)
class Arguments:
    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    recipe: str = "default"
    """A recipe that comes with the package: where the settings below start from."""
    config: Path | None = None
    """The same, from a TOML file of your own."""
    out: Path | None = None
    """Folder of the run; None: runs/, then the name of the recipe or the data, and the time."""
    resume: Path | None = None
    """Go on with the run in this folder. Its settings stay as they are, but for how long it trains and where."""


def run(argv: list[str]) -> int:
    given = _given(argv)
    if "resume" in given:
        for other in ("recipe", "config", "out"):
            if other in given:
                raise InputError(f"--resume has the settings and the folder of its run: leave out --{other}")
        return _resume(argv, Path(given["resume"]))
    if "recipe" in given and "config" in given:
        raise InputError("give --recipe or --config, not both")
    start = load_recipe(_toml(given["config"])) if "config" in given else load_recipe(given.get("recipe", "default"))
    arguments = _parse(argv, start)
    out = arguments.out or _new_folder(given, arguments.run.data)
    return _train(arguments.run, out, resume=False)


def _resume(argv: list[str], folder: Path) -> int:
    from hmmlm.learning.trainer import saved_config

    return _train(_parse(argv, saved_config(folder)).run, folder, resume=True)


SHORT = {"--init": "--initialization.kind", "--teacher": "--initialization.teacher"}


def _parse(argv: list[str], start: RunConfig) -> Arguments:
    for short, name in SHORT.items():
        argv = [name + given[len(short) :] if given.partition("=")[0] == short else given for given in argv]
    recipes = textwrap.fill(f"Settings start from a recipe; there are: {', '.join(recipe_names())}.", 79)
    return parse(Arguments, argv, "train", DESCRIPTION.format(recipes=recipes), Arguments(run=start))


def _train(config: RunConfig, out: Path, resume: bool) -> int:
    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.experiments.report import write_report
    from hmmlm.experiments.results import gather
    from hmmlm.learning.progress import terminal_progress
    from hmmlm.learning.trainer import train

    print(f"run folder: {out}", flush=True)
    result = train(config, out, resume=resume, progress=terminal_progress())
    print(result.message)
    if not result.finished:
        return INTERRUPTED
    results = gather(out)
    beside = ", ".join(f"{name} {scores['test']:,.1f}" for name, scores in results.baselines.items())
    print(f"test perplexity {results.perplexity['test']:,.1f} ({beside})")
    print(f"report: {write_report(results)}")
    return 0


def _given(argv: list[str]) -> dict[str, str]:
    """The options that decide where the settings start from, before the rest can be parsed."""
    found = {}
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in ("--recipe", "--config", "--out", "--resume"):
            if not equals and i + 1 == len(argv):
                raise InputError(f"{name} needs a value; see hmmlm train --help")
            found[name[2:]] = value if equals else argv[i + 1]
    return found


def _toml(path: str) -> str:
    if not path.endswith(".toml"):
        raise InputError(f"--config {path}: a recipe is a file that ends in .toml")
    return path


def _new_folder(given: dict[str, str], data: str) -> Path:
    name = given.get("recipe") or Path(given.get("config") or data).stem
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
