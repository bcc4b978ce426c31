"""Threads for compiled code that releases the interpreter's lock, as many as torch uses."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

T = TypeVar("T")


@cache
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, "hmmlm")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # the threads of the parent do not exist there


def run_parts(function: Callable[[int], T], count: int) -> list[T]:
    """Return function(k) for k = 0 … count − 1, each computed by a thread of its own, the first by this one."""
    if count == 1:
        return [function(0)]
    others = [_pool(count - 1).submit(function, k) for k in range(1, count)]
    try:
        first = function(0)
    finally:
        wait(others)  # after an error too: they write to arrays of the caller
    return [first, *(other.result() for other in others)]
