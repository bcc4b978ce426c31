"""The one error that users are meant to see."""


class InputError(ValueError):
    """Something given to hmmlm is wrong: the message names what, where, and what to do.

    The command line prints the message on one line and exits with code 2; from Python it is a ValueError.
    """
