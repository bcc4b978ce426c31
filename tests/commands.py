"""Commands as a user runs them, for the tests."""

import re

import pytest

from hmmlm.cli.main import main


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail as promised: exit code 2 and one line; the line."""
    capsys.readouterr()
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"hmmlm: error: [^\n]+\n", error), error
    return error
