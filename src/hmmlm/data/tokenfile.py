"""Token files: memory-mapped little-endian ids, the offsets of documents, and a JSON header.

`<name>.bin` holds the ids (uint16 up to a vocabulary of 65,535, else uint32), `<name>.idx` the document offsets
(int64 [D+1]), `<name>.json` the header, which identifies the other two and the tokenizer.

A file may be larger than memory. What reads all of it does so in pieces, and pages that were read are given back;
batches are read from the file and not from its mapping, of which the system may map megabytes around each token. So a
process holds a bounded part of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hmmlm.data.files import is_integer, parse_json, replacing, require_like
from hmmlm.errors import InputError
from hmmlm.pages import release_pages

FORMAT = "hmmlm tokens"
VERSION = 1
UNITS = ("line", "paragraph", "document")
_OFFSET = np.dtype("<i8")
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_EDGE = 1 << 16  # bytes at each end of a file that the digest of earlier versions reads
_PIECE = 1 << 20
_GROUP = 1 << 14  # tokens of the documents that are written together
_READS = 64  # batches after which pages of the offsets of documents are given back
_WHOLE = "crc32:"  # how a digest of the whole file begins
_HEADER: dict[str, Any] = {
    **dict.fromkeys(("dtype", "fingerprint", "digest", "index_digest", "source"), ""),
    **dict.fromkeys(("count", "vocab_size", "documents", "bytes", "index_bytes"), 0),
}
"""The entries of a header, with a value of the type of each."""


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Tokens [N] of `documents.size - 1` documents; document d is tokens[documents[d]:documents[d + 1]]."""

    tokens: np.ndarray
    documents: np.ndarray
    vocab_size: int
    fingerprint: str
    source: str = ""  # identifies the text, so that the file can be reused
    path: Path | None = None
    text_bytes: int | None = None  # of the text in UTF-8, a line break per line included; None: not recorded
    unit: str = "line"  # what an example of the text is: line, paragraph or document
    _descriptor: int | None = field(default=None, repr=False)  # of the open file of tokens; None: in memory
    _reads: Iterator[int] = field(default_factory=itertools.count, repr=False)  # of batches

    def __post_init__(self) -> None:
        if self._descriptor is not None:
            weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def name(self) -> str:
        return str(self.path) if self.path else "the corpus in memory"

    def read(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens [B, T] int64 at places [B, T], whose rows are mostly contiguous."""
        if self._descriptor is None or not places.size or not hasattr(os, "pread"):  # Windows has none
            return self.tokens[places].astype(np.int64)
        if next(self._reads) % _READS == 0:
            release_pages(self.documents)
        flat, size = places.reshape(-1), self.tokens.itemsize
        cuts = [0, *(np.flatnonzero(np.diff(flat) != 1) + 1).tolist(), flat.size]  # between runs of neighbors
        runs = [
            os.pread(self._descriptor, (end - first) * size, int(flat[first]) * size)
            for first, end in itertools.pairwise(cuts)
        ]
        return np.frombuffer(b"".join(runs), self.tokens.dtype).astype(np.int64).reshape(places.shape)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the tokens in order, a few million at a time."""
        for first in range(0, len(self), 4 * _PIECE):
            yield self.tokens[first : first + 4 * _PIECE]
            release_pages(self.tokens)

    def word_counts(self) -> np.ndarray:
        """Return how often each token of the vocabulary occurs [V]."""
        counts = np.zeros(self.vocab_size, np.int64)
        for piece in self.pieces():
            counts += np.bincount(piece, minlength=self.vocab_size)
        return counts

    @classmethod
    def from_arrays(
        cls,
        tokens: Sequence[int] | np.ndarray,
        documents: Sequence[int] | np.ndarray | None,
        vocab_size: int,
        fingerprint: str = "",
    ) -> TokenFile:
        """Create a corpus in memory; `documents` are the offsets [D+1], None for one document."""
        ids = _as_ids(tokens, 0)
        _check_range(ids, vocab_size, 0, 0)
        if not ids.size:
            raise InputError("the corpus has no tokens")
        offsets = np.asarray([0, ids.size] if documents is None else documents, dtype=_OFFSET)
        _check_offsets(offsets, ids.size)
        return cls(ids.astype(_dtype(vocab_size)), offsets, vocab_size, fingerprint)

    @classmethod
    def open(cls, path: Path, fingerprint: str | None = None) -> TokenFile:
        """Memory-map the token file `path` (with or without .bin); raise an InputError if another tokenizer made it."""
        data, index, header_path = _paths(path)
        header = _read_header(header_path)
        if fingerprint is not None and header["fingerprint"] != fingerprint:
            raise InputError(
                f"{data} was made with another tokenizer ({header['fingerprint']}, not {fingerprint}): prepare it again"
            )
        dtype, size = _DTYPES[header["dtype"]], header["vocab_size"]
        for part, key in ((data, "bytes"), (index, "index_bytes")):
            found = part.stat().st_size if part.exists() else 0
            if found != header[key]:
                raise InputError(f"{part} is truncated or replaced: {found} bytes, not {header[key]}; prepare it again")
        tokens, documents = np.memmap(data, dtype=dtype, mode="r"), np.memmap(index, dtype=_OFFSET, mode="r")
        largest = 0
        for part, content, key in ((index, documents, "index_digest"), (data, tokens, "digest")):
            digest, largest = _examine(content, whole=header[key].startswith(_WHOLE))
            if digest != header[key]:
                raise InputError(
                    f"{part} is damaged, or does not belong to {header_path}: their digests differ; prepare it again"
                )
        if largest >= size:
            raise InputError(f"{data} has token {largest}, but {header_path} a vocabulary of {size}: prepare it again")
        _check_offsets(documents, len(tokens), f"{index}: ")
        text_bytes = header.get("text_bytes")
        unit = header.get("unit", "line")
        opened = os.open(data, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        return cls(tokens, documents, size, header["fingerprint"], header["source"], data, text_bytes, unit, opened)


def write_tokens(
    path: Path,
    documents: Iterable[Sequence[int] | np.ndarray],
    vocab_size: int,
    fingerprint: str,
    source: str = "",
    text_bytes: Callable[[], int] | None = None,
    unit: str = "line",
) -> TokenFile:
    """Stream `documents` into the token file `path`; an existing file is kept until the new one is complete.

    `text_bytes` is called after the last document, for the size of the text; `unit` is what an example of it is.
    """
    data, index, header_path = _paths(path)
    dtype = _dtype(vocab_size)
    count = 0
    with replacing(data, index, header_path) as (data_part, index_part, header_part):
        with data_part.open("wb") as tokens_out, index_part.open("wb") as offsets_out:
            offsets_out.write(_OFFSET.type(0).tobytes())
            for ids, sizes in _groups(documents, vocab_size):
                tokens_out.write(ids.astype(dtype).tobytes())
                offsets_out.write((count + np.cumsum(sizes)).astype(_OFFSET).tobytes())
                count += ids.size
        if not count:
            raise InputError(f"nothing to write to {data}: the text has no tokens")
        facts: dict[str, Any] = {"vocab_size": vocab_size, "fingerprint": fingerprint, "source": source, "unit": unit}
        if text_bytes is not None:
            facts["text_bytes"] = text_bytes()
        header_part.write_text(_header(data_part, index_part, dtype, facts))
    return TokenFile.open(data)


def join_tokens(path: Path, parts: Sequence[TokenFile], source: str) -> TokenFile:
    """Write the token file `path` of the documents of several others, of the same tokenizer and unit, in order."""
    data, index, header_path = _paths(path)
    first, count = parts[0], 0
    with replacing(data, index, header_path) as (data_part, index_part, header_part):
        with data_part.open("wb") as tokens_out, index_part.open("wb") as offsets_out:
            offsets_out.write(_OFFSET.type(0).tobytes())
            for part in parts:
                for piece in part.pieces():
                    tokens_out.write(piece.tobytes())
                for begin in range(1, len(part.documents), _PIECE):
                    offsets_out.write((part.documents[begin : begin + _PIECE] + count).astype(_OFFSET).tobytes())
                count += len(part)
        facts: dict[str, Any] = {
            "vocab_size": first.vocab_size,
            "fingerprint": first.fingerprint,
            "source": source,
            "unit": first.unit,
            "text_bytes": sum(part.text_bytes or 0 for part in parts),
        }
        header_part.write_text(_header(data_part, index_part, _dtype(first.vocab_size), facts))
    return TokenFile.open(data)


def _header(data: Path, index: Path, dtype: np.dtype, facts: dict[str, Any]) -> str:
    """Return the header of tokens and offsets as JSON; `facts` are what these do not show."""
    size, index_size = data.stat().st_size, index.stat().st_size
    header = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype.name,
        "count": size // dtype.itemsize,
        "documents": index_size // _OFFSET.itemsize - 1,
        "bytes": size,
        "digest": _examine(np.memmap(data, dtype=dtype, mode="r"))[0],
        "index_bytes": index_size,
        "index_digest": _examine(np.memmap(index, dtype=_OFFSET, mode="r"))[0],
        **facts,
    }
    return json.dumps(header, indent=2) + "\n"


def unknown_fraction(tokens: TokenFile, unk: int | None, eos: int) -> float:
    """Return the fraction of `<unk>` among the words; `<eos>` is not counted as a word."""
    counts = tokens.word_counts()
    words = len(tokens) - int(counts[eos])
    return float(counts[unk]) / words if unk is not None and words else 0.0


def _paths(path: Path) -> tuple[Path, Path, Path]:
    """Return the .bin, .idx and .json paths of a token file, whose name may contain dots."""
    stem = path.name.removesuffix(".bin")
    return path.with_name(stem + ".bin"), path.with_name(stem + ".idx"), path.with_name(stem + ".json")


def _dtype(vocab_size: int) -> np.dtype:
    if not 0 < vocab_size <= 1 << 32:
        raise InputError(f"a vocabulary of {vocab_size} does not fit a token file: use 1 to 2³² tokens")
    return _DTYPES["uint16" if vocab_size <= 65_535 else "uint32"]


def _groups(documents: Iterable[Sequence[int] | np.ndarray], vocab_size: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield the valid ids [n] of documents, several at once, and the size of each document.

    Checking and writing the lines of a text one by one would take as long as reading them.
    """
    group: list[np.ndarray] = []
    size = before = first = 0  # ids of the group; ids and documents before it
    for document in itertools.chain(documents, [None]):
        if document is not None:
            group.append(_as_ids(document, first + len(group)))
            size += group[-1].size
        if group and (document is None or size >= _GROUP):
            ids = group[0] if len(group) == 1 else np.concatenate(group)
            if size and (ids.min() < 0 or ids.max() >= vocab_size):
                for number, own in enumerate(group, first):
                    _check_range(own, vocab_size, number, before)
                    before += own.size
            yield ids, [own.size for own in group]
            before, first = before + size, first + len(group)
            group, size = [], 0


def _as_ids(document: Sequence[int] | np.ndarray, number: int) -> np.ndarray:
    """Return the ids of document `number`; raise an InputError if they are not integers."""
    ids = np.asarray(document)
    if not ids.size:
        return ids.astype(np.int64).reshape(-1)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"document {number} is not a list of integer tokens: {ids.dtype} of shape {list(ids.shape)}")
    return ids


def _check_range(ids: np.ndarray, vocab_size: int, number: int, before: int) -> None:
    """Raise an InputError that names the first id of document `number`, after `before` ids, outside the vocabulary."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        at = int(outside[0])
        raise InputError(
            f"token {ids[at]} at position {before + at} (document {number}, position {at} in it) "
            f"is outside the vocabulary of {vocab_size}"
        )


def _check_offsets(offsets: np.ndarray, count: int, where: str = "") -> None:
    """Raise an InputError unless the offsets of documents [D+1] increase from 0 to `count`."""
    descending = False
    for first in range(0, len(offsets) - 1, _PIECE):
        descending |= bool((np.diff(offsets[first : first + _PIECE + 1]) < 0).any())
        release_pages(offsets)
    if offsets[0] != 0 or offsets[-1] != count or descending:
        raise InputError(f"{where}document offsets must increase from 0 to {count}, the number of tokens")


def _read_header(path: Path) -> dict[str, Any]:
    """Read the header of a token file; raise an InputError if it is missing, damaged or of another version."""
    if not path.exists():
        raise InputError(f"no token file at {path.with_suffix('.bin')}: its header {path} is missing; prepare it first")
    header = parse_json(path)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise InputError(f"{path} is not the header of a token file: prepare it first")
    if not is_integer(header.get("version"), VERSION):
        raise InputError(f"{path} has version {header.get('version')}; this hmmlm reads {VERSION}: prepare it again")
    # Files of earlier versions do not have these.
    optional = {name: like for name, like in {"text_bytes": 0, "unit": ""}.items() if name in header}
    require_like(path, header, _HEADER | optional)
    if header.get("unit", "line") not in UNITS:
        raise InputError(f"{path}: unit is {header['unit'][:40]!r}, not {', '.join(UNITS)}: prepare it again")
    size, name = header["vocab_size"], header["dtype"]
    if _dtype(size).name != name:
        raise InputError(f"{path}: dtype is {name[:40]!r}, not that of {size} tokens, {_dtype(size)}: prepare it again")
    for number, total, width in (("count", "bytes", _dtype(size).itemsize), ("documents", "index_bytes", 8)):
        items = header[number] + (number == "documents")
        if header[total] != items * width or not header[number]:
            raise InputError(
                f"{path}: {number} is {header[number]} and {total} is {header[total]}, which disagree: prepare it again"
            )
    return header


def _examine(content: np.ndarray, whole: bool = True) -> tuple[str, int]:
    """Return a checksum of an array and its largest number, read once; without `whole`, the digest of earlier versions.

    That was the sha256 of the first and last 64 KiB, which does not notice damage in the middle.
    """
    checksum, largest = 0, 0
    for first in range(0, len(content), _PIECE):
        piece = content[first : first + _PIECE]  # fits a cache
        checksum, largest = zlib.crc32(piece.data, checksum), max(largest, int(piece.max()))
        if first % (64 * _PIECE) == 0:
            release_pages(content)
    release_pages(content)
    if whole:
        return f"{_WHOLE}{checksum:08x}", largest
    edge = _EDGE // content.itemsize
    ends = content[:edge], content[max(0, len(content) - edge) :]
    return hashlib.sha256(b"".join(part.tobytes() for part in ends)).hexdigest()[:16], largest
