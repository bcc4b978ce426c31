"""Settings of recipes, runs and records, by dotted name such as `model.num_states`.

A run is what its settings resolve to: its recipe with the row's settings, and the defaults of everything else. Runs
are compared by that, so that it does not matter how a record or a plan spells them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmmlm.config.recipe import merge, recipe_names, recipe_values
from hmmlm.errors import InputError
from papers.renames import translate
from papers.study import BASELINE, NGRAM, Record, StudyRow, StudyRun
from papers.variants import VARIANTS, Variant

if TYPE_CHECKING:
    from hmmlm.config.training import TrainingConfig

FOLDER = Path(__file__).parent / "recipes"
CORPORA = ("embedded", "ptb", "wikitext-2")
PLACES = {"chosen", "data_folder", "tokenizer.file", "initialization.cache", "train.device", "train.tensorboard"}
"""Settings that say where something is, or is done, or who set it, not what is trained."""
BY_TEXT = ("model.", "optimizer.", "initialization.kind", "train.epochs", "train.restarts")
"""Beginnings of the names of settings that follow from the text where a command has no recipe and does not set them."""
REQUIRED = (".kind", ".teacher", "tokenizer.file")
"""Ends of the names of settings that a kind needs, or that choose one."""


def configuration(run: StudyRun) -> TrainingConfig:
    """Return the validated configuration of a run: its recipe with the row's settings and the seed."""
    return _configuration(run.row.recipe, {**run.row.settings, "train.seed": run.seed}, f"study row {run.row.name}")


def recorded_run(record: Record) -> StudyRun | None:
    """Return the run of a record, under present names; None if a benchmark made it."""
    recipe, settings = translate(record)
    if not _is_recipe(recipe):
        return None
    return StudyRun(StudyRow(name=record["row"], recipe=recipe, settings=settings), record.get("seed", 0))


def resolved_settings(run: StudyRun) -> dict[str, Any]:
    """Return all settings of a run by dotted name, as they are compared."""
    return _comparable({**_resolved(run.row.recipe, json.dumps(dict(run.row.settings))), "train.seed": run.seed})


def settings_of(config: TrainingConfig) -> dict[str, Any]:
    """Return all settings of a configuration by dotted name, as they are compared."""
    return _comparable(_flat(config))


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those of `PLACES`; of paths only the name."""
    return {name: _plain(name, value) for name, value in settings.items() if name not in PLACES}


def recipe_settings(recipe: str) -> dict[str, Any]:
    """Return all settings of a recipe by dotted name; none of what is not a recipe, such as a benchmark's path."""
    return planned_settings(recipe, {})


def planned_settings(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a recipe with changes, by dotted name.

    Only the changes if there is no such recipe, as for the path of a benchmark, or if they do not fit it.
    """
    try:
        return _resolved(recipe, json.dumps(dict(settings)))
    except InputError:
        return dict(settings)


def differences(record: Record, plan: StudyRow) -> dict[str, str]:
    """Return the settings in which a record differs from the plan of its row, as text."""
    run = recorded_run(record)
    if run is None:
        given, planned = dict(record.get("settings", {})), dict(plan.settings)
    else:
        given = resolved_settings(run)
        planned = resolved_settings(StudyRun(replace(plan, recipe=plan.recipe or run.row.recipe), run.seed))
    return {name: _text(value) for name, value in given.items() if _text(value) != _text(planned.get(name))}


def identity(run: StudyRun) -> str:
    """Return what tells the runs of a study apart: the row, and all settings that they resolve to."""
    settings = {name: _text(value) for name, value in resolved_settings(run).items()}
    return json.dumps([run.row.name, settings], sort_keys=True)


def flags(run: StudyRun) -> tuple[list[str], dict[str, Any]]:
    """Return the subcommand of `hmmlm` that makes a run, with the flag of its recipe, and the settings to change.

    These are all in which the run differs from its recipe with the kinds that the run has.
    """
    recipe, _ = _recipe_and_settings(run.row.recipe, {})
    target = _flat(configuration(run))
    words = [_kind(recipe).command]
    if _file(recipe).exists():
        words += ["--config", f"papers/recipes/{recipe}.toml"]
    elif recipe not in (BASELINE, NGRAM, ""):
        words += ["--recipe", recipe]
    plain = planned_settings(recipe, {})
    kinds = {
        name: value
        for name, value in target.items()
        if name.endswith(REQUIRED) and value is not None and plain.get(name) != value
    }
    if not recipe:
        kinds |= {name: value for name, value in target.items() if name.startswith(BY_TEXT) and value is not None}
    plain = planned_settings(recipe, kinds)
    seed = {"train.seed": target.pop("train.seed")}
    return words, kinds | {name: value for name, value in target.items() if plain.get(name, ...) != value} | seed


@cache
def _resolved(recipe: str, encoded: str) -> dict[str, Any]:
    if not _is_recipe(recipe):
        raise InputError(f"no recipe named {recipe!r}")
    return _flat(_configuration(recipe, json.loads(encoded), recipe))


def _configuration(recipe: str, settings: Mapping[str, Any], where: str) -> TrainingConfig:
    """Return a recipe with settings over it, as `hmmlm train` applies options to a recipe."""
    from hmmlm.config.training import read_config

    kind = _kind(recipe)
    name, own = _recipe_and_settings(recipe, settings)
    values: dict[str, Any] = {}
    if name not in (BASELINE, NGRAM, ""):
        file = _file(name)
        values = recipe_values(str(file) if file.exists() else name, command=kind.command)
    return read_config(kind, _override(kind, values, own), where)


def _recipe_and_settings(recipe: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the recipe that a variant is of, and the settings of both as sections and fields."""
    variant = VARIANTS.get(recipe, Variant(recipe, {}))
    return variant.recipe, _override(_kind(recipe), sections(variant.settings), sections(settings))


def _override(kind: type[TrainingConfig], values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    from hmmlm.config.training import drop_other_kinds

    return merge(drop_other_kinds(kind, values, over), over)


def _kind(recipe: str) -> type[TrainingConfig]:
    from hmmlm.config.networks import BaselineConfig  # here: they import torch, which lists of studies do not need
    from hmmlm.config.run import RunConfig
    from papers.ngrams import NgramConfig

    if recipe == NGRAM:
        return NgramConfig
    return BaselineConfig if recipe == BASELINE or recipe in recipe_names(BASELINE) else RunConfig


@cache
def _is_recipe(recipe: str) -> bool:
    return (
        recipe in ("", BASELINE, NGRAM, *VARIANTS, *recipe_names(), *recipe_names(BASELINE)) or _file(recipe).exists()
    )


def _file(recipe: str) -> Path:
    """Return the file of a recipe; it does not exist for a recipe of the package."""
    return FOLDER / f"{recipe}.toml"


def _flat(config: TrainingConfig) -> dict[str, Any]:
    from hmmlm.runs.folders import flat_settings

    return flat_settings(config.dump())


def sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as sections and fields."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        *parents, leaf = name.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise InputError(f"{parent} is a section and cannot be set to {section!r}: set a field, such as {name}")
        section[leaf] = value
    return values


def _plain(name: str, value: Any) -> Any:
    """Return a setting without the folders of its path; every folder of token files is the same data."""
    if name == "data":
        return value if value in CORPORA else "a folder"
    return Path(value).name if isinstance(value, str) and "/" in value else value


def _text(value: Any) -> str:
    """Return a setting as text: numbers may be recorded as strings."""
    if isinstance(value, bool) or value is None:
        return str(value)
    try:
        return f"{float(value):.12g}"
    except (TypeError, ValueError):
        return str(value)
