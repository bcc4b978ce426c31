"""Settings of all tests, and a report of what a test run did not cover."""

import os
import shutil
import sys
from importlib.util import find_spec

import pytest
from helpers.browser import BROWSERS

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: tests need no network
# Tests start many processes, each of which would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(params=["kernel", "library"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take steps of the Triton kernels as with few states, all in one, and as with many, by products of the library.

    The other implementations do the same with either.
    """
    if find_spec("triton"):
        from hmmlm.ops.scan import triton

        monkeypatch.setattr(triton, "LIBRARY_STATES", 1 if request.param == "library" else 2**20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not find_spec("triton"):
        terminalreporter.write_line("NOT COVERED: the Triton kernels; triton is not installed")
    if not any(map(shutil.which, BROWSERS)):
        terminalreporter.write_line("NOT COVERED: the explorer and the report in a browser; Chromium is not installed")
    elif not find_spec("playwright"):
        terminalreporter.write_line("NOT COVERED: the explorer in a browser; playwright is not installed")
