"""Checks of log-probabilities; every message names the tensor."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hmmlm.arguments import check_type, describe
from hmmlm.errors import InputError
from hmmlm.ops.common import capturing
from hmmlm.ops.pieces import at_once


def check_parameters(named: dict[str, Tensor], hint: str = "") -> None:
    """Raise an InputError unless all values are float32 tensors, or all float64 ones, on one device, and none is NaN.

    What is being trained is not searched for NaN: the training loop does that, without waiting for a GPU.
    """
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
            what = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{name} must be a float32 or float64 tensor, not {what}{hint}")
        check_type(name, value, Tensor)
    if len({(value.dtype, value.device) for value in named.values()}) > 1:
        *names, last = named
        raise InputError(f"{', '.join(names)} and {last} must share one dtype and device")
    if not any(value.requires_grad or capturing(value) for value in named.values()):
        for name, value in named.items():
            if value.numel() and bool(value.amax().isnan()):
                raise InputError(f"{name} contains NaN: the model is broken")


def check_distributions(log_probs: Tensor, name: str) -> None:
    """Raise an InputError unless every row (last dimension) sums to one, to the precision of its dtype."""
    rows = log_probs.detach().reshape(-1, log_probs.shape[-1])
    # Denormal numbers are slow, and pieces that fit a cache are read once.
    totals = torch.cat([part.clamp(min=-80).exp_().sum(1) for part in rows.split(at_once(rows.shape[1], 2**17))])
    # log_softmax on a CPU adds one by one, in at least 8 lanes: many equal small probabilities, such as those of words
    # that never occurred, are all rounded in the same direction.
    rounding = log_probs.shape[-1] * torch.finfo(log_probs.dtype).eps / 8
    tolerance = max(rounding, 1e-4 if log_probs.dtype == torch.float32 else 1e-6)
    check_totals(totals, tolerance, lambda row: f"{name} row {row}" if log_probs.dim() == 2 else name)


def check_totals(totals: Tensor, tolerance: float, name: Callable[[int], str]) -> None:
    """Raise an InputError unless the sums [n] of distributions are one; `name` returns the name of each."""
    wrong = ~((totals - 1).abs() <= tolerance)
    if bool(wrong.any()):
        row, count = int(wrong.nonzero()[0]), int(wrong.sum())
        total = totals[row].item()
        if math.isnan(total):
            raise InputError(f"{name(row)} contains NaN or negative probabilities")
        raise InputError(
            f"{name(row)} sums to {total if total > 1e-30 else 0:.6g}, not to one"
            + (f" ({count} such rows)" if count > 1 else "")
            + ": normalize it first"
        )


def check_finite(values: Tensor, name: str) -> None:
    """Raise an InputError if a tensor contains NaN or infinite values."""
    if values.numel():
        extremes = torch.stack(values.detach().aminmax())  # NaN if there is one; 20 times as fast as isfinite
        if not bool(extremes.isfinite().all()):
            raise InputError(f"{name} contains NaN or infinite values")


def move(values: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Return tensors on another device or in another dtype, like `Tensor.to`; the arguments are checked."""
    try:
        torch.empty(0).to(*args, **kwargs)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        given = ", ".join(map(describe, (*args, *kwargs.values())))
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"cannot move a model to {given}: give a device or a dtype ({reason:.80})") from None
    return [value.to(*args, **kwargs) for value in values]
