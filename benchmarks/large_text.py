"""A text larger than memory: make its token file by repeating and permuting a small one, and read it.

    python -m benchmarks.large_text DATA OUT --tokens 4000000000

DATA is a folder of `hmmlm data`; OUT is a new one, with the same tokenizer, valid and test files, and is kept. Prints
seconds and the largest resident memory after each part of the work that training does with a text.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import numpy as np
import torch

from hmmlm.data.batches import Batches, ChunkBatches, StreamBatches
from hmmlm.data.files import link_or_copy
from hmmlm.data.tokenfile import TokenFile, join_tokens
from hmmlm.device import peak_memory
from hmmlm.learning.prepare import reopen
from hmmlm.structure.bigrams import count_bigrams

BATCH, LENGTH, STEPS = 256, 32, 2_000


class Permutations(Sequence[TokenFile]):
    """Copies of a text with its documents in other orders, each made when it is asked for."""

    def __init__(self, text: TokenFile, count: int) -> None:
        self.text, self.count = text, count

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, number: int) -> TokenFile: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[TokenFile]: ...
    def __getitem__(self, number: int | slice) -> TokenFile | Sequence[TokenFile]:
        if isinstance(number, slice) or number >= self.count:
            raise IndexError(number)
        text = self.text
        order = np.random.default_rng(number).permutation(len(text.documents) - 1)
        sizes = np.diff(text.documents)[order]
        ends = np.cumsum(sizes)
        places = np.arange(len(text)) + np.repeat(text.documents[order + 1] - ends, sizes)
        tokens, documents = np.asarray(text.tokens)[places], np.append(0, ends)
        return TokenFile(tokens, documents, text.vocab_size, text.fingerprint, text_bytes=text.text_bytes)


@contextmanager
def measured(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds, memory = time.perf_counter() - began, peak_memory(torch.device("cpu"))
    print(f"{what}: {seconds:,.1f} s; at most {memory / 1e9:.2f} GB resident so far", flush=True)


def read(batches: Batches, epoch: int) -> None:
    for _ in itertools.islice(batches.epoch(epoch), STEPS):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4_000_000_000)
    arguments = parser.parse_args()
    if not arguments.out.exists():
        small = reopen(arguments.data).tokens["train"]
        for part in ("tokenizer", "data"):
            link_or_copy(arguments.data / part, arguments.out / part)
        with measured("write"):
            copies = Permutations(small, -(-arguments.tokens // len(small)))
            join_tokens(arguments.out / "data" / "train", copies, "repeated")
    with measured("open and verify"):
        data = reopen(arguments.out)
        train = data.tokens["train"]
    size = (train.text_bytes or 0) / 1e9
    print(f"{len(train):,} tokens in {len(train.documents) - 1:,} documents, {size:.1f} GB of text")
    with measured("count words"):
        train.word_counts()
    eos = data.tokenizer.eos_id
    stream = StreamBatches(train, BATCH, LENGTH, shuffle=True, reset_at_eos=True, eos_id=eos, seed=0)
    with measured(f"{STEPS:,} shuffled batches of {BATCH} streams"):
        read(stream, 0)
    chunks = ChunkBatches(train, BATCH, LENGTH, shuffle=True, seed=0)
    with measured(f"{STEPS:,} shuffled batches of {BATCH} chunks"):
        read(chunks, 0)
    with measured("cuts for evaluation"):
        StreamBatches(train, BATCH, LENGTH, shuffle=False, reset_at_eos=True, eos_id=eos, seed=0, whole=True)
    with measured("count bigrams"):
        count_bigrams(train.tokens, train.vocab_size, train.documents[:-1])


if __name__ == "__main__":
    main()
