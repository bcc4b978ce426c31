"""A folder in which runs with the same teacher and text share clusters and labels.

Names are derived from content: of the teacher's files, the text, and every setting that changes the result. A file that
is not complete is never used, and concurrent runs wait for the first.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenfile import TokenFile
from hmmlm.distillation.kmeans import Clusters

SAMPLES, SAMPLE_BYTES = 256, 1 << 12
"""Pieces of a teacher's file that its digest reads, and the bytes of each."""


def content_name(*facts: Any) -> str:
    """Return a short name for facts that JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def teacher_facts(name: str) -> Any:
    """Return what identifies a teacher: the content of its files, wherever they are; of a hub's, its name."""
    path = Path(name)
    if path.is_dir():
        inside = [*path.iterdir(), *(path / "best").glob("*")]  # the latter of a run of `hmmlm teacher`
        return sorted((file.name, *_file_facts(file)) for file in inside if file.is_file())
    return _file_facts(path) if path.is_file() else name


def _file_facts(path: Path) -> tuple[int, str]:
    """Return the size, and a digest of pieces spread over the file: training changes every part of a network."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return size, digest.hexdigest()


def text_facts(tokens: TokenFile) -> Any:
    """Return what identifies a text."""
    return tokens.fingerprint, hashlib.sha256(np.ascontiguousarray(tokens.tokens).data).hexdigest()


def cluster_facts(clusters: Clusters) -> str:
    """Return what identifies clusters."""
    digest = hashlib.sha256()
    for name, tensor in clusters.tensors().items():
        if name != "sizes":
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


class LabelStore:
    """Labels of a text by place, as far as they are known: a memory-mapped file of label + 1, 0 where unknown."""

    def __init__(self, path: Path, places: int, states: int, rank: int = 0) -> None:
        """`rank`: of the processes of one run, which label different places, each waits for its own in other runs."""
        dtype = np.dtype("<u2" if states < 1 << 16 else "<u4")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(places * dtype.itemsize)  # zeros, which take no room on the disk
        self.lock = path.with_suffix(f".{rank}.lock" if rank else ".lock")
        self._known = np.memmap(path, dtype=dtype, mode="r+")

    def read(self, places: Tensor) -> Tensor:
        """Return the labels at places [B, T]; −1 where unknown, or where there is no place (−1)."""
        found = torch.from_numpy(self._known[places.clamp(min=0).numpy()].astype(np.int64)) - 1
        return found.masked_fill(places < 0, -1)

    def write(self, places: Tensor, labels: Tensor) -> None:
        """Store labels [B, T] at places [B, T], where neither is −1."""
        known = (places >= 0) & (labels >= 0)
        self._known[places[known].numpy()] = (labels[known] + 1).numpy()
