"""Read plain text line by line, compressed or not."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from hmmlm.errors import InputError


def read_lines(path: Path) -> Iterator[str]:
    """Yield the stripped lines of a UTF-8 text (plain, .gz or .xz), blank lines included, without loading the file."""
    if not path.exists():
        raise InputError(f"no file {path}: check the name")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give a text file")
    offset = 0  # in bytes of the text, after decompression
    try:
        with _open(path) as file:
            for raw in file:
                yield _decode(raw, path, offset)
                offset += len(raw)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged after {offset} bytes of text ({error}): copy the file again") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    if not offset:
        raise InputError(f"{path} is empty")


def read_documents(path: Path) -> Iterator[str]:
    """Yield one document per line, without blank lines."""
    empty = True
    for line in read_lines(path):
        if line:
            empty = False
            yield line
    if empty:
        raise InputError(f"{path} has only blank lines")


def held_out(text: str) -> str:
    """Return the split of a text, by its hash: "valid" and "test" for 5% each, else "train"."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 20
    return {0: "valid", 1: "test"}.get(place, "train")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


def _decode(raw: bytes, path: Path, offset: int) -> str:
    """Return a line as stripped text; raise an InputError that names the offset of a byte that is not UTF-8."""
    if b"\0" in raw:
        raise InputError(f"{path} is not text: it has a NUL at byte {offset + raw.index(0)}")
    try:
        line = raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise InputError(
            f"{path} is not UTF-8 text: {raw[error.start]:#04x} at byte {at}; convert it to UTF-8"
        ) from None
    return line.strip()
