"""Recipes: configurations as TOML files, in the package or of the user's own.

A recipe with `command = "baseline"` is one of `hmmlm baseline`, others are of `hmmlm train`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmmlm.config.renames import present_sections
from hmmlm.errors import InputError

if TYPE_CHECKING:
    from hmmlm.config.run import RunConfig

TRAIN = "train"
"""The command of recipes that name none."""
_FOLDER = resources.files("hmmlm.config") / "recipes"


def load_recipe(name_or_file: str | Path) -> RunConfig:
    """Return the configuration of a recipe: one of the package, by name, or any TOML file."""
    from hmmlm.config.run import RunConfig  # here: it imports torch, which the names of recipes do not need
    from hmmlm.config.training import read_config

    return read_config(RunConfig, recipe_values(str(name_or_file)), recipe_source(str(name_or_file)))


def recipe_source(name: str) -> str:
    """Return how errors name a recipe."""
    return name if name.endswith(".toml") else f"recipe {name}"


def recipe_names(command: str = TRAIN) -> list[str]:
    """Return the names of the recipes of a command in the package, sorted."""
    found = {entry.name.removesuffix(".toml"): entry for entry in _FOLDER.iterdir() if entry.name.endswith(".toml")}
    return sorted(
        name
        for name, entry in found.items()
        if tomllib.loads(entry.read_text(encoding="utf-8")).get("command", TRAIN) == command
    )


def recipe_values(name: str, above: tuple[str, ...] = (), command: str = TRAIN) -> dict[str, Any]:
    """Return the values that a recipe of a command sets.

    `extends = "name"` starts from a recipe of the package, `extends = "other.toml"` from a file in the same folder. A
    section of another kind than the base's keeps the fields that both kinds have.
    """
    where = recipe_source(name)
    text = _read_file(Path(name)) if name.endswith(".toml") else _read_packaged(name, command)
    try:
        values = present_sections(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    own = values.pop("command", TRAIN)
    if own != command:
        raise InputError(f"{where} is for `hmmlm {own}`, not for `hmmlm {command}`")
    identity = str(Path(name).resolve()) if name.endswith(".toml") else name
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise InputError(f"{where}: extends = {base!r}: give the name of a recipe or of a .toml file")
    base = str((Path(name).parent / base).resolve()) if base.endswith(".toml") else base
    if base in above or base == identity:
        raise InputError(f"{where}: extends {base!r}, which extends it in turn")
    from hmmlm.config.networks import BaselineConfig
    from hmmlm.config.run import RunConfig  # see `load_recipe`
    from hmmlm.config.training import drop_other_kinds

    kind = RunConfig if command == TRAIN else BaselineConfig
    return merge(drop_other_kinds(kind, _base_values(base, (*above, identity), where, command), values), values)


def _base_values(base: str, above: tuple[str, ...], where: str, command: str) -> dict[str, Any]:
    try:
        return recipe_values(base, above, command)
    except InputError as error:
        raise InputError(f"{where}: extends {base!r}: {error}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the fields of `over` put over it, section by section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _read_file(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise InputError(f"recipe {path} is not a file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"recipe file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe file {path} cannot be read: {error}") from None


def _read_packaged(name: str, command: str) -> str:
    entry = _FOLDER / f"{name}.toml"
    if "/" in name or not entry.is_file():
        known = recipe_names(command)
        near = ", ".join(difflib.get_close_matches(name, known, n=3))
        hint = f"nearest: {near}" if near else f"recipes: {', '.join(known)}"
        raise InputError(f"no recipe named {name!r}; {hint} (or give the path of a .toml file)")
    return entry.read_text(encoding="utf-8")
