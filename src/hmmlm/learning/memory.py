"""Refuse models that cannot fit, by arithmetic, before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hmmlm.errors import InputError
from hmmlm.section import ModelSize

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_memory(size: ModelSize, optimizer: str, device: torch.device) -> None:
    """Raise an InputError if training holds more than the memory of the device.

    A lower bound: parameters, with AdamW also gradients and two moments; and probabilities with their gradients or
    expected counts.
    """
    copies = 4 if optimizer == "adamw" else 1
    needed = 4 * (copies * size.parameters + 2 * size.probabilities)
    available = total_memory(device)
    if needed > available:
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise InputError(
            f"training this model takes at least {needed / 1e9:,.0f} GB, and {where} has {available / 1e9:,.0f} GB: "
            "use fewer states (--model.states), more blocks (--model.blocks), a narrower network (--model.hidden) or "
            "a smaller vocabulary (--tokenizer.vocab-size)"
        )


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
