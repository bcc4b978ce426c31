"""Checks of user input; every message names what is wrong, where, and what to do."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_type, describe
from hmmlm.errors import InputError
from hmmlm.ops.blocked_scan import Factors
from hmmlm.ops.common import Carry, capturing

_PIECE = 2**17  # elements of a distribution that are summed at once
ArrayLike = Tensor | np.ndarray | Sequence[Any]
_VALIDATED_CELLS = 2**28  # products for the rows of a transition matrix that `check_factors` computes
_LARGEST = 1e18  # of a number that torch multiplies by: it takes integers of 64 bits
_NORMALIZER_TOLERANCE = 0.01  # of normalizers from TF32 products of large factors


def as_tensor(values: ArrayLike, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return `values` as a tensor; `dtype` applies only to values that are not a tensor yet."""
    if isinstance(values, Tensor):
        check_type(name, values, Tensor)
        return values
    try:
        return torch.as_tensor(values, dtype=dtype)
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be a tensor, an array or equally long lists of numbers: {error}") from None


def as_log_probs(values: ArrayLike, name: str) -> tuple[Tensor, torch.dtype]:
    """Return the logarithms of `values`, and the dtype to cast them to.

    The logarithm of lists and arrays is computed in float64: lists imply float32, in which 1e-300 would be zero.
    """
    dtype = as_tensor(values, name).dtype
    if dtype not in (torch.float32, torch.float64):
        dtype = torch.get_default_dtype()
    probs = as_tensor(values, name, torch.float64)
    if probs.dtype not in (torch.float32, torch.float64):
        probs = probs.to(dtype)
    if bool((probs < 0).any()) or not bool(probs.isfinite().all()):
        raise InputError(f"{name} contains negative, infinite or NaN entries: give probabilities")
    return probs.log(), dtype


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


def padded(sequences: Sequence[ArrayLike]) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, T] of sequences of different lengths, with −1 beyond each length, and the lengths [B]."""
    if isinstance(sequences, (str, bytes, dict, set, type)) or not hasattr(sequences, "__iter__"):
        raise InputError(f"sequences must be a list of lists of integers, not {describe(sequences)}")
    if isinstance(sequences, Tensor):
        check_type("sequences", sequences, Sequence[Any])
    rows = [row.tolist() if isinstance(row, (Tensor, np.ndarray)) else row for row in sequences]
    for i, row in enumerate(rows):
        if not isinstance(row, (list, tuple)):
            raise InputError(f"sequence {i} is {describe(row)}, not a list of integers")
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    try:
        values = np.array(list(chain.from_iterable(rows)))
    except ValueError:
        values = np.array(None)  # lists within sequences
    if values.size and (values.ndim != 1 or values.dtype.kind not in "iu"):
        raise InputError(f"tokens must be integers, not {values.dtype}")
    inside = np.arange(lengths.max(initial=0)) < lengths[:, None]
    tokens = np.full(inside.shape, -1, dtype=np.int64)
    tokens[inside] = values
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


def check_batch(
    tokens: ArrayLike, lengths: ArrayLike | None, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return checked tokens [B, T] and lengths [B] (None: all full); tokens may be lists of different lengths."""
    if isinstance(tokens, (list, tuple)) and all(isinstance(row, (list, tuple, Tensor, np.ndarray)) for row in tokens):
        sizes = [len(row) for row in tokens]
        if len(set(sizes)) > 1:
            if lengths is not None:
                raise InputError("the sequences have different lengths of their own: leave out lengths, or pad them")
            if 0 in sizes:
                raise InputError(f"sequence {sizes.index(0)} is empty: at least one token is needed")
            tokens, lengths = padded(tokens)
    checked = check_tokens(tokens, vocab_size, device)
    return checked, check_lengths(lengths, checked)


def check_tokens(tokens: ArrayLike, vocab_size: int, device: torch.device) -> Tensor:
    """Return tokens [B, T] as int64 on `device`; each must be −1 (missing) or 0 … vocab_size − 1."""
    tokens = as_tensor(tokens, "tokens")
    if not tokens.numel():  # before the dtype: an empty list becomes float32
        raise InputError(f"tokens of shape {list(tokens.shape)} are empty: at least one token is needed")
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
        raise InputError(f"tokens must be integers, not {str(tokens.dtype).removeprefix('torch.')}: use tokens.long()")
    if tokens.dim() != 2:
        hint = "; for one sequence use tokens[None]" if tokens.dim() == 1 else ""
        raise InputError(f"tokens must have shape [sequences, positions], not {list(tokens.shape)}{hint}")
    tokens = tokens.long()
    least, most = torch.stack(tokens.aminmax()).tolist()
    if least < -1 or most >= vocab_size:
        row, position = ((tokens < -1) | (tokens >= vocab_size)).nonzero()[0].tolist()
        raise InputError(
            f"token {tokens[row, position].item()} in sequence {row} at position {position} is outside the vocabulary "
            f"of size {vocab_size} (0 to {vocab_size - 1}; −1 for a missing token)"
        )
    return tokens.to(device)  # after the check: a GPU would have to be waited for


def check_lengths(lengths: ArrayLike | None, tokens: Tensor) -> Tensor | None:
    """Return lengths [B], each between 1 and T, or None if every sequence is full."""
    if lengths is None:
        return None
    lengths = as_tensor(lengths, "lengths")
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise InputError(f"lengths must be integers, not {str(lengths.dtype).removeprefix('torch.')}")
    if lengths.shape != tokens.shape[:1]:
        raise InputError(f"lengths must have shape [{tokens.shape[0]}], one per sequence, not {list(lengths.shape)}")
    lengths = lengths.to(tokens.device, torch.int64)
    wrong = (lengths < 1) | (lengths > tokens.shape[1])
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InputError(f"length {lengths[row].item()} of sequence {row} is not between 1 and {tokens.shape[1]}")
    return lengths


def check_carry(carry: Carry | None, tokens: Tensor, states: int) -> None:
    """Raise an InputError unless `carry` continues the sequences of tokens [B, T] in an HMM of `states` states."""
    if carry is None:
        return
    if not isinstance(carry, Carry) or not isinstance(carry.log_probs, Tensor):
        raise InputError(f"carry must be that of another window (`filter(…).carry`), not {describe(carry)}")
    log_probs, names = carry
    width = states if names is None else log_probs.shape[-1]
    if log_probs.shape != (len(tokens), width) or not log_probs.dtype.is_floating_point:
        raise InputError(f"carry.log_probs must have shape [{len(tokens)}, {width}], not {list(log_probs.shape)}")
    if names is not None and (names.shape != log_probs.shape or bool(((names < 0) | (names >= states)).any())):
        raise InputError(f"carry.states must have shape {list(log_probs.shape)} and numbers from 0 to {states - 1}")
    if log_probs.device != tokens.device:
        raise InputError(
            f"the carry is on {log_probs.device}, the model on {tokens.device}: use carry.to(model.device)"
        )
    possible = log_probs[~carry.is_lost]
    if possible.numel():
        check_distributions(possible, "carry.log_probs")


def check_distributions(log_probs: Tensor, name: str) -> None:
    """Raise an InputError unless every row (last dimension) sums to one, to the precision of its dtype."""
    rows = log_probs.detach().reshape(-1, log_probs.shape[-1])
    # Denormal numbers are slow, and pieces that fit a cache are read once.
    totals = torch.cat([part.clamp(min=-80).exp_().sum(1) for part in rows.split(max(1, _PIECE // rows.shape[1]))])
    # log_softmax on a CPU adds one by one, in at least 8 lanes: many equal small probabilities, such as those of words
    # that never occurred, are all rounded in the same direction.
    rounding = log_probs.shape[-1] * torch.finfo(log_probs.dtype).eps / 8
    tolerance = max(rounding, 1e-4 if log_probs.dtype == torch.float32 else 1e-6)
    check_totals(totals, tolerance, lambda row: f"{name}{row_name(log_probs, row)}")


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


def check_count(name: str, value: int, least: int, most: int = 2**63 - 1) -> None:
    """Raise an InputError unless `value` is an integer between `least` and `most`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name} must be an integer, not {describe(value)}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, not {value}")
    if value > most:
        raise InputError(f"{name} must be at most {most:,}, not {describe(value)}")


def check_number(name: str, value: float) -> None:
    """Raise an InputError unless `value` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value >= 0:
        raise InputError(f"{name} must be a number of at least 0, not {describe(value)}")
    if value > _LARGEST:
        raise InputError(f"{name} must be at most {_LARGEST:g}, not {describe(value)}")


def check_seed(seed: int | None, num: int = 1) -> None:
    """Raise an InputError unless `seed` is None, or it and the `num` − 1 after it are seeds of torch."""
    if seed is not None:
        check_count("seed", seed, -(2**63), 2**64 - num)


def check_generator(generator: object) -> None:
    """Raise an InputError unless `generator` is a torch.Generator or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator must be a torch.Generator, not {describe(generator)}: use torch.Generator().manual_seed(seed)"
        )


def check_log_state(log_state: Tensor, states: int, device: torch.device) -> None:
    """Raise an InputError unless `log_state` is a tensor of log-probabilities [..., states] on `device`."""
    if not isinstance(log_state, Tensor) or not log_state.dtype.is_floating_point or log_state.is_sparse:
        raise InputError(f"log_state must be a tensor of log-probabilities, not {describe(log_state)}")
    if log_state.device != device:
        raise InputError(f"log_state is on {log_state.device}, the model on {device}: use log_state.to(model.device)")
    if not log_state.dim() or log_state.shape[-1] != states:
        raise InputError(f"log_state must have shape [..., {states}], not {list(log_state.shape)}")


def move(values: Sequence[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Return tensors on another device or in another dtype, like `Tensor.to`; the arguments are checked."""
    try:
        torch.empty(0).to(*args, **kwargs)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        given = ", ".join(map(describe, (*args, *kwargs.values())))
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"cannot move a model to {given}: give a device or a dtype ({reason:.80})") from None
    return [value.to(*args, **kwargs) for value in values]


def check_words(tokens: Tensor, vocab_size: int) -> None:
    """Raise an InputError unless `tokens` is a tensor [n] of words of the vocabulary."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.dtype not in (torch.int32, torch.int64):
        raise InputError("tokens must be a tensor of integers [n]")
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        raise InputError(f"tokens must be between 0 and {vocab_size - 1}")


def row_name(values: Tensor, row: int) -> str:
    return f" row {row}" if values.dim() == 2 else ""


def check_factors(factors: Factors) -> None:
    """Raise an InputError that names the first tensor of a blocked HMM with a distribution that does not sum to one.

    Of a transition matrix so large that this would take longer than reading the model, rows spread over all states;
    the normalizers of the others must be within bounds, which any wrong number leaves that is wrong by far.
    """
    states, k = len(factors.log_start), factors.log_emission.shape[1]
    for name in ("u", "w", "log_normalizer"):
        check_finite(getattr(factors, name), name)
    check_distributions(factors.log_start, "log_start")
    tolerance = 1e-4 if factors.u.dtype == torch.float32 else 1e-6
    totals = factors.log_emission.new_zeros(states // k, k)
    totals.index_add_(0, factors.block_of_word, factors.log_emission.clamp(min=-80).exp_())
    check_totals(totals.flatten(), tolerance, lambda state: f"log_emission of state {state}")
    # Jensen's inequality from below, Cauchy and Schwarz's from above.
    least, most = factors.u @ factors.w.mean(0), factors.u.norm(dim=1) * factors.w.norm(dim=1).max()
    slack = _NORMALIZER_TOLERANCE + 1e-4 * most
    least, most = least + math.log(states) - slack, most + math.log(states) + slack
    outside = (~((least <= factors.log_normalizer) & (factors.log_normalizer <= most))).nonzero().flatten().tolist()
    if outside:
        found, low, high = (float(values[outside[0]]) for values in (factors.log_normalizer, least, most))
        raise InputError(
            f"log_normalizer of state {outside[0]} is {found:.4g}, but u and w allow {low:.4g} to {high:.4g}: "
            "normalize it first"
        )
    stride = max(1, states * factors.w.numel() // _VALIDATED_CELLS)
    scores = factors.u[::stride] @ factors.w.t() - factors.log_normalizer[::stride, None]
    check_totals(
        scores.exp_().sum(1),
        _NORMALIZER_TOLERANCE,
        lambda row: f"the transition from state {row * stride} by u, w and log_normalizer",
    )
