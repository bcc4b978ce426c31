"""Settings of all tests, and a report of what a test run did not cover."""

import os
from importlib.util import find_spec

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: tests need no network


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not find_spec("triton"):
        terminalreporter.write_line("NOT COVERED: the Triton kernels; triton is not installed")
