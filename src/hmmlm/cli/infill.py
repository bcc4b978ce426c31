"""`hmmlm infill`: the words that fit into the blanks of a text."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic_settings import CliPositionalArg

from hmmlm.cli.models import ModelArguments
from hmmlm.cli.parse import parse

DESCRIPTION = """Print the most likely words for every blank ___ of a text, with their probabilities: exact, given
everything before and after, the end of the line included. A blank is one token, which is part of a
word with subword tokenizers. Other blanks are summed over.

examples:
  hmmlm infill runs/mine "The ___ returns a list."
  hmmlm infill runs/mine "The ___ returns a ___ ." --top 10 --no-allow-unk"""


class InfillArguments(ModelArguments):
    text: Annotated[CliPositionalArg[str], Field(description="The text; ___ is a blank.")]
    top: PositiveInt = 5
    """Words per blank."""
    allow_unk: bool = True
    """Whether <unk> may fill a blank; --no-allow-unk: probabilities given that it does not."""


def run(argv: list[str]) -> int:
    arguments = parse(InfillArguments, argv, "infill", DESCRIPTION)

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hmmlm.lm.lm import load
    from hmmlm.terminal import printable

    lm = load(arguments.model, arguments.device)
    table = Table(box=None, pad_edge=False)
    for name in ("blank", "word", "probability"):
        table.add_column(name, justify="left" if name == "word" else "right")
    for number, words in enumerate(lm.infill(arguments.text, arguments.top, arguments.allow_unk), 1):
        for rank, (word, p) in enumerate(words):
            # Text, not markup: a word may be "[/b]".
            table.add_row("" if rank else str(number), Text(printable(word)), f"{p:.4f}")
    Console().print(table)
    return 0
