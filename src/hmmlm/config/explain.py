"""What is wrong with a configuration, in one line."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo


def member_types(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the sections that a field may hold: one, or the members of a union."""
    annotation = field.annotation
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if typing.get_origin(annotation) is typing.Union:
        members = typing.get_args(annotation)
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]


def explain(kind: type[BaseModel], error: ValidationError, name: Callable[[str], str] = str) -> str:
    """Return the first mistake as one line: an unknown field before a bad value, as the one often causes the other.

    `name` turns the dotted name of a field into how the user wrote it.
    """
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    path, section = _field_path(kind, first["loc"])
    field = name(".".join(path))
    if first["type"] == "extra_forbidden":
        whose = f" for {name(f'{path[0]}.kind')} = {section!r}" if section else ""
        return f"unknown setting {field}{whose}" + _hint(kind, path, name)
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        return f"{name(f'{path[0]}.kind')}: unknown kind {context['tag']!r}: use {context['expected_tags']}"
    if first["type"] == "missing":
        return f"{field}: required" + (f" for {name(f'{path[0]}.kind')} = {section!r}" if section else "")
    if not path:
        return reason
    given = "" if isinstance(first["input"], Mapping | BaseModel) else f" (given {_short(first['input'])})"
    return f"{field}: {reason}{given}".replace("\n", " ")


def _short(value: object) -> str:
    """Return a value for an error, without its middle if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no more than 4,300 digits
        text = f"a long {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:40]}…{text[-20:]}"


def _hint(kind: type[BaseModel], path: list[str], name: Callable[[str], str]) -> str:
    """Return the kinds that have an unknown setting, or else the setting with the nearest name."""
    if len(path) == 2 and path[0] in kind.model_fields:
        members = [m for m in member_types(kind.model_fields[path[0]]) if path[1] in m.model_fields]
        if members:
            return f"; it is a setting of {', '.join(repr(m.model_fields['kind'].default) for m in members)}"
    near = nearest_field(kind, path)
    return f"; did you mean {name(near)}?" if near else ""


def _field_path(kind: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], str]:
    """Return the names of a field from the location in an error, and the kind of the union's member it passes."""
    path, tag = [str(part) for part in location], ""
    if len(path) > 1 and path[0] in kind.model_fields and len(member_types(kind.model_fields[path[0]])) > 1:
        tag = path.pop(1)
    return path, tag


def nearest_field(kind: type[BaseModel], path: list[str]) -> str | None:
    """Return the dotted name of the valid field nearest to an unknown one: a sibling, else a field elsewhere."""
    *parents, leaf = path
    fields = list(field_names(kind))
    for candidates in ([f for f in fields if list(f[:-1]) == parents], fields):
        by_leaf = {f[-1]: f for f in reversed(candidates)}
        near = difflib.get_close_matches(leaf, by_leaf, n=1)
        if near and list(by_leaf[near[0]]) != path:
            return ".".join(by_leaf[near[0]])
    return None


def field_names(kind: type[BaseModel], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the names of all fields of a configuration, those of every member of its unions included."""
    for name, field in kind.model_fields.items():
        yield (*parents, name)
        for member in member_types(field):
            yield from field_names(member, (*parents, name))
