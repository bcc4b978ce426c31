"""The error and the warning that users are meant to see."""

import importlib.util
import sys
import warnings


class InputError(ValueError):
    """Something given to hmmlm is wrong: the message names what, where, and what to do.

    The command line prints the message on one line and exits with code 2; from Python it is a ValueError.
    """


class ImpossibleError(InputError):
    """A sequence has probability zero."""

    def __init__(self, sequence: int, position: int, what: str) -> None:
        super().__init__(
            f"sequence {sequence} is impossible under this model: {what} at position {position} has probability zero "
            "given the tokens before it"
        )
        self.sequence, self.position = sequence, position


class QueryError(InputError, AttributeError):
    """A model is asked what its kind cannot answer; an AttributeError too, so that `hasattr` is False."""


class KeywordError(InputError, TypeError):
    """A function is given a keyword that it does not have; a TypeError too."""


def require(extra: str, *packages: str, reader: str) -> None:
    """Raise an InputError unless the packages of an extra are installed; `reader` is what needs them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError(
            f"{reader} needs {' and '.join(missing)}, which the extra hmmlm[{extra}] installs: "
            f"pip install 'hmmlm[{extra}]'"
        )


class InputWarning(UserWarning):
    """Something given to hmmlm may not mean what the user expects; the command line prints it on one line."""


def warn(message: str) -> None:
    """Issue an InputWarning, shown at the line outside hmmlm and torch that called."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("hmmlm", "torch"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, InputWarning, stacklevel=depth + 1)
