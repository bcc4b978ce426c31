"""Texts as a terminal shows them: without control characters, wrapped, in tables; output that nobody reads."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

MAX_WIDTH = 100
"""Columns of help at most."""
_MIN_WIDTH = 20
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Escape the control characters of a text: a terminal would obey them, and a font has no glyphs for them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 2,000 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def time_text(seconds: float) -> str:
    """Return a time with two digits: 250 ms, 34 s, 5.2 min, 3.1 h."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{float(f'{1e3 * seconds:.2g}'):g} ms" if seconds < 0.995 else f"{float(f'{seconds:.2g}'):g} s"


def without_controls(text: str) -> str:
    """Escape the control characters of a text except line breaks and tabs, so that a terminal does not obey them."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def help_width() -> int:
    """Return the columns of help: those of the terminal (or COLUMNS), from 20 to 100."""
    return max(_MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns))


def wrap_help(text: str) -> str:
    """Wrap a help of prose and lists of two columns to `help_width`; one that fits stays as it was written."""
    width = help_width()
    if max(map(len, text.splitlines()), default=0) <= width:
        return text
    paragraphs = re.sub(r"^(\S.*)\n(?=\S)", r"\1 ", text, flags=re.MULTILINE)
    entries = re.sub(r"\n {8,}(?=\S)", " ", paragraphs)  # lines that continue a second column
    return "".join(_wrap_line(line, width) for line in entries.splitlines(keepends=True))


def _wrap_line(line: str, width: int) -> str:
    """Wrap a line; it continues below its second column, if there is room, or a little to the right.

    Examples stay on one line, to be copied.
    """
    if len(line.rstrip()) <= width or line.lstrip().startswith("hmmlm "):
        return line
    first = re.match(r"( *\S.*?)  +(?=\S)", line)
    indent = "    " if line.startswith(" ") else ""
    if first and len(first[0]) <= width // 2:
        return _fill(line, width, " " * len(first[0]))
    if first:
        return f"{first[1]}\n" + _fill(indent + line[first.end() :], width, indent)
    return _fill(line, width, indent)


def _fill(line: str, width: int, indent: str) -> str:
    filled = textwrap.fill(
        line.rstrip(), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return f"{filled}\n"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> None:
    """Print a table on standard output: names in the first column, then figures, aligned to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, caption=caption or None, caption_justify="left", caption_style="")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, *figures in rows:
        table.add_row(Text(printable(name)), *figures)  # not markup: a file may be named "[red].txt"
    Console().print(table)


def discard_output() -> None:
    """Discard what could not be written to standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
