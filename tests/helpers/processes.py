"""Processes that are forked from one in which everything slow is done: they start at once."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

import pytest


def start_server() -> None:
    """Start the process that others are forked from, unless it runs; the code under test then uses it too."""
    multiprocessing.set_forkserver_preload(["helpers.preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def make_process(function: Callable[..., Any], *args: Any) -> BaseProcess:
    """Return a process that will run `function(*args)`, of the top level of a module."""
    start_server()
    return multiprocessing.get_context("forkserver").Process(target=function, args=args)


def run_process(function: Callable[..., Any], *args: Any) -> int | None:
    """Run `function(*args)` in a process of its own; return the exit code."""
    process = make_process(function, *args)
    process.start()
    process.join()
    return process.exitcode
