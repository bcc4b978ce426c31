"""Functions that run in several connected processes, as torchrun starts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

from helpers.processes import make_process
from hmmlm.distributed import ranks as ranks_module
from hmmlm.distributed.ranks import connected
from hmmlm.errors import InputError

DEADLINE = 120.0
"""Seconds after which ranks are ended; far more than any test takes."""


def start_ranks(count: int, function: Callable[..., None], *args: Any, wait: float = DEADLINE) -> list[BaseProcess]:
    """Start `function(*args)`, of the top level of a module, in `count` processes with the environment of torchrun.

    They wait `wait` seconds for each other in a step.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [make_process(_enter, rank, count, port, wait, function, args) for rank in range(count)]
    for process in ranks:
        process.start()
    return ranks


def end_ranks(ranks: list[BaseProcess]) -> list[int | None]:
    """Wait for processes, and return their exit codes."""
    for process in ranks:
        process.join(DEADLINE)
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    assert not late, "ranks wait for each other"
    return [process.exitcode for process in ranks]


def run_ranks(count: int, function: Callable[..., None], *args: Any) -> None:
    """Run `function(*args)` in `count` connected processes, none of which may fail."""
    assert end_ranks(start_ranks(count, function, *args)) == [0] * count


def _enter(rank: int, count: int, port: int, wait: float, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    numbers = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    ranks_module.COLLECTIVE_WAIT = timedelta(seconds=wait)
    try:
        with connected():
            function(*args)
    except InputError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        raise SystemExit(2) from None
