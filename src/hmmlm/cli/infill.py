"""`hmmlm infill`: the words that fit into the blanks of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from hmmlm.cli.parse import ModelPath, parse

DESCRIPTION = """The likeliest words for every blank ___ of a text, with their probabilities:
exact, given all that stands before and after, the end of the line included. A
blank is one token, which for some tokenizers is part of a word. What stands in
the other blanks is summed over.

examples:
  hmmlm infill runs/mine "The ___ returns a list."
  hmmlm infill runs/mine "The ___ returns a ___ ." --top 10"""


@dataclass(frozen=True)
class Arguments:
    model: ModelPath
    text: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TEXT", help="The text; ___ is a blank.")]
    top: int = 5
    """How many words a blank."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "infill", DESCRIPTION)

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hmmlm.lm import load

    table = Table(box=None, pad_edge=False)
    for name in ("blank", "word", "probability"):
        table.add_column(name, justify="left" if name == "word" else "right")
    for number, words in enumerate(load(arguments.model).infill(arguments.text, arguments.top), 1):
        for rank, (word, p) in enumerate(words):
            # Text, not markup: a word may well be "[/b]".
            table.add_row("" if rank else str(number), Text(word), f"{p:.4f}")
    Console().print(table)
    return 0
