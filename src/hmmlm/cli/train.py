"""`hmmlm train`: a run from a recipe and the command line, or the rest of a run that was stopped."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hmmlm.cli.parse import parse
from hmmlm.errors import InputError
from hmmlm.learning.config import RunConfig, load_recipe, recipe_names
from hmmlm.learning.config_checks import check_files, unused
from hmmlm.learning.folders import new_folder, saved_config

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
    """A recipe that comes with the package: where the settings below start from. Without one --model.parameterization
    decides: default, default-neural, default-linear, default-mlp or default-transformer."""
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
    kind = given.get("model.parameterization", "scalar")
    usual = f"default-{kind}" if f"default-{kind}" in recipe_names() else "default"
    start = load_recipe(_toml(given["config"])) if "config" in given else load_recipe(given.get("recipe", usual))
    arguments = _parse(argv, start)
    check_files(arguments.run)  # also in training, but that takes seconds to import
    for line in unused(arguments.run, _settings(argv)):
        print(f"hmmlm: warning: {line}", file=sys.stderr)
    name = given.get("recipe") or Path(given.get("config") or arguments.run.data).stem
    with new_folder(arguments.out, "runs", name) as out:
        return _train(arguments.run, out, resume=False)


def _resume(argv: list[str], folder: Path) -> int:
    return _train(_parse(argv, saved_config(folder)).run, folder, resume=True)


SHORT = {"--init": "--initialization.kind", "--teacher": "--initialization.teacher"}


def _parse(argv: list[str], start: RunConfig) -> Arguments:
    for short, name in SHORT.items():
        argv = [name + given[len(short) :] if given.partition("=")[0] == short else given for given in argv]
    names = ", ".join(recipe_names())
    recipes = textwrap.fill(f"Settings start from a recipe; there are: {names}.", 79, break_on_hyphens=False)
    return parse(Arguments, argv, "train", DESCRIPTION.format(recipes=recipes), Arguments(run=start))


def _train(config: RunConfig, out: Path, resume: bool) -> int:
    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.experiments.report import write_report
    from hmmlm.experiments.results import gather
    from hmmlm.learning.progress import perplexity_text, terminal_progress
    from hmmlm.learning.trainer import train

    result = train(config, out, resume=resume, progress=terminal_progress())
    print(result.message)
    if not result.finished:
        return INTERRUPTED
    results = gather(out)
    beside = ", ".join(f"{name} {perplexity_text(scores['test'])}" for name, scores in results.baselines.items())
    print(f"test perplexity {perplexity_text(results.perplexity['test'])} ({beside})")
    if results.perplexity["valid"] > 0.98 * results.baselines["unigram"]["valid"]:
        print(
            "hmmlm: warning: the model has learned little more than how frequent words are (unigram): train for "
            "longer, or lower optimizer.rate if perplexity rose or stood still",
            file=sys.stderr,
        )
    print(f"report: {write_report(results)}")
    return 0


def _given(argv: list[str]) -> dict[str, str]:
    """The options that decide where the settings start from, before the rest can be parsed."""
    found = {}
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in ("--recipe", "--config", "--out", "--resume", "--model.parameterization"):
            if not equals and i + 1 == len(argv):
                raise InputError(f"{name} needs a value; see hmmlm train --help")
            found[name[2:]] = value if equals else argv[i + 1]
    return found


def _settings(argv: list[str]) -> list[str]:
    """Settings that the command line gives, as the configuration names them: model.blocks, batches.shuffle."""
    names = [argument.partition("=")[0][2:].replace("-", "_") for argument in argv if argument.startswith("--")]
    return [name.replace(".no_", ".") for name in names if "." in name]


def _toml(path: str) -> str:
    if not path.endswith(".toml"):
        raise InputError(f"--config {path}: a recipe is a file that ends in .toml")
    return path
