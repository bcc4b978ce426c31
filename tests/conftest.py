"""Says at the end of a test run what it did not cover."""

from importlib.util import find_spec

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not find_spec("triton"):
        terminalreporter.write_line("NOT COVERED: the Triton kernels; triton is not installed")
