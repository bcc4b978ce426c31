"""Settings of recipes, runs and records, by dotted name such as `model.states`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hmmlm.config.networks import BaselineConfig
from hmmlm.config.recipe import merge, recipe_names, recipe_values
from hmmlm.config.run import RunConfig
from hmmlm.config.training import drop_other_kinds, read_config
from hmmlm.errors import InputError
from hmmlm.runs.folders import flat_settings
from papers.renames import translate_settings
from papers.study import BASELINE, Record, StudyRun
from papers.variants import VARIANTS, Variant

FOLDER = Path(__file__).parent / "recipes"
Config = RunConfig | BaselineConfig


def configuration(run: StudyRun) -> Config:
    """Return the validated configuration of a run: its recipe with the row's settings and the seed."""
    return _configuration(run.row.recipe, {**run.row.settings, "train.seed": run.seed}, f"study row {run.row.name}")


def planned_settings(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a recipe with changes, by dotted name.

    Only the changes if there is no such recipe, as for the path of a benchmark, or if they do not fit it.
    """
    return _planned_settings(recipe, json.dumps(dict(settings)))


@cache
def _planned_settings(recipe: str, encoded: str) -> dict[str, Any]:
    settings = json.loads(encoded)
    try:
        return flat_settings(_configuration(recipe, settings, recipe).dump())
    except InputError:
        return dict(settings)


@cache
def recipe_settings(recipe: str) -> dict[str, Any]:
    """Return all settings of a recipe by dotted name; none of what is not a recipe, such as a benchmark's path."""
    return planned_settings(recipe, {})


def recipe_flags(run: StudyRun) -> tuple[list[str], dict[str, Any]]:
    """Return the subcommand of `hmmlm` that makes a run, with the flag of its recipe, and all settings over it."""
    recipe, own = _recipe_and_settings(run.row.recipe, {**run.row.settings, "train.seed": run.seed})
    if recipe == BASELINE:
        words = ["baseline"]
    elif _file(recipe).exists():
        words = ["train", "--config", f"papers/recipes/{recipe}.toml"]
    else:
        words = [_kind(recipe).command, "--recipe", recipe]
    return words, flat_settings(own)


def differences(record: Record, planned: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a record that are neither its recipe's nor the planned ones, as text."""
    recipe = record.get("recipe", "")
    plan = planned_settings(recipe, planned)
    given = {name: _text(value) for name, value in translate_settings(recipe, record.get("settings", {})).items()}
    return {name: value for name, value in given.items() if name not in plan or value != _text(plan[name])}


def _configuration(recipe: str, settings: Mapping[str, Any], where: str) -> Config:
    """Return a recipe with settings over it, as `hmmlm train` applies options to a recipe."""
    kind, values = _kind(recipe), {}
    name, own = _recipe_and_settings(recipe, settings)
    if recipe != BASELINE:
        file = _file(name)
        values = recipe_values(str(file) if file.exists() else name, command=kind.command)
    return read_config(kind, _override(kind, values, own), where)


def _recipe_and_settings(recipe: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the recipe that a variant is of, and the settings of both as sections and fields."""
    variant = VARIANTS.get(recipe, Variant(recipe, {}))
    return variant.recipe, _override(_kind(recipe), _sections(variant.settings), _sections(settings))


def _override(kind: type[Config], values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return merge(drop_other_kinds(kind, values, over), over)


def _kind(recipe: str) -> type[Config]:
    return BaselineConfig if recipe == BASELINE or recipe in recipe_names(BASELINE) else RunConfig


def _file(recipe: str) -> Path:
    """Return the file of a recipe; it does not exist for a recipe of the package."""
    return FOLDER / f"{recipe}.toml"


def _sections(settings: Mapping[str, Any]) -> dict[str, Any]:
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


def _text(value: Any) -> str:
    """Return a setting as text: numbers may be recorded as strings, and of a path only the name is compared."""
    if isinstance(value, bool) or value is None:
        return str(value)
    try:
        return f"{float(value):.12g}"
    except (TypeError, ValueError):
        return Path(value).name if "/" in str(value) else str(value)
