"""`hmmlm inspect`: what the states of a model stand for, and how it reads a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from hmmlm.cli.parse import ModelPath, parse
from hmmlm.errors import InputError

DESCRIPTION = """The states of a model: the share of all tokens each emits, its most telling
words (by what they add to the mutual information of state and word), and the
states it most often goes on to. With --contexts also places in the validation
text of its run where it sees them; with --text the most likely state of every
word of a sentence, and how sure the model is of it.

examples:
  hmmlm inspect runs/mine
  hmmlm inspect runs/mine --contexts
  hmmlm inspect runs/mine --states 40 --text "The function returns a list." """


@dataclass(frozen=True)
class Arguments:
    model: ModelPath
    states: int = 20
    """How many states are shown, the most used first."""
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
    from hmmlm.experiments.contexts import contexts_table
    from hmmlm.experiments.explain import explain_states
    from hmmlm.experiments.tables import path_table, states_table
    from hmmlm.lm import load

    folder = run_folder(arguments.model) if arguments.contexts else None
    if arguments.contexts and folder is None:
        raise InputError(f"--contexts needs the text of a run, and {arguments.model} is not in one: leave it out")
    lm = load(arguments.model)
    states = explain_states(lm, arguments.words)
    console = Console()
    console.print(f"{lm.hmm.states:,} states, {lm.hmm.vocab_size:,} tokens, {lm.hmm.dtype}".replace("torch.", ""))
    console.print(states_table(lm, states, arguments.states))
    if folder is not None:
        console.print()
        text = TokenFile.open(folder / "data" / "valid", lm.tokenizer.fingerprint())
        console.print(contexts_table(lm, states, arguments.states, text))
    if arguments.text is not None:
        console.print()
        console.print(path_table(lm, states, arguments.text))
    return 0
