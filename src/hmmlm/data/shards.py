"""Vocabularies and token files of large texts, from parts that several processes read at the same time.

A part is a range of bytes of a text file, the same for any number of processes. The word counts and the token file of
each part are written whole, so that work that was interrupted continues with the parts that are missing; then they are
added up, or joined into one file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from hmmlm.data.corpora import Documents, encode_documents, open_tokens
from hmmlm.data.files import write_bytes
from hmmlm.data.tokenfile import TokenFile, join_tokens
from hmmlm.data.tokenizers import load_tokenizer
from hmmlm.data.words import Split, count_words, drop_rare
from hmmlm.errors import InputError

Result = TypeVar("Result")
Advance = Callable[[int], None]
"""Receives the number of parts that are done."""


def count_parts(
    documents: Documents, split: Split, lowercase: bool, folder: Path, workers: int, advance: Advance
) -> Counter[str]:
    """Count the words of a text in `workers` processes; the counts of each part are in a folder, which is kept."""
    counts: Counter[str] = Counter()
    parts = enumerate(documents.divide())
    jobs = [partial(_count_part, part, split, lowercase, folder / f"{number:06}") for number, part in parts]
    for found in _results(jobs, workers):
        counts.update(found)
        drop_rare(counts)
        advance(1)
    return counts


def encode_parts(documents: Documents, tokenizer: Path, path: Path, workers: int, advance: Advance) -> TokenFile:
    """Write the token file `path` of a text in `workers` processes, with the tokenizer in a folder.

    The token files of parts are in a hidden folder beside it until all are done.
    """
    fingerprint = load_tokenizer(tokenizer).fingerprint()
    if (existing := open_tokens(documents, path, fingerprint)) is not None:
        return existing
    folder = path.with_name(f".{path.name}.parts")
    parts = documents.divide()
    names = [folder / f"{number:06}" for number in range(len(parts))]
    jobs = [partial(_encode_part, part, name, tokenizer) for part, name in zip(parts, names, strict=True)]
    for _ in _results(jobs, workers):
        advance(1)
    made = [TokenFile.open(name, fingerprint) for name in names if name.with_suffix(".json").exists()]
    if not made:
        raise InputError(f"nothing to write to {path}: the text has no tokens")
    joined = join_tokens(path, made, documents.source)
    shutil.rmtree(folder)
    return joined


def _results(jobs: Sequence[Callable[[], Result]], workers: int) -> Iterator[Result]:
    """Yield the results of jobs as they are done; a single one, which may not be divisible, runs in this process."""
    if len(jobs) == 1:
        yield jobs[0]()
        return
    # Not forked from this process, which may have threads.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), _end_with_parent)
    try:
        waiting, pending = iter(jobs), set[Future[Result]]()
        while True:
            # Only a few are in the pool at a time, so that their results take no room.
            pending |= {pool.submit(job) for job in islice(waiting, 2 * workers - len(pending))}
            if not pending:
                break
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool:
        raise InputError(
            "a process that reads the text was ended from outside, perhaps because memory ran out: give the same "
            "command again to continue, with fewer --workers if there was too little memory"
        ) from None
    finally:  # after an error or Ctrl-C, what has not begun is not done
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this worker when the process that started it is killed: it would wait for more work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _count_part(documents: Documents, split: Split, lowercase: bool, path: Path) -> Counter[str]:
    """Return the counts of a part, and write them after their checksum, unless they are there and undamaged."""
    if path.exists():
        checksum, _, kept = path.read_bytes().partition(b"\n")
        if checksum == _checksum(kept):
            return Counter(json.loads(kept))
    counts = count_words((line for document in documents for line in document), split, lowercase)
    text = json.dumps(counts, ensure_ascii=False).encode()
    write_bytes(path, _checksum(text) + b"\n" + text)
    return counts


def _checksum(text: bytes) -> bytes:
    return f"{zlib.crc32(text):08x}".encode()


_open_tokenizer = cache(load_tokenizer)
"""Once per process."""


def _encode_part(documents: Documents, path: Path, tokenizer: Path) -> None:
    """Write the token file of a part, unless it is there; none if the part has no document."""
    if next(iter(documents), None) is not None:
        encode_documents(documents, _open_tokenizer(tokenizer), path)
