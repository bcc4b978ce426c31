"""Command lines into typed arguments by tyro, whose boxes of errors are condensed to the one line we promise."""

from __future__ import annotations

import difflib
import io
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from pydantic import ValidationError

from hmmlm.errors import InputError

T = TypeVar("T")
ModelPath = Annotated[
    tyro.conf.Positional[Path],
    tyro.conf.arg(metavar="MODEL", help="A saved model, or the folder of a training run (its best model)."),
]
_VALIDATION = re.compile(r"Error parsing (\S+): \d+ validation errors? for \w+ (.*?) \[type=.*?input_value=(.*?), inp")
_REASONS = (
    (r"no type matching \{None\}\|(\w+) could be instantiated from \['(.*)'\]", r"'\2' is not \1 or None"),
    (r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number"),
    (r"could not convert string to float: (.*)", r"\1 is not a number"),
)


def parse(kind: type[T], argv: list[str], command: str, description: str, default: T | None = None) -> T:
    """Arguments of type `kind`; `default` fills what the command line leaves out. Help is printed and exits."""
    if not {"-h", "--help"}.isdisjoint(argv):
        print(f"{description}\n")  # by us: tyro would run its lines together
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            return tyro.cli(
                kind,
                args=argv,
                prog=f"hmmlm {command}",
                description="",
                default=tyro.MISSING_NONPROP if default is None else default,
            )
    except SystemExit as end:
        if not end.code:  # help
            raise
    except ValidationError as error:  # of the outermost settings, which tyro lets through
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":  # a rule over several of them
            raise InputError(reason) from None
        option = ".".join(map(str, first["loc"])).replace("_", "-")
        raise InputError(f"--{option}: {reason} (given {first['input']!r}); see hmmlm {command} --help") from None
    raise InputError(f"{condense(captured.getvalue())}; see hmmlm {command} --help")


def resumed(argv: list[str], command: str) -> Path | None:
    """The run to go on with, before the rest can be parsed: its settings are where the others start from."""
    for i, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name == "--resume":
            if not equals and i + 1 == len(argv):
                raise InputError(f"--resume needs a value; see hmmlm {command} --help")
            return Path(value if equals else argv[i + 1])
    return None


def condense(boxed: str) -> str:
    """One line of what tyro says in a box: its first paragraph, and the option it takes to be meant."""
    lines = [line.strip("│ ") for line in boxed.splitlines() if not line.startswith(("╭", "╰"))]
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n[─-]{3,}\n", "\n".join(lines))]
    if "╭" not in boxed:  # where the terminal cannot draw boxes, the title is a paragraph
        paragraphs = paragraphs[1:]
    message = paragraphs[0].rstrip(".")
    # of a pydantic error, the field and the reason: the class, the type of the error and the link are for programmers
    found = _VALIDATION.match(message)
    if found:
        section, reason, given = found.groups()
        section = section.removeprefix("run.")  # of `hmmlm train`, whose settings have no prefix on the command line
        field, _, why = reason.partition(" ")
        if why.startswith("Value error, ") or field == "Value":  # a rule over several fields
            return f"{section}: {reason.removeprefix('Value error, ')}"
        return f"--{section}.{field.replace('_', '-')}: {why} (given {given})"
    unknown = re.match(r"Unrecognized options: ([^,\s]*)", message)
    if unknown and not unknown[1].startswith("-"):
        return f"unexpected argument {unknown[1]!r}"
    if unknown:
        named = re.findall(r"(--[\w.-]+)", " ".join(paragraphs[1:-1]))
        near = difflib.get_close_matches(unknown[1], named, n=1, cutoff=0.0)
        return f"unknown option {unknown[1]}" + (f"; did you mean {near[0]}?" if near else "")
    message = message.removeprefix("Error parsing ").split(". Got errors:")[0]
    for python_says, we_say in _REASONS:
        message = re.sub(python_says, we_say, message)
    return message
