"""Refuse models that cannot fit, by arithmetic, before anything is allocated."""

from __future__ import annotations

import torch

from hmmlm.device import total_memory
from hmmlm.errors import InputError
from hmmlm.section import ModelSize


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
