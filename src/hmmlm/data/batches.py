"""Batches of a token file: contiguous streams with carried state, or disjoint shuffled chunks.

Both know every batch of every epoch from (seed, epoch, index) alone, so that a run can resume at any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenfile import TokenFile
from hmmlm.errors import InputError


class Batch(NamedTuple):
    """`carry`: position 0 continues from the previous batch's final filtered distribution, row by row; where this
    batch has fewer rows than the previous one, its rows are the first ones."""

    tokens: Tensor  # [B,T] int64; −1 beyond a row's length
    lengths: Tensor | None  # [B] int64; None when every row is full
    restart: Tensor | None  # [B,T] bool, True where the chain starts again from π; None when it never does
    carry: bool


class StreamBatches:
    """Documents, shuffled every epoch, concatenated, cut into `batch_size` contiguous streams, read in windows.

    Stream b covers [b·L, min((b+1)·L, N)) with L = ceil(N / batch_size): every token once an epoch. With `whole` (for
    evaluation, in order) each cut is moved on to the next end of an example: where the chain restarts there, nothing
    depends on where the streams are cut, nor on how many there are. Only the last windows are ragged, and streams that
    end early are the last rows, which are then left out.
    """

    def __init__(
        self,
        token_file: TokenFile,
        batch_size: int,
        length: int,
        *,
        shuffle: bool,
        reset_at_eos: bool,
        eos_id: int,
        seed: int,
        whole: bool = False,
    ) -> None:
        _check_sizes(batch_size, length)
        if len(token_file) < batch_size:
            raise InputError(
                f"{token_file.name} has {len(token_file)} tokens, too few for {batch_size} streams: "
                f"set --batches.batch-size to {len(token_file)} or less"
            )
        if not 0 <= eos_id < token_file.vocab_size:
            raise InputError(f"eos_id {eos_id} is outside the vocabulary of {token_file.vocab_size}")
        self._file, self._length = token_file, length
        self._shuffle, self._reset_at_eos, self._eos_id, self._seed = shuffle, reset_at_eos, eos_id, seed
        per_stream = -(-len(token_file) // batch_size)
        starts = np.minimum(np.arange(batch_size, dtype=np.int64) * per_stream, len(token_file))
        if whole:
            begins = np.append(np.flatnonzero(token_file.tokens == eos_id) + 1, len(token_file))
            starts[1:] = begins[np.searchsorted(begins, starts[1:])]
        sizes = np.diff(starts, append=len(token_file))
        longest_first = np.argsort(-sizes, kind="stable")
        self._starts, self._sizes = starts[longest_first], sizes[longest_first]
        self.steps_per_epoch = -(-int(self._sizes[0]) // length)
        self.tokens_per_epoch = len(token_file)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from index `start` on, the same as those of a full iteration."""
        _check_start(start, self.steps_per_epoch)
        order = _Order(self._file, self._seed, epoch) if self._shuffle else None
        return (self._batch(step, order) for step in range(start, self.steps_per_epoch))

    def _batch(self, step: int, order: _Order | None) -> Batch:
        begin = step * self._length
        lengths = np.clip(self._sizes - begin, 0, self._length)
        rows = int(np.count_nonzero(lengths))
        # one position before the window as well: a restart depends on the token before
        lead = int(self._reset_at_eos and step > 0)
        offsets = np.arange(begin - lead, begin + int(lengths[0]), dtype=np.int64)
        places = self._starts[:rows, None] + offsets
        places = np.minimum(places, len(self._file) - 1)
        window = self._file.tokens[places if order is None else order.places(places)].astype(np.int64)
        tokens = window[:, lead:]
        beyond = np.arange(tokens.shape[1]) >= lengths[:rows, None]
        tokens[beyond] = -1
        restart = None
        if self._reset_at_eos:
            restart = np.zeros(tokens.shape, dtype=bool)
            restart[:, 1 - lead :] = window[:, :-1] == self._eos_id
            restart[beyond] = False
        return Batch(
            torch.from_numpy(np.ascontiguousarray(tokens)),
            torch.from_numpy(lengths[:rows]) if beyond.any() else None,
            None if restart is None else torch.from_numpy(restart),
            carry=step > 0,
        )


class ChunkBatches:
    """Disjoint chunks of `length` tokens, shuffled every epoch, each starting from π.

    What is left over is a shorter chunk, always the last row of the last batch; `drop_last` leaves out both it and
    a last batch of fewer rows.
    """

    def __init__(
        self, token_file: TokenFile, batch_size: int, length: int, *, shuffle: bool, drop_last: bool, seed: int
    ) -> None:
        _check_sizes(batch_size, length)
        full, rest = divmod(len(token_file), length)
        if drop_last:
            full, rest = full - full % batch_size, 0
        if not full and drop_last:
            raise InputError(
                f"{token_file.name} has {len(token_file)} tokens, fewer than one batch of {batch_size} chunks of "
                f"{length}: lower batch_size or length, or keep the last batch"
            )
        self._file, self._batch_size, self._length = token_file, batch_size, length
        self._shuffle, self._seed = shuffle, seed
        self._chunks = len(token_file) // length  # full ones, from which every epoch draws
        self._used, self._rest = full, rest
        self.steps_per_epoch = -(-(full + (rest > 0)) // batch_size)
        self.tokens_per_epoch = full * length + rest

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from index `start` on, the same as those of a full iteration."""
        _check_start(start, self.steps_per_epoch)
        chunks = np.arange(self._chunks, dtype=np.int64)
        if self._shuffle:
            chunks = _generator(self._seed, epoch).permutation(self._chunks)
        chunks = chunks[: self._used]
        if self._rest:
            chunks = np.append(chunks, self._chunks)
        size = self._batch_size
        return (self._batch(chunks[step * size : (step + 1) * size]) for step in range(start, self.steps_per_epoch))

    def _batch(self, chunks: np.ndarray) -> Batch:
        begins = chunks * self._length
        lengths = np.minimum(len(self._file) - begins, self._length)
        offsets = np.arange(lengths.max(), dtype=np.int64)
        places = np.minimum(begins[:, None] + offsets, len(self._file) - 1)
        tokens = self._file.tokens[places].astype(np.int64)
        beyond = offsets >= lengths[:, None]
        tokens[beyond] = -1
        ragged = torch.from_numpy(lengths) if beyond.any() else None
        return Batch(torch.from_numpy(tokens), ragged, restart=None, carry=False)


class _Order:
    """Where the tokens of a shuffled epoch lie in the file: O(documents) memory, never the permuted corpus."""

    def __init__(self, token_file: TokenFile, seed: int, epoch: int) -> None:
        documents = np.asarray(token_file.documents)
        order = _generator(seed, epoch).permutation(documents.size - 1)
        self._ends = np.cumsum(np.diff(documents)[order])
        self._shift = documents[order + 1] - self._ends  # from a place in the epoch to one in the file

    def places(self, places: np.ndarray) -> np.ndarray:
        return places + self._shift[np.searchsorted(self._ends, places, side="right")]


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch])


def _check_sizes(batch_size: int, length: int) -> None:
    for name, value in (("batch_size", batch_size), ("length", length)):
        if value < 1:
            raise InputError(f"{name} is {value}: it must be at least 1")


def _check_start(start: int, steps: int) -> None:
    if not 0 <= start <= steps:
        raise InputError(f"an epoch has {steps} batches: it cannot start at batch {start}")
