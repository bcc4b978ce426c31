"""The device that computes."""

import torch

from hmmlm.errors import InputError


def pick_device(name: str) -> torch.device:
    """Return the device for "auto" (a GPU if there is one), "cpu" or "cuda"."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device {name!r}: use 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not available: there is no CUDA device here; use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
