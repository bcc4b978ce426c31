"""Checks of user input; every message names what is wrong, where, and what to do."""

from collections.abc import Sequence
from itertools import chain
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hmmlm.arguments import check_type, describe, is_sequence
from hmmlm.errors import InputError
from hmmlm.numerics.distributions import check_distributions
from hmmlm.ops.common import Carry

ArrayLike = Tensor | np.ndarray | Sequence[Any]
_LARGEST = 1e18  # of a number that torch multiplies by: it takes integers of 64 bits


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


def as_batch(sequences: ArrayLike, lengths: ArrayLike | None) -> tuple[ArrayLike, ArrayLike | None, bool]:
    """Return tokens and lengths for `check_batch` of sequences in one of the forms of hmmlearn; others as they are.

    These are one sequence after another, [N] or [N, 1], with lengths that sum to N; without lengths, an array of one
    dimension or column is one sequence. The third result is whether they were in such a form.
    """
    if is_sequence(sequences) and (not isinstance(sequences, Tensor | np.ndarray) or sequences.dtype == object):
        sequences = list(sequences)  # a column of pandas or datasets, too
        nested = all(isinstance(row, list | tuple | Tensor | np.ndarray) for row in sequences)
        if nested and (lengths is None or any(len(row) != 1 for row in sequences) or len(lengths) == len(sequences)):
            return sequences, lengths, False
    values = as_tensor(sequences, "tokens")
    if values.dim() not in (1, 2) or values.shape[1:] not in ((), (1,)) or values.dtype.is_floating_point:
        return sequences, lengths, False
    sizes = [len(values)] if lengths is None else as_tensor(lengths, "lengths").flatten().tolist()
    if sum(sizes) != len(values) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise InputError(f"lengths must be positive integers that sum to the {len(values)} tokens")
    rows = values.long().flatten().split(sizes)
    return pad_sequence(rows, batch_first=True, padding_value=-1), torch.tensor(sizes), True


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


def make_generator(generator: object, seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return the source of random numbers of a query: `generator`, one of `seed`, or None for torch's own."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator must be a torch.Generator, not {describe(generator)}: use torch.Generator().manual_seed(seed)"
        )
    check_seed(seed)
    if seed is None:
        return generator
    if generator is not None:
        raise InputError("give generator or seed, not both")
    return torch.Generator(device).manual_seed(int(seed))


def check_log_state(log_state: Tensor, states: int, device: torch.device) -> None:
    """Raise an InputError unless `log_state` is a tensor of log-probabilities [..., states] on `device`."""
    if not isinstance(log_state, Tensor) or not log_state.dtype.is_floating_point or log_state.is_sparse:
        raise InputError(f"log_state must be a tensor of log-probabilities, not {describe(log_state)}")
    if log_state.device != device:
        raise InputError(f"log_state is on {log_state.device}, the model on {device}: use log_state.to(model.device)")
    if not log_state.dim() or log_state.shape[-1] != states:
        raise InputError(f"log_state must have shape [..., {states}], not {list(log_state.shape)}")


def check_words(tokens: Tensor, vocab_size: int) -> None:
    """Raise an InputError unless `tokens` is a tensor [n] of words of the vocabulary."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.dtype not in (torch.int32, torch.int64):
        raise InputError("tokens must be a tensor of integers [n]")
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        raise InputError(f"tokens must be between 0 and {vocab_size - 1}")


def check_text(name: str, text: object) -> None:
    """Raise an InputError unless `text` is a string of valid Unicode."""
    if not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} has a lone surrogate, {text[error.start]!r}, at position {error.start}") from None


def check_texts(texts: Sequence[str]) -> None:
    """Raise an InputError unless `texts` is a list of strings."""
    if isinstance(texts, str):
        raise InputError("texts must be a list of strings: write [text] for a single one")
    if not is_sequence(texts):
        raise InputError(f"texts must be a list of strings, not {describe(texts)}: write list(texts)")
    for i, text in enumerate(texts):
        check_text(f"texts[{i}]", text)
