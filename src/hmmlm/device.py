"""The device that computes, the number of CPU threads, and memory."""

import contextlib
import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch

from hmmlm.arguments import check_type, describe
from hmmlm.errors import InputError
from hmmlm.section import MAX_THREADS

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # options of glibc's mallopt
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def pick_device(name: str | torch.device) -> torch.device:
    """Return the device for "auto" (a GPU if there is one), "cpu" or "cuda"; a torch.device is returned unchanged."""
    kind = name.type if isinstance(name, torch.device) else name
    if isinstance(kind, str) and kind.partition(":")[0] == "mps":
        raise InputError("device 'mps' has no float64, in which log-likelihoods are summed: use 'auto' or 'cpu'")
    if isinstance(name, torch.device):
        return name
    if not isinstance(name, str) or name not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device {describe(name)}: use 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not available: there is no CUDA device here; use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that this process has used on a GPU, or in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0  # not recorded
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU, or of the machine or container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_LIMITS:
        try:
            limits.append(int(file.read_text()))
        except (OSError, ValueError):  # no such control group, or no limit ("max")
            continue
    return min(limits)


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def set_threads(num: int) -> None:
    """Set the number of CPU threads of every computation; by default one per core."""
    check_type("the number of threads", num, int)
    if not 1 <= num <= MAX_THREADS:
        raise InputError(f"the number of threads must be an integer from 1 to {MAX_THREADS:,}, not {describe(num)}")
    torch.set_num_threads(num)


@cache
def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next training step, where it is glibc.

    It would otherwise return large tensors to the system, and the pages of the next ones be zeroed again: a fifth of
    the time of a step of 4,096 states.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_MMAP_MAX, 0)
