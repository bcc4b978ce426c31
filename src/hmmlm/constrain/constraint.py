"""Constraints on a line of text by name: words, choices, regular expressions, JSON schemas, lengths."""

from __future__ import annotations

import json as json_library
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, reduce
from operator import and_
from typing import Any, Literal, TypedDict, get_args

import torch

from hmmlm.arguments import describe
from hmmlm.constrain.automaton import Automaton
from hmmlm.constrain.budget import SLOW, spend
from hmmlm.constrain.regex import regex_automaton
from hmmlm.errors import InputError, require

Wanted = str | Sequence[str]
"""A word or phrase, or alternatives: ("dog", "dogs")."""
Match = Literal["word", "prefix", "substring"]
Bounds = tuple[int | None, int | None]
"""Smallest and largest number; None for no bound."""
MOST = 10_000  # words or tokens of a constraint
DEPTH = 3  # of recursion in a JSON schema
_LEAF = 30  # characters of the regular expression of a JSON value without parts
_BEFORE_WORD = r"(?s:.*[\x00-/:-@\[-\^`{-\x7f])?"  # a text that ends with a character outside words


class ConstraintOptions(TypedDict, total=False):
    """The arguments of `generate` and `guide` that constrain a line beside must and never; see `Constraint`."""

    match: Match
    choice: Sequence[str]
    regex: str
    json: str | dict[str, Any] | type
    words: Bounds
    tokens: Bounds
    suffix: str
    automaton: Automaton


@dataclass(frozen=True)
class Constraint:
    """What a line satisfies. `must` and `never` read the whole line, the others only what is new in it.

    The new text is what follows the prompt, without the space that separates the two.
    """

    must: Sequence[Wanted] = ()
    """Words or phrases that the line contains; of a tuple, one."""
    never: Sequence[str] = ()
    """Words or phrases that the line does not contain."""
    match: Match = "word"
    """How must and never match: whole words, beginnings of words ("prefix"), or anywhere ("substring")."""
    choice: Sequence[str] = ()
    """The new text is one of these."""
    regex: str | None = None
    """The new text matches this regular expression from beginning to end."""
    json: str | dict[str, Any] | type | None = None
    """The new text is JSON that this schema describes: a schema, its text, or a pydantic model."""
    words: Bounds = (None, None)
    """Number of words of the new text, separated by spaces."""
    tokens: Bounds = (None, None)
    """Number of new tokens, `<eos>` not counted."""
    suffix: str | None = None
    """The new text ends with this one: infilling between the prompt and the suffix."""
    automaton: Automaton | None = None
    """The new tokens, up to `<eos>`, are accepted."""

    def __post_init__(self) -> None:
        def set_field(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # the fields are frozen

        set_field("must", tuple(w if isinstance(w, str) else tuple(w) for w in _texts("must", self.must, True)))
        set_field("never", _texts("never", self.never))
        set_field("choice", _texts("choice", self.choice))
        if self.match not in get_args(Match):
            raise InputError(f"match must be one of {', '.join(get_args(Match))}, not {describe(self.match)}")
        for name in ("words", "tokens"):
            set_field(name, _bounds(name, getattr(self, name)))
        for name in ("regex", "suffix"):
            if not isinstance(getattr(self, name), str | None) or getattr(self, name) == "":
                raise InputError(f"{name}: give a string that is not empty, not {describe(getattr(self, name))}")
        if self.json is not None:
            set_field("json", _schema(self.json))
        if not isinstance(self.automaton, Automaton | None):
            raise InputError(f"automaton: give an Automaton, not a {type(self.automaton).__name__}")

    @property
    def names(self) -> list[str]:
        """The names of what is given."""
        return [f.name for f in fields(self) if f.name != "match" and getattr(self, f.name) != f.default]

    def __bool__(self) -> bool:
        return bool(self.names)

    def byte_automaton(self, optional_space: bool) -> Automaton | None:
        """Return the automaton over the bytes of the new text, which one space may precede; None if it is free."""
        parts = []
        if self.choice:
            parts.append(regex_automaton("|".join(map(re.escape, self.choice)), optional_space))
        if self.regex is not None:
            parts.append(regex_automaton(self.regex, optional_space))
        if self.json is not None:
            parts.append(regex_automaton(json_regex(str(self.json)), optional_space))
        if self.words != (None, None):
            parts.append(counted_words(*self.words))
        if self.suffix is not None:
            before = _BEFORE_WORD if re.match(r"\w", self.suffix) else "(?s:.*)"
            parts.append(regex_automaton(before + re.escape(self.suffix)))
        return reduce(and_, parts).minimized() if parts else None


def counted_words(least: int | None, most: int | None) -> Automaton:
    """Return the automaton over the bytes of texts with a number of words, separated by white space."""
    low = least or 0
    top = low if most is None else most
    # Automaton state 2n is between words after n of them, 2n + 1 in the nth; the last one rejects.
    count, lost = torch.arange(top + 1), 2 * top + 2
    further = torch.where(count < top, 2 * count + 3, lost if most is not None else 2 * top + 1)
    table = torch.stack([2 * count, further, 2 * count, 2 * count + 1], 1).view(-1, 2)
    table = torch.cat([table, torch.tensor([[lost, lost]])])
    accepting = torch.cat([(count >= low).repeat_interleave(2), torch.tensor([False])])
    class_of = torch.ones(256, dtype=torch.long)
    class_of[list(b" \t\n\r\v\f")] = 0
    return Automaton.of_classes(table, class_of, accepting)


def json_regex(schema: str) -> str:
    """Return a regular expression of the JSON texts that a schema describes, with recursion up to a depth."""
    require("json", "outlines_core", reader="json")
    from outlines_core.json_schema import build_regex_from_schema

    try:
        remedy = "list optional properties of the schema as required, or use fewer of them"
        spend(8 * SLOW * _regex_size(json_library.loads(schema)), remedy)
        return str(build_regex_from_schema(schema, None, DEPTH))
    except Exception as error:  # outlines-core raises its own errors, of several kinds
        raise InputError(f"json: the schema cannot be used: {str(error).splitlines()[0]}") from None


def _schema(schema: object) -> str:
    """Return a JSON schema, given as a dictionary, a string or a pydantic model, as text."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        content = json_library.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(content, dict):
            raise TypeError(f"it is a {type(content).__name__}")
        return json_library.dumps(content)
    except (RecursionError, TypeError, ValueError) as error:
        raise InputError(f"json: give a schema as a dictionary or its text: {error}") from None


def _regex_size(schema: dict[str, Any]) -> int:
    """Return about how many characters the regular expression of a schema has, references expanded up to a depth.

    Every optional property of an object is written once for each that may come first: 100 of them take half a minute,
    and 3,000 of them, or a few in an object that contains itself, gigabytes.
    """

    def size(part: Any, depth: int) -> int:
        if isinstance(part, list):
            return sum(size(each, depth) for each in part)
        if not isinstance(part, dict):
            return _LEAF
        total = sum(size(each, depth) for name, each in part.items() if name not in ("$defs", "definitions"))
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, dict):
            named = required if isinstance(required, list) else []
            total *= max(1, sum(name not in named for name in properties))
        return total + (size_of_target(part["$ref"], depth - 1) if isinstance(part.get("$ref"), str) and depth else 0)

    @cache
    def size_of_target(path: str, depth: int) -> int:
        target: Any = schema
        for step in filter(None, path.removeprefix("#").split("/")):
            target = target.get(step) if isinstance(target, dict) else None
        return size(target, depth)

    return size(schema, DEPTH)


def _bounds(name: str, bounds: Any) -> Bounds:
    """Return a pair of bounds; raise an InputError unless it is one."""
    pair = list(bounds) if isinstance(bounds, list | tuple) else []
    numbers = [bound for bound in pair if bound is not None]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MOST for n in numbers)
    if len(pair) != 2 or not whole:
        raise InputError(f"{name}: give (min, max), integers from 0 to {MOST:,} or None, not {describe(bounds)}")
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        raise InputError(f"{name}: {numbers[0]} to {numbers[1]} is empty: give the smaller number first")
    return pair[0], pair[1]


def _texts(name: str, texts: Any, several: bool = False) -> tuple[Any, ...]:
    """Return a list of strings as a tuple; with `several`, its items may be lists of strings."""
    if not isinstance(texts, (list, tuple)):
        raise InputError(f"{name}: give a list of words or phrases, not {describe(texts)}")
    for text in texts:
        if several and isinstance(text, (list, tuple)):
            _texts(f"an item of {name}", text)
            if not text:
                raise InputError(f"{name} has an empty list: remove it")
        elif not isinstance(text, str):
            raise InputError(f"{name}: give a list of words or phrases, not {describe(texts)}")
    return tuple(texts)
