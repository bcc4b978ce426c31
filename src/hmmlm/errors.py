"""The error and the warning that users are meant to see."""


class InputError(ValueError):
    """Something given to hmmlm is wrong: the message names what, where, and what to do.

    The command line prints the message on one line and exits with code 2; from Python it is a ValueError.
    """


class InputWarning(UserWarning):
    """Something given to hmmlm may not mean what the user expects; the command line prints it on one line."""
