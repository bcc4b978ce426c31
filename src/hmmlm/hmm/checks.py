"""Checks of what users hand in; every message names what is wrong, where, and what to do."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.errors import InputError

ArrayLike = Tensor | np.ndarray | Sequence[Any]


def as_tensor(values: ArrayLike, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """`values`; what is not a tensor yet becomes one, of `dtype` where that is given."""
    try:
        return values if isinstance(values, Tensor) else torch.as_tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be a tensor, an array or equally long lists of numbers: {error}") from None


def as_log_probs(values: ArrayLike, name: str) -> tuple[Tensor, torch.dtype]:
    """Logarithms, and the dtype meant by `values`, to cast them to.

    The logarithm of what is not a tensor is taken in float64: lists mean float32, in which 1e-300 would be zero.
    """
    dtype = as_tensor(values, name).dtype
    if dtype not in (torch.float32, torch.float64):
        dtype = torch.get_default_dtype()
    probs = as_tensor(values, name, torch.float64)
    if probs.dtype not in (torch.float32, torch.float64):
        probs = probs.to(dtype)
    if bool((probs < 0).any()) or not bool(probs.isfinite().all()):
        raise InputError(f"{name} contains negative, infinite or NaN entries: probabilities are needed")
    return probs.log(), dtype


def check_tokens(tokens: ArrayLike, vocab_size: int, device: torch.device) -> Tensor:
    """tokens [B, T] as int64 on `device`; −1 (missing) or 0 … vocab_size − 1."""
    tokens = as_tensor(tokens, "tokens")
    if not tokens.numel():  # before the dtype, which an empty list has not
        raise InputError(f"tokens of shape {list(tokens.shape)} are empty: at least one token is needed")
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
        raise InputError(f"tokens must be integers, not {str(tokens.dtype).removeprefix('torch.')}: use tokens.long()")
    if tokens.dim() != 2:
        hint = "; for one sequence use tokens[None]" if tokens.dim() == 1 else ""
        raise InputError(f"tokens must have shape [sequences, positions], not {list(tokens.shape)}{hint}")
    tokens = tokens.to(device, torch.int64)
    wrong = (tokens < -1) | (tokens >= vocab_size)
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        raise InputError(
            f"token {tokens[row, position].item()} in sequence {row} at position {position} is outside the vocabulary "
            f"of size {vocab_size} (0 to {vocab_size - 1}; −1 for a missing token)"
        )
    return tokens


def check_lengths(lengths: ArrayLike | None, tokens: Tensor) -> Tensor | None:
    """lengths [B] between 1 and T, or None if every sequence is full."""
    if lengths is None:
        return None
    lengths = as_tensor(lengths, "lengths")
    if lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
        raise InputError(f"lengths must be integers, not {str(lengths.dtype).removeprefix('torch.')}")
    if lengths.shape != tokens.shape[:1]:
        raise InputError(f"lengths must have shape [{tokens.shape[0]}], one a sequence, not {list(lengths.shape)}")
    lengths = lengths.to(tokens.device, torch.int64)
    wrong = (lengths < 1) | (lengths > tokens.shape[1])
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(f"length {lengths[row].item()} of sequence {row} is not between 1 and {tokens.shape[1]}")
    return lengths


def check_initial(initial: ArrayLike | None, tokens: Tensor, like: Tensor) -> Tensor | None:
    """initial [B, Z], a distribution over states for each sequence."""
    if initial is None:
        return None
    initial = as_tensor(initial, "initial", torch.float64).to(like)
    if initial.shape != (tokens.shape[0], like.shape[0]):
        raise InputError(f"initial must have shape [{tokens.shape[0]}, {like.shape[0]}], not {list(initial.shape)}")
    return initial


def check_distributions(log_probs: Tensor, name: str) -> None:
    """Every row (last dimension) of log_probs sums to one, to the precision of its dtype."""
    rows = log_probs.detach().reshape(-1, log_probs.shape[-1])
    if bool(rows.isnan().any()):
        row = int(rows.isnan().any(1).nonzero()[0])
        raise InputError(f"{name}{row_name(log_probs, row)} contains NaN or negative probabilities")
    totals = rows.double().logsumexp(1).exp()
    tolerance = 1e-4 if log_probs.dtype == torch.float32 else 1e-6
    wrong = ~((totals - 1).abs() <= tolerance)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(
            f"{name}{row_name(log_probs, row)} sums to {totals[row].item():.6g}, not to one"
            + (f" ({int(wrong.sum())} such rows)" if int(wrong.sum()) > 1 else "") + ": normalise it first"
        )


def check_whole(name: str, value: int, least: int) -> None:
    if not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise InputError(f"{name} must be {least} or more, not {value}")


def row_name(values: Tensor, row: int) -> str:
    return f" row {row}" if values.dim() == 2 else ""
