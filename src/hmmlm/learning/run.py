"""Training and distilling from Python: `hmmlm.train` and `hmmlm.distill`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hmmlm.arguments import check_arguments
from hmmlm.config.defaults import names_of
from hmmlm.config.distill import DistillConfig
from hmmlm.config.explain import explain
from hmmlm.config.recipe import merge, recipe_values
from hmmlm.config.renames import present_sections
from hmmlm.config.run import RunConfig
from hmmlm.config.training import drop_other_kinds, read_config
from hmmlm.errors import InputError
from hmmlm.learning.distill import distill as distill_in_folder
from hmmlm.learning.train import train as train_in_folder
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.runs.folders import new_folder
from hmmlm.runs.loggers import Logger
from hmmlm.runs.progress import terminal_progress


@check_arguments
def train(
    data: str | Path = "embedded",
    out: str | Path | None = None,
    recipe: str | None = None,
    loggers: Sequence[Logger] = (),
    **settings: Any,
) -> LanguageModel:
    """Train a model as `hmmlm train` does, and return the best one by validation.

    Ctrl-C saves the run, then raises KeyboardInterrupt; `hmmlm train --resume OUT` continues it.

    Args:
        data: a corpus by name, a text file (one example per line), or a folder with train, valid and test files.
        out: the folder of the run; None: a new one in runs/.
        recipe: the settings to start from, by name or a .toml file; None: what is not set follows from the text.
        loggers: loggers of Lightning Fabric or Lightning (CSVLogger, WandbLogger, …), or objects with their methods
            log_hyperparams, log_metrics and finalize. They receive the configuration, and the figures of
            history.jsonl as "train/loss" or "valid/perplexity". A run that is resumed has none.
        settings: sections of the configuration, as in a recipe: model={"kind": "linear", "num_states": 512},
            train={"epochs": 3}.
    """
    given = present_sections({"data": str(data), **settings})
    if recipe is None:
        values: dict[str, Any] = {"chosen": names_of(given)}
    else:
        values = drop_other_kinds(RunConfig, recipe_values(recipe), given)
    config = read_config(RunConfig, merge(values, given), "hmmlm.train")
    with new_folder(None if out is None else Path(out), "runs", recipe or Path(data).stem) as folder:
        result = train_in_folder(config, folder, progress=terminal_progress(), loggers=loggers)
    if not result.finished:
        raise KeyboardInterrupt(f"saved; continue with: hmmlm train --resume {folder}")
    return load(folder, config.train.device)


@check_arguments
def distill(model: str | Path, out: str | Path | None = None, **settings: Any) -> LanguageModel:
    """Distill a causal language model of Hugging Face into an HMM as `hmmlm distill` does, and return it.

    Ctrl-C saves the run, then raises KeyboardInterrupt; `hmmlm distill --resume OUT` continues it.

    Args:
        model: a Hugging Face folder, a name on the hub, or a GGUF file.
        out: the folder of the run; None: a new one in runs/.
        settings: fields of `hmmlm.config.distill.DistillConfig`: tokens=1_000_000, num_states=1024, prompts="file.txt".
    """
    try:
        config = DistillConfig(model=str(model), **settings)
    except ValidationError as error:
        raise InputError(f"hmmlm.distill: {explain(DistillConfig, error)}") from None
    with new_folder(None if out is None else Path(out), "runs", Path(model).stem) as folder:
        result = distill_in_folder(config, folder, progress=terminal_progress())
    if not result.finished:
        raise KeyboardInterrupt(f"saved; continue with: hmmlm distill --resume {folder}")
    return load(folder, config.device)
