"""`hmmlm inspect`: what the states of a model stand for, and how it reads a sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hmmlm.cli.parse import ModelPath, parse
from hmmlm.errors import InputError

DESCRIPTION = """The states of a model: the share of the tokens that each emits in the long run,
where the model writes the text; its share of the validation text (of up to
10,000 tokens), if that is in the run's folder; its most telling words (by what
they add to the mutual information of state and word); and the states it most
often goes on to. With --contexts also places in the validation text where the
model sees them; with --text the most likely state of every word of a text, and
how sure the model is of it.

examples:
  hmmlm inspect runs/mine
  hmmlm inspect runs/mine --contexts
  hmmlm inspect runs/mine --states 40 --text "The function returns a list." """


@dataclass(frozen=True)
class Arguments:
    model: ModelPath
    states: int = 20
    """How many states are shown, the most used first (in the validation text, or in the long run)."""
    words: int = 8
    """Words a state."""
    contexts: bool = False
    """Show three places in the text for every state; they are in the run's folder."""
    text: str | None = None
    """A sentence to read."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "inspect", DESCRIPTION)
    for name in ("states", "words"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name} must be 1 or more, not {getattr(arguments, name)}")

    from rich.console import Console

    from hmmlm.cli.models import run_folder
    from hmmlm.data.tokenfile import TokenFile
    from hmmlm.experiments.contexts import contexts_table, text_share
    from hmmlm.experiments.explain import explain_states
    from hmmlm.experiments.tables import path_table, states_table
    from hmmlm.lm import load

    folder = run_folder(arguments.model)
    if arguments.contexts and folder is None:
        raise InputError(f"--contexts needs the text of a run, and {arguments.model} is not in one: leave it out")
    lm = load(arguments.model)
    states = explain_states(lm, arguments.words)
    # Everything that can fail before anything is printed.
    tables = [] if arguments.text is None else [path_table(lm, states, arguments.text)]
    text = None
    try:
        text = None if folder is None else TokenFile.open(folder / "data" / "valid", lm.tokenizer.fingerprint())
    except InputError:  # of another model, or damaged: only those who ask for it need to know
        if arguments.contexts:
            raise
    share = None if text is None else text_share(lm, text)
    if share is not None:
        states = replace(states, order=share.argsort(descending=True))
    if text is not None and arguments.contexts:
        tables.insert(0, contexts_table(lm, states, arguments.states, text))
    console = Console()
    console.print(f"{lm.hmm.states:,} states, {lm.hmm.vocab_size:,} tokens, {lm.hmm.dtype}".replace("torch.", ""))
    console.print(states_table(lm, states, arguments.states, share))
    for table in tables:
        console.print()
        console.print(table)
    return 0
