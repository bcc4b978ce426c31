"""A run's configuration: the same object is read from a recipe (TOML), changed from the command line, and saved as
JSON beside every checkpoint."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hmmlm.errors import InputError
from hmmlm.learning.config_base import Section
from hmmlm.learning.config_initialization import InitializationConfig, KMeansConfig
from hmmlm.learning.sections import (
    BatchConfig,
    BaumWelchConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainConfig,
)

__all__ = [
    "BatchConfig", "BaumWelchConfig", "InitializationConfig", "KMeansConfig", "ModelConfig", "OptimizerConfig",
    "RunConfig", "ScheduleConfig", "Section", "TokenizerConfig", "TrainConfig", "config_from_dict", "config_to_dict",
    "load_recipe", "nearest_field", "recipe_names",
]  # fmt: skip


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values; `config_from_dict` is its inverse."""
    return config.model_dump(mode="json")


def config_from_dict(values: Mapping[str, Any], where: str = "configuration") -> RunConfig:
    """A validated configuration; fields left out keep their defaults. `where` names the source in errors."""
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise InputError(f"{where}: {_explain(error)}") from None


def load_recipe(name_or_file: str | Path) -> RunConfig:
    """A recipe that comes with the package, by name, or any TOML file; `extends = "name"` starts from another."""
    values, where = _recipe_values(str(name_or_file))
    return config_from_dict(values, where)


def _recipe_values(name: str, above: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    text, where = _read_recipe(name)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None
    base = values.pop("extends", None)
    if base is None:
        return values, where
    if base in above:
        raise InputError(f"{where}: extends {base!r}, which extends it in turn")
    return _merged(_recipe_values(str(base), (*above, name))[0], values), where


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the fields of `over` put over it, section by section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def recipe_names() -> list[str]:
    """Names of the recipes in the package, sorted."""
    return sorted(name for name, _ in _recipe_texts())


def _recipe_texts() -> Iterator[tuple[str, Any]]:
    folder = resources.files("hmmlm.experiments") / "recipes"
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.endswith(".toml"):
            yield entry.name.removesuffix(".toml"), entry


def _read_recipe(name: str) -> tuple[str, str]:
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8"), name
        except FileNotFoundError:
            raise InputError(f"recipe file {name} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"recipe file {name} cannot be read: {error}") from None
    recipes = dict(_recipe_texts())
    if name not in recipes:
        near = ", ".join(difflib.get_close_matches(name, recipes, n=3))
        hint = f"nearest: {near}" if near else "`hmmlm train --help` lists all"
        raise InputError(f"no recipe named {name!r}; {hint} (or give the path of a .toml file)")
    return recipes[name].read_text(encoding="utf-8"), f"recipe {name}"


def _explain(error: ValidationError) -> str:
    """The first thing wrong, on one line: an unknown field before a bad value, as the one often causes the other."""
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        near = nearest_field(path)
        return f"unknown field {'.'.join(path)!r}" + (f"; did you mean {near!r}?" if near else "")
    reason = first["msg"].removeprefix("Value error, ")
    if not path:
        return reason
    given = "" if isinstance(first["input"], Mapping | BaseModel) else f" (given {first['input']!r})"
    return f"{'.'.join(path)}: {reason}{given}".replace("\n", " ")


def nearest_field(path: list[str]) -> str | None:
    """Dotted name of the valid field nearest to an unknown one: a close sibling, else a close name elsewhere."""
    *parents, leaf = path
    fields = list(_field_names(RunConfig))
    siblings = {f[-1]: f for f in fields if list(f[:-1]) == parents}
    near = difflib.get_close_matches(leaf, siblings, n=1)
    if near:
        return ".".join(siblings[near[0]])
    elsewhere = {f[-1]: f for f in reversed(fields)}
    near = difflib.get_close_matches(leaf, elsewhere, n=1)
    return ".".join(elsewhere[near[0]]) if near else None


def _field_names(model: type[BaseModel], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*parents, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _field_names(field.annotation, (*parents, name))
