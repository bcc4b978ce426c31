"""Training from Python: `hmmlm.train` is the command `hmmlm train`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hmmlm.arguments import check_arguments
from hmmlm.checks import check_texts
from hmmlm.cli.train import train_and_report
from hmmlm.cli.training import TrainArguments
from hmmlm.config.explain import explain
from hmmlm.config.renames import present_sections
from hmmlm.config.run import RunConfig
from hmmlm.data.files import write_bytes
from hmmlm.data.public import data_folder
from hmmlm.errors import InputError
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.runs.loggers import Logger


@check_arguments
def train(
    data: str | Path | Sequence[str] = "embedded",
    out: str | Path | None = None,
    recipe: str | None = None,
    loggers: Sequence[Logger] = (),
    **settings: Any,
) -> LanguageModel:
    """Train a model as the command `hmmlm train` does, with its report, and return the best one by validation.

    Ctrl-C saves the run, then raises KeyboardInterrupt; resume="OUT" continues it.

    Args:
        data: a corpus by name, a text file (one example per line), a folder with train, valid and test files, or a list
            of texts, such as a column of pandas or datasets, which is kept in the cache folder.
        out: the folder of the run; None: a new one in runs/.
        recipe: the settings to start from, by name or a .toml file; None: those of the command.
        loggers: loggers of Lightning Fabric or Lightning (CSVLogger, WandbLogger, …), or objects with their methods
            log_hyperparams, log_metrics and finalize. They receive the configuration, and the figures of
            history.jsonl as "train/loss" or "valid/perplexity". A run that is resumed by the command has none.
        settings: sections of the configuration, as in a recipe: model={"kind": "linear", "num_states": 512},
            train={"epochs": 3}; resume and quiet as on the command line.
    """
    for name in {"dry_run", "threads"} & settings.keys():
        raise InputError(f"hmmlm.train: {name} is an option of the command alone")
    named = str(data if isinstance(data, str | Path) else _keep(data, settings.get("text")))
    given = {"data": None if named == "embedded" else named, "out": out, "recipe": recipe, **present_sections(settings)}
    try:
        arguments = TrainArguments(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise InputError(f"hmmlm.train: {explain(RunConfig, error)}") from None
    result = train_and_report(arguments, loggers)
    if not result.finished:
        raise KeyboardInterrupt(f"saved; continue with: hmmlm train --resume {result.out}")
    return load(result.out, arguments.train.device)


def _keep(texts: Sequence[str], section: Any) -> Path:
    """Write texts to a file in the cache folder, named by its content, and return it."""
    check_texts(texts)
    unit = section.get("unit", "line") if isinstance(section, dict) else "line"
    content = {"line": "\n", "paragraph": "\n\n"}.get(unit, "\n\n\n").join(texts).encode()
    path = data_folder(None) / "texts" / f"texts-{hashlib.sha256(content).hexdigest()[:12]}.txt"
    if not path.exists():
        write_bytes(path, content)
    return path
