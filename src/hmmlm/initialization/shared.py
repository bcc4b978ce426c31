"""What runs with the same teacher and text share in a folder: clusters, and the labels any of them has asked for.

Names are made from the content: of the teacher's files, the text, and every setting that changes the result. Whatever
was written before it was whole is never taken for it, and runs side by side wait for the first.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenfile import TokenFile
from hmmlm.initialization.clustering import Clusters

SAMPLES, SAMPLE = 256, 1 << 12
"""Pieces of a teacher's file that are read to tell it from another, and the bytes of each."""
WAIT = 0.05  # seconds between two looks at a lock


def name_of(*facts: Any) -> str:
    """A short name for facts that JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def teacher_facts(name: str) -> Any:
    """What tells a teacher from others: the content of its files, wherever they lie; of a hub's, its name."""
    path = Path(name)
    if path.is_dir():
        inside = [*path.iterdir(), *(path / "best").glob("*")]  # the latter of a run of `hmmlm teacher`
        return sorted((file.name, *_file_facts(file)) for file in inside if file.is_file())
    return _file_facts(path) if path.is_file() else name


def _file_facts(path: Path) -> tuple[int, str]:
    """Size, and a digest of pieces spread over the file: training changes every part of a network."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(i * max(0, size - SAMPLE) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return size, digest.hexdigest()


def text_facts(tokens: TokenFile) -> Any:
    return tokens.fingerprint, hashlib.sha256(np.ascontiguousarray(tokens.tokens).data).hexdigest()


def cluster_facts(clusters: Clusters) -> str:
    digest = hashlib.sha256()
    for tensor in (clusters.centroids, clusters.mean, clusters.components):
        digest.update(b"" if tensor is None else tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


@contextmanager
def only_one(path: Path, stop: Callable[[], None]) -> Iterator[None]:
    """One process at a time between here and the end, by a lock on `path`; `stop` is called while waiting."""
    import fcntl  # not on Windows, where there is no sharing

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop()
                time.sleep(WAIT)
        yield


class LabelStore:
    """Labels of a text by place, those that are known so far: a memory-mapped file of label + 1, 0 where unknown."""

    def __init__(self, path: Path, places: int, states: int) -> None:
        kind = np.dtype("<u2" if states < 1 << 16 else "<u4")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(places * kind.itemsize)  # zeros, which take no room on the disk
        self.lock = path.with_suffix(".lock")
        self._known = np.memmap(path, dtype=kind, mode="r+")

    def read(self, places: Tensor) -> Tensor:
        """Labels at places [B, T]; −1 where there is none, or no place (−1)."""
        found = torch.from_numpy(self._known[places.clamp(min=0).numpy()].astype(np.int64)) - 1
        return found.masked_fill(places < 0, -1)

    def write(self, places: Tensor, labels: Tensor) -> None:
        """Labels [B, T] at places [B, T], where neither is −1."""
        there = (places >= 0) & (labels >= 0)
        self._known[places[there].numpy()] = (labels[there] + 1).numpy()


class _Itself:
    """The array whose value at a place is the place, without the array."""

    def __init__(self, size: int) -> None:
        self.shape = (size,)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return places


def places_of(tokens: TokenFile) -> TokenFile:
    """A text whose tokens are their own places: batched as `tokens` is, it says where each token comes from."""
    return TokenFile(_Itself(len(tokens)), tokens.documents, len(tokens), "")  # type: ignore[arg-type]
