"""Batches of a token file: contiguous streams with a carry, or disjoint shuffled chunks.

Every batch is a function of (seed, epoch, index) alone, so that a run can resume at any batch. Of several processes,
each reads its share of the rows of a batch; which rows a batch has does not depend on the number of processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenfile import TokenFile
from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.pages import release_pages
from hmmlm.terminal import counted


@dataclass(frozen=True)
class Share:
    """The rows of every batch that one of several processes reads: `rank`, `rank` + `count`, …

    If a batch ends with fewer rows than before, so does each share, except one of no row: it repeats the first one, as
    padding (see `Batch.is_padding`).
    """

    rank: int = 0
    count: int = 1

    def rows(self, total: int) -> slice:
        """Return the rows of this share in a batch of `total` rows; the first one if it has none."""
        return slice(self.rank, total, self.count) if self.rank < total else slice(0, 1)

    def facts(self, lengths: np.ndarray) -> dict[str, Any]:
        """Return the fields of a share of a batch with rows of these lengths [B]."""
        if self.count == 1:
            return {}
        whole = WholeBatch(len(lengths), int(lengths.max()), int(lengths.sum()))
        return {"whole": whole, "is_padding": self.rank >= len(lengths)}


ALL_ROWS = Share()


def own_share() -> Share:
    """Return the share of this process among those of its run."""
    return Share(world().rank, world().count)


class WholeBatch(NamedTuple):
    """The size of a batch of which a process reads a share."""

    rows: int
    length: int  # of the longest row
    tokens: int


SHUFFLED_AT_ONCE = 1 << 22
"""Documents or chunks whose order is a list in memory; that of more is computed where it is needed."""
BLOCK_DOCUMENTS, BLOCKS_IN_MEMORY = 1 << 12, 1 << 10
"""Documents of a block that is shuffled on its own (64 KiB of indices), and blocks that are kept."""
SEARCHED = 1 << 16
"""Tokens that are searched at a time for the next example."""


class Batch(NamedTuple):
    """Rows of tokens, and how they continue the previous batch."""

    tokens: Tensor  # [B, T] int64; −1 beyond a row's length
    lengths: Tensor | None  # [B] int64; None: every row is full
    restart: Tensor | None  # [B, T] bool: the chain restarts from π; None: nowhere
    carry: bool
    """Whether position 0 continues from the previous batch's carry, row by row; fewer rows are the first ones."""
    places: Tensor | None = None  # [B, T] int64 position of each token in the token file; −1 beyond a row's length
    last: bool = False
    """Whether this is the last batch of its epoch."""
    labels: Tensor | None = None  # [B, T] int64 the state of each token, to train on P(O, S); −1 beyond a row's length
    some_unknown: bool = False
    """Whether labels are −1 also where a state is unknown, to train on P(O) of the paths that the others allow."""
    next_words: Tensor | None = None  # [B, T, S] int64 words that a teacher draws in place of each token
    whole: WholeBatch | None = None
    """The batch of which these rows are the share of one process; None: they are all of it."""
    is_padding: bool = False
    """Whether the share has no row of its own; it repeats that of another rank, with weight 0."""

    def num_tokens(self) -> int:
        """Return the number of tokens here; call it before the batch is moved to a GPU."""
        return int((self.tokens >= 0).sum())

    def whole_tokens(self) -> int:
        """Return the number of tokens of the whole batch; call it before the batch is moved to a GPU."""
        return self.num_tokens() if self.whole is None else self.whole.tokens

    def whole_rows(self) -> int:
        """Return the number of rows of the whole batch."""
        return len(self.tokens) if self.whole is None else self.whole.rows

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, without its places."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        tokens = self.tokens.to(device, non_blocking=True)
        lengths, restart, labels, next_words = map(move, (self.lengths, self.restart, self.labels, self.next_words))
        return self._replace(
            tokens=tokens, lengths=lengths, restart=restart, places=None, labels=labels, next_words=next_words
        )


class Batches(Protocol):
    """The batches of a token file; every batch is a function of (seed, epoch, index) alone."""

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def tokens_per_epoch(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch from index `start`, the same as those of a full iteration."""


@dataclass(frozen=True)
class ExtendedBatches(ABC):
    """Batches of another source with something added to each."""

    batches: Batches

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps_per_epoch

    @property
    def tokens_per_epoch(self) -> int:
        return self.batches.tokens_per_epoch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch from index `start`."""
        return (self.extend(batch, epoch, i) for i, batch in enumerate(self.batches.epoch(epoch, start), start))

    @abstractmethod
    def extend(self, batch: Batch, epoch: int, index: int) -> Batch:
        """Return batch `index` of an epoch with what is added."""


class StreamBatches:
    """Windows of `batch_size` contiguous streams over the concatenated documents, in a new order every epoch.

    With `reset_at_eos` the chain restarts after every eos, and in every document: one may end without an eos.

    Stream b covers [b·L, min((b+1)·L, N)) with L = ceil(N / batch_size), so every token occurs once per epoch. With
    `whole` (for evaluation, in order) each cut is moved to the next end of an example. If the chain restarts there,
    results do not depend on the cuts or their number. Only the last windows are ragged. Streams that end early are the
    last rows; the batches after their end leave them out. Only the rows of `share` are read.
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
        share: Share = ALL_ROWS,
    ) -> None:
        _check_sizes(batch_size, length)
        if len(token_file) < batch_size:
            raise InputError(
                f"{token_file.name} has {counted(len(token_file), 'token')}, too few for {batch_size} streams: "
                f"set --batches.batch-size to {len(token_file)} or less"
            )
        if not 0 <= eos_id < token_file.vocab_size:
            raise InputError(f"eos_id {eos_id} is outside the vocabulary of {token_file.vocab_size}")
        self._file, self._length, self._share = token_file, length, share
        self._shuffle, self._reset_at_eos, self._eos_id, self._seed = shuffle, reset_at_eos, eos_id, seed
        per_stream = -(-len(token_file) // batch_size)
        starts = np.minimum(np.arange(batch_size, dtype=np.int64) * per_stream, len(token_file))
        if whole:
            starts[1:] = [_next_example(token_file, int(place), eos_id) for place in starts[1:]]
        sizes = np.diff(starts, append=len(token_file))
        longest_first = np.argsort(-sizes, kind="stable")
        self._starts, self._sizes = starts[longest_first], sizes[longest_first]
        self.steps_per_epoch = -(-int(self._sizes[0]) // length)
        self.tokens_per_epoch = len(token_file)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch from index `start`, the same as those of a full iteration."""
        _check_start(start, self.steps_per_epoch)
        order = _order(self._file, self._seed, epoch) if self._shuffle else None
        return (self._batch(step, order) for step in range(start, self.steps_per_epoch))

    def _batch(self, step: int, order: _Order | _BlockOrder | None) -> Batch:
        """Return batch `step` of an epoch; `order` None: documents in the order of the file."""
        begin = step * self._length
        lengths = np.clip(self._sizes - begin, 0, self._length)
        rows = int(np.count_nonzero(lengths))
        own, facts = self._share.rows(rows), self._share.facts(lengths[:rows])
        lengths = lengths[:rows][own]
        # Include the position before the window: a restart depends on the previous token.
        lead = int(self._reset_at_eos and step > 0)
        offsets = np.arange(begin - lead, begin + int(lengths[0]), dtype=np.int64)
        places = self._starts[:rows, None][own] + offsets
        places = np.minimum(places, len(self._file) - 1)
        places = places if order is None else order.places(places)
        window = self._file.read(places)
        tokens, places = window[:, lead:], places[:, lead:]
        beyond = np.arange(tokens.shape[1]) >= lengths[:, None]
        tokens[beyond] = -1
        restart = None
        if self._reset_at_eos:
            restart = np.zeros(tokens.shape, dtype=bool)
            restart[:, 1 - lead :] = window[:, :-1] == self._eos_id
            restart[:, 1 - lead :] |= self._starts_document(places[:, 1 - lead :])
            restart[beyond] = False
        return Batch(
            torch.from_numpy(np.ascontiguousarray(tokens)),
            torch.from_numpy(lengths) if beyond.any() else None,
            None if restart is None else torch.from_numpy(restart),
            carry=step > 0,
            places=torch.from_numpy(np.where(beyond, -1, places)),
            last=step + 1 == self.steps_per_epoch,
            **facts,
        )

    def _starts_document(self, places: np.ndarray) -> np.ndarray:
        """Return whether a document begins at each of these positions in the file."""
        documents = self._file.documents
        found: np.ndarray = documents[np.searchsorted(documents, places)] == places
        return found


class ChunkBatches:
    """Disjoint chunks of `length` tokens, in a new order every epoch; each starts from π.

    The remainder is a shorter chunk, always the last row of the last batch. Only the rows of `share` are read.
    """

    def __init__(
        self,
        token_file: TokenFile,
        batch_size: int,
        length: int,
        *,
        shuffle: bool,
        seed: int,
        share: Share = ALL_ROWS,
    ) -> None:
        _check_sizes(batch_size, length)
        self._file, self._batch_size, self._length, self._share = token_file, batch_size, length, share
        self._shuffle, self._seed = shuffle, seed
        self._full, self._rest = divmod(len(token_file), length)
        self.steps_per_epoch = -(-(self._full + (self._rest > 0)) // batch_size)
        self.tokens_per_epoch = len(token_file)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch from index `start`, the same as those of a full iteration."""
        _check_start(start, self.steps_per_epoch)
        order = _ChunkOrder(self._full, self._seed, epoch) if self._shuffle else np.asarray
        size, total = self._batch_size, self._full + (self._rest > 0)

        def batch(step: int) -> Batch:
            numbers = np.arange(step * size, min((step + 1) * size, total), dtype=np.int64)
            whole = numbers[numbers < self._full]
            return self._batch(np.append(order(whole), numbers[len(whole) :]), step + 1 == self.steps_per_epoch)

        return map(batch, range(start, self.steps_per_epoch))

    def _batch(self, chunks: np.ndarray, last: bool) -> Batch:
        """Return the batch of the chunks with these numbers."""
        begins = chunks * self._length
        lengths = np.minimum(len(self._file) - begins, self._length)
        own, facts = self._share.rows(len(chunks)), self._share.facts(lengths)
        begins, lengths = begins[own], lengths[own]
        offsets = np.arange(lengths.max(), dtype=np.int64)
        places = np.minimum(begins[:, None] + offsets, len(self._file) - 1)
        tokens = self._file.read(places)
        beyond = offsets >= lengths[:, None]
        tokens[beyond] = -1
        ragged = torch.from_numpy(lengths) if beyond.any() else None
        places[beyond] = -1
        return Batch(
            torch.from_numpy(tokens),
            ragged,
            restart=None,
            carry=False,
            places=torch.from_numpy(places),
            last=last,
            **facts,
        )


def _next_example(token_file: TokenFile, place: int, eos_id: int) -> int:
    """Return the first position from `place` on at which an example begins: after an eos, or with a document."""
    documents = token_file.documents
    begin = int(documents[np.searchsorted(documents, place)])
    for first in range(place - 1, begin, SEARCHED):
        found = np.flatnonzero(token_file.tokens[first : min(first + SEARCHED, begin)] == eos_id)
        if found.size:
            return first + int(found[0]) + 1
    return begin


def _order(token_file: TokenFile, seed: int, epoch: int) -> _Order | _BlockOrder:
    """Return the order of documents in a shuffled epoch."""
    return (_Order if len(token_file.documents) <= SHUFFLED_AT_ONCE else _BlockOrder)(token_file, seed, epoch)


class _ChunkOrder:
    """A random order of `count` chunks; of many, by a function that needs no list of them."""

    ROUNDS = 6

    def __init__(self, count: int, seed: int, epoch: int, most_listed: int = SHUFFLED_AT_ONCE) -> None:
        self.count, generator = count, _generator(seed, epoch)
        self.listed = generator.permutation(count) if count <= most_listed else None
        # A Feistel network permutes the numbers of two halves of `bits` bits each; those beyond `count` are mapped
        # again until they are below it.
        self.bits = (max(count - 1, 1).bit_length() + 1) // 2
        self.keys = generator.integers(1 << 62, size=self.ROUNDS, dtype=np.uint64)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the chunks [n] int64 at positions `numbers` [n] of the order."""
        if self.listed is not None:
            return self.listed[numbers]
        found = self._permute(numbers.astype(np.uint64))
        while (beyond := found >= self.count).any():
            found[beyond] = self._permute(found[beyond])
        return found.astype(np.int64)

    def _permute(self, numbers: np.ndarray) -> np.ndarray:
        bits, mask = np.uint64(self.bits), np.uint64((1 << self.bits) - 1)
        left, right = numbers >> bits, numbers & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Return the bits of 64-bit numbers well mixed (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _BlockOrder:
    """Positions of the tokens of a shuffled epoch of very many documents.

    Blocks of consecutive documents are in a random order, and documents within each; only blocks in use are in memory.
    The streams of a batch are in different blocks.
    """

    def __init__(
        self,
        token_file: TokenFile,
        seed: int,
        epoch: int,
        block_documents: int = BLOCK_DOCUMENTS,
        blocks_in_memory: int = BLOCKS_IN_MEMORY,
    ) -> None:
        self._documents, self._seed, self._epoch = token_file.documents, seed, epoch
        self._block_documents = block_documents
        bounds = np.append(self._documents[:-1:block_documents], self._documents[-1:])
        release_pages(self._documents)
        self._blocks = _generator(seed, epoch).permutation(len(bounds) - 1)
        self._ends = np.cumsum(np.diff(bounds)[self._blocks])
        self._begins = np.append(0, self._ends[:-1])
        self._block = lru_cache(blocks_in_memory)(self._read_block)

    def _read_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the documents of a block in their order, and the shifts to their places in the file."""
        first = block * self._block_documents
        last = min(first + self._block_documents, len(self._documents) - 1)
        documents = np.asarray(self._documents[first : last + 1])
        order = np.random.default_rng([self._seed, self._epoch, block]).permutation(len(documents) - 1)
        ends = np.cumsum(np.diff(documents)[order])
        return ends, documents[order + 1] - ends

    def places(self, places: np.ndarray) -> np.ndarray:
        """Return the positions in the file of positions in the epoch, of the same shape."""
        numbers = np.searchsorted(self._ends, places, side="right")
        found = np.empty_like(places)
        for number in np.unique(numbers):
            own = numbers == number
            ends, shift = self._block(int(self._blocks[number]))
            inside = places[own] - self._begins[number]
            found[own] = inside + shift[np.searchsorted(ends, inside, side="right")]
        return found


class _Order:
    """Positions in the file of the tokens of a shuffled epoch; takes O(documents) memory, not O(tokens)."""

    def __init__(self, token_file: TokenFile, seed: int, epoch: int) -> None:
        documents = np.asarray(token_file.documents)
        order = _generator(seed, epoch).permutation(documents.size - 1)
        self._ends = np.cumsum(np.diff(documents)[order])
        self._shift = documents[order + 1] - self._ends  # from a position in the epoch to one in the file

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
