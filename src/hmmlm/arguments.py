"""Checks of the arguments of public functions by their annotations; every message names the argument."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from hmmlm.errors import InputError, KeywordError

Function = TypeVar("Function", bound=Callable[..., Any])
_LENGTH = 60  # characters of a value that a message shows
_SHORT = 3  # items of a list that a message shows
_NOUNS = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Path: "a path",
    Tensor: "a tensor",
    dict: "a dictionary",
    type(None): "None",
}


def check_arguments(function: Function) -> Function:
    """Make a function raise an InputError that names the first argument that is not of its annotated type.

    Strings, mappings and sets are no sequences; a bool is no number. What is annotated as Any, or with a type that
    cannot be checked, is left to the function.
    """

    @cache  # on the first call: annotations may name what is defined later in their module
    def expected() -> tuple[tuple[str, ...], dict[str, Any], dict[str, Callable[[object], bool]]]:
        parameters = signature(function).parameters
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        named = {name: p.annotation for name, p in parameters.items() if p.kind in kinds and name != "self"}
        named = {name: hint for name, hint in named.items() if hint is not Parameter.empty}
        hints = get_type_hints(types.SimpleNamespace(__annotations__=named), function.__globals__)
        plain = {name: _test_of(hint) for name, hint in hints.items() if not _sequences_of(hint)}
        return tuple(parameters), hints, plain

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        names, hints, plain = expected()
        for name, value in chain(zip(names, args, strict=False), kwargs.items()):
            if name in plain and plain[name](value):
                continue
            if name in hints:
                check_type(name, value, hints[name])
        return function(*args, **kwargs)

    return cast(Function, checked)


def check_keywords(function: Function) -> Function:
    """Make a function with `**options: Unpack[…]` raise a KeywordError for a keyword that it does not have."""

    @cache
    def known() -> list[str]:
        own = [name for name, p in signature(function).parameters.items() if p.kind is not Parameter.VAR_KEYWORD]
        others = (get_args(hint)[0] for hint in get_type_hints(function).values() if get_origin(hint) is Unpack)
        return [*own[1:], *(name for options in others for name in options.__annotations__)]

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known():
            near = difflib.get_close_matches(name, known(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known())}"
            raise KeywordError(f"{function.__name__}() has no argument {name!r}; {hint}")
        return function(*args, **kwargs)

    return cast(Function, checked)


def check_type(name: str, value: object, kind: Any) -> None:
    """Raise an InputError unless `value` is of the type `kind`, elements of sequences included."""
    if not _test_of(kind)(value):
        if isinstance(value, Tensor) and _test_of(kind)(torch.empty(0)):
            raise InputError(f"{name} must be a dense tensor with values, not {describe(value)}")
        raise InputError(f"{name} must be {_noun(kind)}, not {describe(value)}")
    inners = [inner for inner, test in _sequences_of(kind) if test(value)]
    if len(inners) == 1:  # of several kinds, the function knows which
        (inner,), elements = inners, cast(Sequence[object], value)
        if inner is Any or all(type(element) is inner for element in elements):
            return
        for i, element in enumerate(elements):
            check_type(f"{name}[{i}]", element, inner)


def describe(value: object) -> str:
    """Return a value for the end of a message, short and on one line: as it is written in Python, or its type."""
    if isinstance(value, Tensor):
        special = [str(value.device)] * value.is_meta + ["sparse"] * (value.layout != torch.strided)
        return " ".join(["a", *special, "tensor", "of", "shape", str(list(value.shape))])
    if isinstance(value, int) and value.bit_length() > 3 * _LENGTH:  # Python writes no more than 4,300 digits
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, (list, tuple)) and len(value) <= _SHORT:
        items = ", ".join(map(describe, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, Real | str | bytes | None):
        text = repr(value)
        return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"an {name}" if name[0].lower() in "aeiou" or name.startswith("HMM") else f"a {name}"


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


@cache
def _test_of(kind: Any) -> Callable[[object], bool]:
    """Return the test whether a value is of a type; of sequences without regard to their elements."""
    if _is_union(kind):
        tests = [_test_of(each) for each in get_args(kind)]
        return lambda value: any(test(value) for test in tests)
    origin = get_origin(kind) or kind
    if origin is Literal:
        values = get_args(kind)
        return lambda value: isinstance(value, str | int) and value in values
    if origin is int or origin is float:
        number = Integral if origin is int else Real
        return lambda value: isinstance(value, number) and not isinstance(value, bool)
    if origin is Tensor:
        return lambda value: isinstance(value, Tensor) and not value.is_meta and value.layout == torch.strided
    if origin is Sequence:
        takes_bytes = get_args(kind) == (int,)
        return lambda value: is_sequence(value) or (takes_bytes and isinstance(value, bytes))
    if origin is Any or not isinstance(origin, type):
        return lambda value: True
    if getattr(origin, "_is_protocol", False):  # a class has the methods of its instances
        return lambda value: not isinstance(value, type) and isinstance(value, origin)
    return lambda value: isinstance(value, origin)


@cache
def _sequences_of(kind: Any) -> list[tuple[Any, Callable[[object], bool]]]:
    """Return the type of the elements of each sequence that a type allows, and the test for the sequence."""
    kinds = get_args(kind) if _is_union(kind) else (kind,)
    return [(get_args(each)[0], _test_of(each)) for each in kinds if get_origin(each) is Sequence]


def is_sequence(value: object) -> bool:
    """Return whether a value is a list, a tuple, an array or a tensor with a dimension, or the like."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        return False
    if isinstance(value, Tensor):
        return value.dim() > 0 and _test_of(Tensor)(value)
    return not isinstance(value, type) and getattr(value, "shape", None) != ()  # of an array of numpy


def _noun(kind: Any) -> str:
    if _is_union(kind):
        nouns = list(dict.fromkeys(_noun(each) for each in get_args(kind)))
        return " or ".join([", ".join(nouns[:-1]), nouns[-1]] if len(nouns) > 1 else nouns)
    origin = get_origin(kind) or kind
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if origin is Sequence:
        inner = get_args(kind)
        return "a list" if not inner or inner[0] is Any else f"a list, each item {_noun(inner[0])}"
    return _NOUNS.get(origin) or _with_article(getattr(origin, "__name__", str(origin)))
