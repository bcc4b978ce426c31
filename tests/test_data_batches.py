"""Batches against their definition."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hmmlm.data.batches import (
    SHUFFLED_AT_ONCE,
    Batch,
    Batches,
    ChunkBatches,
    Share,
    StreamBatches,
    _BlockOrder,
    _ChunkOrder,
    _next_example,
    _order,
)
from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.errors import InputError

EOS = 0


@st.composite
def corpora(draw: st.DrawFn) -> TokenFile:
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any))
    ids = draw(st.lists(st.integers(0, 3), min_size=sum(sizes), max_size=sum(sizes)))
    return TokenFile.from_arrays(ids, np.cumsum([0, *sizes]), vocab_size=4)


def numbered(sizes: list[int]) -> TokenFile:
    """Return documents whose tokens are their positions."""
    return TokenFile.from_arrays(np.arange(sum(sizes)), np.cumsum([0, *sizes]), vocab_size=70_000)


def equal(a: Batch, b: Batch) -> bool:
    def same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        return x is y if x is None or y is None else torch.equal(x, y)

    tensors = ("tokens", "lengths", "restart", "places", "labels")
    flags = (a.carry, a.last) == (b.carry, b.last)
    return flags and all(same(getattr(a, name), getattr(b, name)) for name in tensors)


def rows_of(batch: Batch) -> list[list[int]]:
    lengths = [batch.tokens.shape[1]] * len(batch.tokens) if batch.lengths is None else batch.lengths.tolist()
    rows = [row[:n] for row, n in zip(batch.tokens.tolist(), lengths, strict=True)]
    assert all(rows), "a row without a token"
    padding = [x for row, n in zip(batch.tokens.tolist(), lengths, strict=True) for x in row[n:]]
    assert set(padding) <= {-1}
    assert (batch.lengths is None) == (not padding)
    assert batch.num_tokens() == sum(map(len, rows))
    return rows


def check_places(batches: Batches, corpus: TokenFile, epoch: int = 0) -> None:
    """Check that places are the positions of the tokens, and that the last batch is marked."""
    read = list(batches.epoch(epoch))
    assert [batch.last for batch in read] == [False] * (len(read) - 1) + [True]
    for batch in read:
        assert batch.places is not None and batch.places.shape == batch.tokens.shape
        inside = batch.tokens >= 0
        assert torch.equal(batch.places >= 0, inside)
        assert corpus.tokens[batch.places[inside].numpy()].tolist() == batch.tokens[inside].tolist()


@settings(max_examples=150, deadline=None)
@example(TokenFile.from_arrays([1, 2, 3, 1, EOS], None, 4), 2, 3, True)  # eos just before a short row's padding
@given(corpora(), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_streams_in_order_are_the_corpus_cut_into_contiguous_pieces(
    corpus: TokenFile, batch_size: int, length: int, reset: bool
) -> None:
    if len(corpus) < batch_size:
        return
    batches = StreamBatches(corpus, batch_size, length, shuffle=False, reset_at_eos=reset, eos_id=EOS, seed=0)
    streams: list[list[int]] = [[] for _ in range(batch_size)]
    restarts: list[list[bool]] = [[] for _ in range(batch_size)]
    steps = 0
    for steps, batch in enumerate(batches.epoch(0), 1):
        assert batch.carry == (steps > 1)
        assert batch.tokens.dtype == torch.int64 and batch.tokens.shape[1] <= length
        assert (batch.restart is None) == (not reset)
        for b, row in enumerate(rows_of(batch)):
            streams[b] += row
            if batch.restart is not None:
                restarts[b] += batch.restart[b, : len(row)].tolist()
                assert not batch.restart[b, len(row) :].any()
    size = math.ceil(len(corpus) / batch_size)
    tokens = corpus.tokens.tolist()
    assert streams == [tokens[b * size : (b + 1) * size] for b in range(batch_size)]
    assert steps == batches.steps_per_epoch
    assert batches.tokens_per_epoch == len(corpus)
    if reset:
        begins = {0, *corpus.documents.tolist(), *(np.flatnonzero(corpus.tokens == EOS) + 1).tolist()}
        expected = [[t > 0 and b * size + t in begins for t in range(len(s))] for b, s in enumerate(streams)]
        assert restarts == expected


@settings(max_examples=150, deadline=None)
@given(corpora(), st.integers(1, 5), st.integers(1, 6))
def test_whole_streams_begin_with_an_example_and_hold_every_token_once(
    corpus: TokenFile, batch_size: int, length: int
) -> None:
    if len(corpus) < batch_size:
        return
    batches = StreamBatches(
        corpus, batch_size, length, shuffle=False, reset_at_eos=True, eos_id=EOS, seed=0, whole=True
    )
    streams: list[list[int]] = [[] for _ in range(batch_size)]
    for batch in batches.epoch(0):
        for b, row in enumerate(rows_of(batch)):
            streams[b] += row
    tokens = corpus.tokens.tolist()
    begins = [*corpus.documents.tolist(), *(i + 1 for i, token in enumerate(tokens) if token == EOS)]
    size = math.ceil(len(corpus) / batch_size)
    starts = [0] + [min((i for i in begins if i >= b * size), default=len(tokens)) for b in range(1, batch_size)]
    expected = [tokens[a:b] for a, b in itertools.pairwise([*starts, len(tokens)])]
    assert sorted(streams) == sorted(expected)
    assert [len(stream) for stream in streams] == sorted(map(len, expected), reverse=True)


def test_shuffled_streams_have_whole_documents_in_another_order_every_epoch() -> None:
    sizes = [3, 0, 5, 1, 4, 2, 6, 7]
    corpus = numbered(sizes)
    batches = StreamBatches(corpus, 3, 4, shuffle=True, reset_at_eos=False, eos_id=EOS, seed=7)
    bounds = corpus.documents.tolist()
    documents = {a: list(range(a, b)) for a, b in itertools.pairwise(bounds) if b > a}
    orders = []
    for epoch in range(4):
        streams: list[list[int]] = [[], [], []]
        for batch in batches.epoch(epoch):
            for stream, row in zip(streams, rows_of(batch), strict=False):
                stream += row
        read, order = list(itertools.chain(*streams)), []
        while read:
            document = documents[read[0]]
            assert read[: len(document)] == document
            order.append(read[0])
            read = read[len(document) :]
        assert sorted(order) == sorted(documents)
        orders.append(tuple(order))
    assert len(set(orders)) == 4
    again = StreamBatches(corpus, 3, 4, shuffle=True, reset_at_eos=False, eos_id=EOS, seed=7)
    assert all(map(equal, batches.epoch(2), again.epoch(2)))
    other = StreamBatches(corpus, 3, 4, shuffle=True, reset_at_eos=False, eos_id=EOS, seed=8)
    assert not all(map(equal, batches.epoch(2), other.epoch(2)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("total", [24, 29, 33, 7])
def test_chunks_cover_the_corpus_once(shuffle: bool, total: int) -> None:
    length, batch_size = 4, 3
    batches = ChunkBatches(numbered([total]), batch_size, length, shuffle=shuffle, seed=1)
    seen: list[list[int]] = []
    steps = 0
    for steps, batch in enumerate(batches.epoch(3), 1):
        assert not batch.carry and batch.restart is None
        assert len(batch.tokens) == batch_size or steps == batches.steps_per_epoch
        seen += rows_of(batch)
    assert steps == batches.steps_per_epoch
    assert sum(map(len, seen)) == batches.tokens_per_epoch
    chunks = [list(range(a, min(a + length, total))) for a in range(0, total, length)]
    assert sorted(seen) == chunks
    assert shuffle or seen == chunks
    assert seen[-1] == chunks[-1] or total % length == 0  # the remainder is the last row


@settings(max_examples=40, deadline=None)
@given(corpora(), st.booleans(), st.booleans())
def test_places_are_the_positions_of_tokens_in_the_file(corpus: TokenFile, shuffle: bool, reset: bool) -> None:
    size = min(3, len(corpus))
    stream = StreamBatches(corpus, size, 2, shuffle=shuffle, reset_at_eos=reset, eos_id=EOS, seed=5)
    for batches in (stream, ChunkBatches(corpus, size, 2, shuffle=shuffle, seed=5)):
        check_places(batches, corpus, epoch=1)


def test_a_batch_is_moved_without_its_places() -> None:
    batch = next(ChunkBatches(numbered([7]), 2, 4, shuffle=False, seed=0).epoch(0))
    labeled = batch._replace(labels=torch.zeros_like(batch.tokens))
    moved = labeled.to(torch.device("meta"))
    assert moved.lengths is not None and moved.labels is not None
    assert {tensor.device.type for tensor in (moved.tokens, moved.lengths, moved.labels)} == {"meta"}
    assert moved.places is None and moved.restart is None and moved.last and not moved.carry


def test_chunks_are_shuffled_differently_every_epoch() -> None:
    batches = ChunkBatches(numbered([400]), 5, 4, shuffle=True, seed=1)
    first, second = ([row for batch in batches.epoch(e) for row in rows_of(batch)] for e in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert first != sorted(first)


@settings(max_examples=60, deadline=None)
@given(corpora(), st.booleans(), st.integers(0, 3), st.data())
def test_resuming_gives_the_same_batches(corpus: TokenFile, shuffle: bool, epoch: int, data: st.DataObject) -> None:
    batch_size = min(3, len(corpus))
    for batches in (
        StreamBatches(corpus, batch_size, 2, shuffle=shuffle, reset_at_eos=True, eos_id=EOS, seed=5),
        ChunkBatches(corpus, batch_size, 2, shuffle=shuffle, seed=5),
    ):
        full = list(batches.epoch(epoch))
        start = data.draw(st.integers(0, len(full)))
        rest = list(batches.epoch(epoch, start))
        assert len(rest) == len(full) - start
        assert all(map(equal, rest, full[start:]))


def test_batches_of_a_file_are_those_of_the_same_corpus_in_memory(tmp_path: Path) -> None:
    memory = numbered([5, 9, 2, 30])
    documents = [memory.tokens[a:b] for a, b in itertools.pairwise(memory.documents)]
    file = write_tokens(tmp_path / "train", documents, memory.vocab_size, "f")
    for corpus_batches in zip(
        *(StreamBatches(c, 4, 3, shuffle=True, reset_at_eos=True, eos_id=4, seed=2).epoch(1) for c in (memory, file)),
        strict=True,
    ):
        assert equal(*corpus_batches)


def test_invalid_sizes_are_named() -> None:
    corpus = numbered([5])
    options = {"shuffle": False, "reset_at_eos": False, "eos_id": 0, "seed": 0}
    with pytest.raises(InputError, match="has 5 tokens, too few for 6 streams"):
        StreamBatches(corpus, 6, 2, **options)
    with pytest.raises(InputError, match="batch_size is 0"):
        StreamBatches(corpus, 0, 2, **options)
    with pytest.raises(InputError, match="length is 0"):
        ChunkBatches(corpus, 1, 0, shuffle=False, seed=0)
    with pytest.raises(InputError, match="eos_id 70000 is outside the vocabulary of 70000"):
        StreamBatches(corpus, 1, 2, **{**options, "eos_id": 70_000})
    with pytest.raises(InputError, match="an epoch has 3 batches: it cannot start at batch 4"):
        StreamBatches(corpus, 1, 2, **options).epoch(0, start=4)


def test_a_corpus_is_never_held_in_memory(tmp_path: Path) -> None:
    """20 MB of tokens are written, shuffled and read within 3 MB."""
    documents = (np.full(100_000, i, dtype=np.int64) for i in range(100))
    tracemalloc.start()
    try:
        file = write_tokens(tmp_path / "train", documents, 1000, "f")
        for batches in (
            StreamBatches(file, 16, 32, shuffle=True, reset_at_eos=True, eos_id=0, seed=0),
            ChunkBatches(file, 16, 256, shuffle=True, seed=0),
        ):
            last = batches.steps_per_epoch - 1
            read = itertools.chain(batches.epoch(0, last), itertools.islice(batches.epoch(0), 3))
            assert sum(len(batch.tokens) for batch in read) > 16
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "train.bin").stat().st_size == 20_000_000
    assert peak < 3_000_000


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("reset", [False, True])
def test_shares_are_the_rows_of_the_whole_batch(count: int, reset: bool) -> None:
    corpus = numbered([5, 9, 1, 14, 3, 7])
    for make in (
        partial(StreamBatches, corpus, 5, 4, shuffle=True, reset_at_eos=reset, eos_id=EOS, seed=7),
        partial(ChunkBatches, corpus, 4, 3, shuffle=True, seed=7),
    ):
        shares = [make(share=Share(rank, count)).epoch(1) for rank in range(count)]
        for whole, *parts in zip(make().epoch(1), *shares, strict=True):
            assert [part.is_padding for part in parts] == [rank >= len(whole.tokens) for rank in range(count)]
            for rank, part in enumerate(parts):
                assert part.whole is not None and part.whole_tokens() == whole.num_tokens()
                assert (part.whole.rows, part.whole.length) == tuple(whole.tokens.shape)
                rows = whole.tokens[:1] if part.is_padding else whole.tokens[rank::count]
                width = part.tokens.shape[1]
                assert torch.equal(part.tokens, rows[:, :width]) and bool((rows[:, width:] == -1).all())
                if whole.restart is not None and part.restart is not None and not part.is_padding:
                    assert torch.equal(part.restart, whole.restart[rank::count, :width])


def test_very_many_documents_are_shuffled_in_blocks() -> None:
    many = np.arange(SHUFFLED_AT_ONCE + 1)
    assert isinstance(_order(TokenFile.from_arrays(np.zeros(many[-1], np.uint8), many, 1), 3, 0), _BlockOrder)
    sizes = [1 + i % 5 for i in range(101)]
    corpus = numbered(sizes)
    orders = []
    for epoch in (0, 1, 0):
        order = _BlockOrder(corpus, 3, epoch, block_documents=8, blocks_in_memory=2)
        places = order.places(np.arange(len(corpus))[None])[0]
        assert sorted(places.tolist()) == list(range(len(corpus)))
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        assert set(places[starts].tolist()) <= set(corpus.documents.tolist())  # documents stay whole
        orders.append(places.tolist())
    assert orders[0] == orders[2] != orders[1]
    blocks = [int(np.searchsorted(corpus.documents, place, "right") - 1) // 8 for place in orders[0]]
    assert len([1 for a, b in itertools.pairwise(blocks) if a != b]) == 12  # each of 13 blocks is read once


def test_very_many_chunks_are_shuffled_without_a_list() -> None:
    for count in (11, 64, 1000, 4097):
        orders = [_ChunkOrder(count, 3, epoch, most_listed=10)(np.arange(count)).tolist() for epoch in (0, 1)]
        assert all(sorted(order) == list(range(count)) for order in orders) and orders[0] != orders[1]
    moved = np.abs(np.asarray(orders[0]) - np.arange(4097))
    assert moved.mean() == pytest.approx(4097 / 3, rel=0.05)  # as in a uniform permutation
    some = np.array([4096, 0, 17])
    assert _ChunkOrder(4097, 3, 1, most_listed=10)(some).tolist() == [orders[1][i] for i in some]


def test_streams_for_evaluation_start_with_examples() -> None:
    """The same cuts as by all beginnings of examples in memory."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(3000) < 0.02, EOS, 2 + rng.integers(0, 5, 3000))
    corpus = TokenFile.from_arrays(tokens, [0, 10, 11, 1500, 2999, 3000], 10)
    begins = np.union1d(np.flatnonzero(tokens == EOS) + 1, corpus.documents)
    for place in range(1, 3000, 7):
        assert _next_example(corpus, place, EOS) == begins[np.searchsorted(begins, place)]
