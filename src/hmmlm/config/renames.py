"""Earlier settings, which saved and recorded runs still have: a table of renames by version, and one of removals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from hmmlm.errors import InputError, warn


class Renames(NamedTuple):
    """Names that changed between two versions."""

    until: str
    """The version that had the old names last."""
    settings: Mapping[str, str]
    """Old dotted name to new."""
    values: Mapping[str, Mapping[str, str]] = {}
    """Old value to new, by the new name of the setting."""


RENAMES = (
    Renames(
        until="0.1",
        settings={
            "model.parameterization": "model.kind",
            "model.factored": "model.block_embeddings",
            "initialization.alike": "model.max_initial_similarity",
            "initialization.shared": "initialization.cache",
            "schedule.warmup_tokens": "schedule.warmup",
            "schedule.warmup_fraction": "schedule.warmup",
            **{
                f"optimizer.baum_welch.{name}": f"optimizer.{name}"
                for name in ("full_batch", "step", "pseudocount", "momentum")
            },
            # Of neural baselines, whose settings were not in sections.
            **{name: f"batches.{name}" for name in ("batch_size", "length")},
            **{name: f"optimizer.{name}" for name in ("rate", "betas", "weight_decay", "clip")},
        },
        values={
            "model.form": {"code": "released", "paper": "printed"},
            "model.weights": {"pretrained": "all"},
        },
    ),
    Renames(
        until="0.2",
        settings={
            "model.states": "model.num_states",
            "optimizer.rate": "optimizer.lr",
            "optimizer.clip": "optimizer.max_grad_norm",
            "states": "num_states",  # of hmmlm distill and inspect; the others of sample and infill
            "num": "num_samples",
            "unknown": "allow_unk",
        },
    ),
)
"""Oldest first: add every rename here, under the version that is released when it is made."""


class Removed(NamedTuple):
    """A setting that no longer exists."""

    unused: Any
    """The value that means what every run does today: a saved configuration may have it."""
    advice: str
    """What to do instead of any other value."""


REMOVED = {
    "model.shard": Removed(False, "use blocks (model.blocks) where the matrices of a dense model do not fit in memory")
}
"""By dotted name."""


_NOTICED = set[str]()


def present_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration of the last version under present names, without removed settings.

    Raise an InputError that names a removed setting that is in use.
    """
    result, changed = dict(values), dict[str, str]()
    for old, new in RENAMES[-1].settings.items():
        section, _, field = old.rpartition(".")
        given, present = result.get(section) if section else result, new.rpartition(".")[2]
        if isinstance(given, Mapping) and field in given:
            if present in given:
                raise InputError(f"{old} is now {new}: give one of them")
            renamed = {present if name == field else name: value for name, value in given.items()}
            result = {**result, section: renamed} if section else renamed
            changed[old] = new
    _notice(changed)
    for name, (unused, advice) in REMOVED.items():
        section, _, field = name.partition(".")
        given = result.get(section)
        if isinstance(given, Mapping) and field in given:
            if given[field] != unused:
                raise InputError(f"{name} was removed: {advice}")
            result[section] = {other: value for other, value in given.items() if other != field}
    return result


def present_options(argv: Sequence[str], known: Collection[str] | None = None) -> list[str]:
    """Return a command line of the last version with the present names of its options.

    Args:
        known: the options of the command; None: all of them may be its own.
    """
    renamed = RENAMES[-1].settings.items()
    names = {_option(old, no): _option(new, no) for old, new in renamed for no in ("", "no-")}
    options = list(takewhile(lambda argument: argument != "--", argv))  # values follow
    parts = [argument.partition("=") for argument in options]
    used = {option for option, _, _ in parts if option in names and (known is None or names[option] in known)}
    for option in used & names.keys():
        if any(names[option] == other for other, _, _ in parts):
            raise InputError(f"{option} is now {names[option]}: give one of them")
    _notice({option: names[option] for option, _, _ in parts if option in used})
    present = [(names[option] if option in used else option) + equals + value for option, equals, value in parts]
    return [*present, *argv[len(options) :]]


def _option(name: str, no: str = "") -> str:
    return f"--{no}{name.replace('_', '-')}"


def _notice(changed: Mapping[str, str]) -> None:
    """Warn of names that changed, of each once in a process."""
    changed = {old: new for old, new in changed.items() if new.strip("-") not in _NOTICED}
    _NOTICED.update(new.strip("-") for new in changed.values())
    if changed:
        warn(f"renamed since {RENAMES[-1].until}: " + ", ".join(f"{old} is now {new}" for old, new in changed.items()))


def present_names(settings: Mapping[str, Any], renames: Sequence[Renames] = RENAMES) -> dict[str, Any]:
    """Return settings, by dotted name, under their present names and values; present ones do not change.

    Removed settings that are not in use are left out.
    """
    result = dict(settings)
    for version in renames:
        result = {version.settings.get(name, name): value for name, value in result.items()}
        for name, renamed in version.values.items():
            if isinstance(result.get(name), str):
                result[name] = renamed.get(result[name], result[name])
    return {name: value for name, value in result.items() if name not in REMOVED or value != REMOVED[name].unused}
