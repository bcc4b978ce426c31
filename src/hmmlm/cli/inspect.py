"""`hmmlm inspect`: the states of a model, and how it reads a sentence."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

from pydantic import PositiveInt

from hmmlm.cli.models import ModelArguments
from hmmlm.cli.parse import parse
from hmmlm.errors import InputError
from hmmlm.terminal import counted

DESCRIPTION = """Print the states of a model: the share of the tokens that each emits in the long run; its share of
the validation text (of up to 10,000 tokens), if that is in the run's folder; its most telling
words (by what they add to the mutual information of state and word); and the most likely next
states. With --contexts also places in the validation text where the model is in them; with --text
the most likely state of every word of a text, with its probability. --tags prints these states of
a whole file instead, a line for each of its lines, as `hmmlm train --labels` reads them.

examples:
  hmmlm inspect runs/mine
  hmmlm inspect runs/mine --contexts
  hmmlm inspect runs/mine --num-states 40 --text "The function returns a list."
  hmmlm inspect runs/mine --tags sentences.txt"""
LINES = 1_000  # tagged together


class InspectArguments(ModelArguments):
    num_states: PositiveInt = 20
    """Number of states shown, the most used first (in the validation text, or in the long run)."""
    words: PositiveInt = 8
    """Words per state."""
    contexts: bool = False
    """Show three places in the validation text for every state."""
    text: str | None = None
    """A sentence to explain."""
    tags: Path | None = None
    """A text file: print only the number of the most likely state of every token."""


def run(argv: list[str]) -> int:
    arguments = parse(InspectArguments, argv, "inspect", DESCRIPTION)

    from rich.console import Console

    from hmmlm.data.text import read_lines
    from hmmlm.data.tokenfile import TokenFile
    from hmmlm.lm.lm import load
    from hmmlm.report.contexts import contexts_table, text_share
    from hmmlm.report.explain import explain_states
    from hmmlm.report.results import run_folder
    from hmmlm.report.tables import path_table, states_table

    folder = run_folder(arguments.model)
    if arguments.contexts and folder is None:
        raise InputError(f"--contexts needs the text of a run, and {arguments.model} is not in one: leave it out")
    lm = load(arguments.model, arguments.device)
    if arguments.tags is not None:
        lines = read_lines(arguments.tags)
        while some := list(islice(lines, LINES)):
            found = iter(lm.states([line for line in some if line]))
            for line in some:
                print(*(state for _, state, _ in next(found)[:-1]) if line else ())  # without that of <eos>
        return 0
    summary = explain_states(lm, arguments.words)
    # Everything that can fail comes before anything is printed.
    tables = [] if arguments.text is None else [path_table(lm, summary, arguments.text)]
    text = None
    try:
        text = None if folder is None else TokenFile.open(folder / "data" / "valid", lm.tokenizer.fingerprint())
    except InputError:  # of another model, or damaged: an error only for those who ask for it
        if arguments.contexts:
            raise
    share = None if text is None else text_share(lm, text)
    if share is not None:
        summary = replace(summary, order=share.argsort(descending=True))
    if text is not None and arguments.contexts:
        tables.insert(0, contexts_table(lm, summary, arguments.num_states, text))
    console = Console()
    dtype = str(lm.hmm.dtype).removeprefix("torch.")
    console.print(
        f"{counted(lm.hmm.num_states, 'state')}, {counted(lm.hmm.vocab_size, 'word')} in the vocabulary, {dtype}"
    )
    console.print(states_table(lm, summary, arguments.num_states, share))
    for table in tables:
        console.print()
        console.print(table)
    return 0
