"""The `hmmlm` command: runs a subcommand, and turns every user error into one line and exit code 2."""

from __future__ import annotations

import difflib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from hmmlm.terminal import discard_output, printable, wrap_help

COMMANDS = {
    "demo": "train on text that comes with Python and show what was learned: start here",
    "train": "train a model on your own text or a known corpus; --resume continues a run",
    "eval": "perplexity of a model",
    "score": "log-probabilities of the lines and words of a text",
    "compare": "two models on the same text: the difference and its confidence interval",
    "runs": "the runs in a folder and their results",
    "sample": "text from a model",
    "infill": "the words that fit into the blanks of a text",
    "inspect": "the states of a model: their words, their successors, the states of a sentence",
    "explore": "a page in the browser: sentences, states, samples and the run of a model",
    "distill": "an HMM from a causal language model of Hugging Face, to steer it",
    "teacher": "train a transformer on the same text, to distill a model from",
    "baseline": "train an LSTM or a feed-forward model on the same text, to compare with",
    "join": "several models as one HMM: their union, mixed per sequence",
    "mix": "several models, an n-gram and a cache as one model: their interpolation per word",
    "ngram": "a Kneser-Ney n-gram of the same text: perplexity, ARPA files",
    "data": "write token files; get PTB or WikiText-2",
}
HELP = """usage: hmmlm COMMAND [OPTIONS]

Hidden Markov language models, exact and large.

{commands}

`hmmlm COMMAND --help` describes a command. Examples:
  hmmlm demo
  hmmlm train --data my.txt --model.num-states 512 --out runs/mine
  hmmlm train --resume runs/mine
  hmmlm eval runs/mine
  hmmlm sample runs/mine --num-samples 5 --prompt "The"
  hmmlm infill runs/mine "The ___ returns a list."
  hmmlm inspect runs/mine --text "The function returns a list."
  hmmlm explore runs/mine
"""
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for a process ended by these signals


def shorten_spinning() -> None:
    """Let idle OpenMP threads sleep early, unless the user chooses how long they spin; before torch is imported.

    With the default, training on two cores of which one is busy runs at a quarter to three quarters of the speed.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return the exit code."""
    if argv is None:
        shorten_spinning()
    try:
        _check_streams()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _dispatch(_check_unicode(list(sys.argv[1:] if argv is None else argv)))
        sys.stdout.flush()  # a closed pipe is noticed here, not while Python shuts down
        return code
    except KeyboardInterrupt:
        print("\nhmmlm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    except SystemExit as end:
        # Of rich, whose console has met a closed pipe; help, which argparse ends in this way, ends with 0.
        if end.code == 1 and isinstance(end.__context__, BrokenPipeError):
            discard_output()
            return BROKEN_PIPE
        raise
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        if _is_reported(error):
            return 2
        try:
            sys.stdout.flush()
        except OSError:  # a full disk: what was not written cannot be written while Python shuts down either
            discard_output()
        line = " ".join(message.split())  # no line breaks
        print(f"hmmlm: error: {printable(line)}", file=sys.stderr)
        return 2


def _check_streams() -> None:
    """Raise an InputError if standard output is closed; escape characters that its encoding lacks, such as ASCII."""
    from hmmlm.errors import InputError

    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    if sys.stdout is None:
        # Not discarded: the next file that is opened would take its number, and get what libraries print.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise InputError("standard output is closed: redirect it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_unicode(argv: list[str]) -> list[str]:
    """Return the arguments; raise an InputError that names one that is not valid UTF-8."""
    from hmmlm.errors import InputError

    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InputError(f"the argument {argument!r} {_explain_encoding(argument)}") from None
    return argv


def _explain_encoding(argument: str) -> str:
    """Return why Python could not decode an argument, and what to do."""
    try:
        os.fsencode(argument).decode()
    except UnicodeError:
        return "is not UTF-8: rename the file, or convert the text"
    encoding = sys.getfilesystemencoding()
    return f"is UTF-8, but this terminal is set to {encoding}: run with LC_ALL=C.UTF-8 or PYTHONUTF8=1"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning about what the user gave on one line, other warnings as Python does."""
    from hmmlm.errors import InputWarning

    if issubclass(category, InputWarning):
        print(f"hmmlm: warning: {printable(str(message))}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)


def _dispatch(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(wrap_help(HELP.format(commands="\n".join(f"  {c:10}{text}" for c, text in COMMANDS.items()))), end="")
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
    # Commands are imported when they are used, and an overview is printed without torch.
    command = import_module(f"hmmlm.cli.{name}")
    if rest in (["-h"], ["--help"]) and hasattr(command, "OVERVIEW"):
        print(wrap_help(command.OVERVIEW), end="")
        return 0
    from hmmlm.cli.parse import check_options, known_options
    from hmmlm.config.renames import present_options

    rest = present_options(rest, known_options(name))
    check_options(name, rest)
    return int(command.run(rest) or 0)


def _is_reported(error: Exception) -> bool:
    """Return whether another process of the run reports an error."""
    ranks = sys.modules.get("hmmlm.distributed.ranks")
    return ranks is not None and isinstance(error, ranks.FirstRankError)


def _explain(error: Exception) -> str | None:
    """Return the message for the user, or None for a bug, whose traceback is shown."""
    from hmmlm.errors import InputError

    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    text = str(error)
    no_memory = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
    if isinstance(error, MemoryError) or any(phrase in text for phrase in no_memory):
        return "not enough memory: use fewer states (--model.num-states), a smaller vocabulary or smaller batches"
    return None
