"""The `hmmlm` command: finds the subcommand, and turns every mistake of a user into one line and exit code 2."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "demo": "train on the corpus that comes with Python and show what was learnt: start here",
    "train": "train a model on a text of your own or a known corpus; --resume goes on with a run",
    "eval": "perplexity of a model",
    "sample": "text from a model",
    "infill": "the words that fit into the blanks of a text",
    "inspect": "the states of a model: their words, what follows them, the states of a sentence",
    "teacher": "train a transformer on the same text, to start a model from",
    "baseline": "train an LSTM or a feed-forward model on the same text, to compare with",
    "data": "prepare token files; get PTB or WikiText-2",
}
HELP = """usage: hmmlm COMMAND [OPTIONS]

Hidden Markov language models, exact and large.

{commands}

`hmmlm COMMAND --help` says more. Examples:
  hmmlm demo
  hmmlm train --data my.txt --model.states 512 --out runs/mine
  hmmlm train --resume runs/mine
  hmmlm eval runs/mine
  hmmlm sample runs/mine --num 5 --prompt "The"
  hmmlm infill runs/mine "The ___ returns a list."
  hmmlm inspect runs/mine --text "The function returns a list."
"""
# How long an idle OpenMP thread looks for work before it sleeps. By default that is so long that on two cores, one of
# them busy with something else, training is six times slower than with this (2,100 and 12,100 tokens a second; 38,000
# and 41,000 on idle ones). Read when torch is loaded.
SPIN = {"GOMP_SPINCOUNT": "10000"}
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for a process that these signals ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ.update(SPIN)
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # a closed pipe is noticed here, not while Python shuts down
        return code
    except KeyboardInterrupt:
        print("\nhmmlm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        print(f"hmmlm: error: {' '.join(message.split())}", file=sys.stderr)
        return 2


def _dispatch(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {c:10}{text}" for c, text in COMMANDS.items())), end="")
        return 0
    if name == "--version":
        from hmmlm import __version__

        print(f"hmmlm {__version__}")
        return 0
    if name not in COMMANDS:
        from hmmlm.errors import InputError

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
        raise InputError(f"unknown {'option' if name.startswith('-') else 'command'} {name!r}; {hint}")
    # Commands are imported when they are used: the help must not wait for torch.
    run = import_module(f"hmmlm.cli.{name}").run
    return int(run(rest) or 0)


def _explain(error: Exception) -> str | None:
    """What to tell the user, or None for a mistake of ours, which deserves its traceback."""
    from hmmlm.errors import InputError

    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    text = str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        return "not enough memory: use fewer states (--model.states), a smaller vocabulary or smaller batches"
    return None
