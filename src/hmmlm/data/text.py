"""Read plain text line by line, compressed or not."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import lzma
import os
import re
import select
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from hmmlm.errors import InputError

_log = logging.getLogger("hmmlm")
MAX_LINE = 1 << 24  # bytes of a line: a text without line breaks is not read into memory, whatever its size
PIPE_TIMEOUT_S, SILENCE_S = 3.0, 300.0
MAX_PIPE = 1 << 30  # bytes of a pipe, which may have no end
UNITS = ("line", "paragraph", "document")
"""What a document of a text file is."""
MAX_CHARACTERS = 400
"""Of a piece of a text without line breaks."""
# After a full stop that a space follows, or an ideographic one.
_SENTENCE_END = re.compile(r"(?<=[.!?…][\"'”’)\]])\s+|(?<=[.!?…])\s+|(?<=[。！？])\s*")


def is_pipe(path: Path) -> bool:
    """Return whether a path is a pipe, whose text can be read once: a FIFO, `<(command)`, /dev/stdin."""
    try:
        return path.is_fifo()
    except ValueError:  # a NUL in the name
        return False


def read_lines(path: Path) -> Iterator[str]:
    """Yield the stripped lines of a UTF-8 text (plain, .gz or .xz), blank lines included, without loading the file."""
    yield from stream_lines(path, lambda: _open(path))


def read_range(path: Path, begin: int, end: int) -> Iterator[str]:
    """Yield the stripped lines of a plain UTF-8 text that begin in a range of its bytes."""

    def open_range() -> BinaryIO:
        file = path.open("rb")
        file.seek(begin)
        return file

    yield from stream_lines(path, open_range, begin, end)


def line_ranges(path: Path, size: int) -> list[tuple[int, int]]:
    """Return ranges of about `size` bytes that make up a plain text file, each of whole lines."""
    total = path.stat().st_size
    bounds = [0]
    with path.open("rb") as file:
        for target in range(size, total, size):
            file.seek(max(target, bounds[-1]))
            file.readline(MAX_LINE + 1)  # a longer line is an error where it is read
            bounds.append(file.tell())
    return [(begin, end) for begin, end in pairwise([*bounds, total]) if begin < end]


def stream_lines(
    path: Path, open_file: Callable[[], BinaryIO], begin: int = 0, end: int | None = None
) -> Iterator[str]:
    """Yield the stripped lines of a UTF-8 text that `open_file` opens; errors name `path`.

    Args:
        begin: offset of the file as it is opened.
        end: offset from which on lines are not read; None: all are.
    """
    offset, number = begin, 0  # offset in bytes of the text, after decompression
    try:
        with open_file() as file:
            while (end is None or offset < end) and (raw := file.readline(MAX_LINE + 1)):
                number += 1
                if len(raw) > MAX_LINE and b"\0" not in raw:
                    raise InputError(
                        f"{path}: line {number} is longer than {MAX_LINE >> 20} MiB: write one example per line"
                    )
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


def read_paragraphs(path: Path) -> Iterator[list[str]]:
    """Yield documents as lists of paragraphs: wrapped lines joined at single spaces.

    A blank line ends a paragraph, two or more end a document.
    """
    return join_paragraphs(read_lines(path))


def join_paragraphs(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents of paragraphs from the stripped lines of a text; see `read_paragraphs`."""
    document: list[str] = []
    paragraph: list[str] = []
    blank = 0
    for line in lines:
        blank = 0 if line else blank + 1
        if line:
            paragraph.append(line)
        elif paragraph:
            document.append(" ".join(paragraph))
            paragraph = []
        if blank == 2 and document:
            yield document
            document = []
    document += [" ".join(paragraph)] if paragraph else []
    if document:
        yield document


def looks_wrapped(lines: Iterable[str]) -> bool:
    """Return whether the stripped lines of a text look like paragraphs that are broken at a width.

    Most lines that another one follows have 60 to 100 characters and do not end a sentence, and there are blank lines.
    """
    begun = list(islice(lines, 2_000))
    inner = [line for line, after in pairwise(begun) if line and after]
    broken = sum(60 <= len(line) <= 100 and line[-1] not in ".!?:;" for line in inner)
    return len(inner) >= 10 and 2 * broken > len(inner) and begun.count("") * 50 > len(begun)


def split_units(text: str, unit: str) -> list[str]:
    """Return the examples of a text as those of a file: its lines, or its paragraphs (unit "paragraph" or "document").

    Blank lines are no examples; a text without any other is one empty example.
    """
    lines = [line.strip() for line in text.split("\n")]
    if unit == "line":
        return [line for line in lines if line] or [""]
    return [paragraph for document in join_paragraphs(lines) for paragraph in document] or [""]


def split_long(text: str) -> list[str]:
    """Split a text without line breaks into sentences, and those into pieces of at most MAX_CHARACTERS characters.

    Pieces end between words; a longer word, such as a sentence of a script without spaces, is cut.
    """
    pieces: list[str] = []
    for sentence in _SENTENCE_END.split(text):
        words = [word[i : i + MAX_CHARACTERS] for word in sentence.split() for i in range(0, len(word), MAX_CHARACTERS)]
        piece = ""
        for word in words:
            if piece and len(piece) + 1 + len(word) > MAX_CHARACTERS:
                pieces.append(piece)
                piece = ""
            piece = f"{piece} {word}" if piece else word
        pieces += [piece] if piece else []
    return pieces


def held_out(text: str) -> str:
    """Return the split of a text, by its hash: "valid" and "test" for 5% each, else "train"."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 20
    return {0: "valid", 1: "test"}.get(place, "train")


def check_text_file(path: Path) -> None:
    """Raise an InputError unless a path is a file or a pipe: a device has no end, or no text."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise InputError(f"no file {path}: check the name") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        raise InputError(f"{path} is a folder: give a text file")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise InputError(f"{path} is a device, not a text file: give a file or a pipe")


def _open(path: Path) -> BinaryIO:
    check_text_file(path)
    if is_pipe(path) or not path.stat().st_size:  # a file of the kernel has no size, and may be written to without end
        return io.BufferedReader(Pipe(path))
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


class Pipe(io.RawIOBase):
    """A pipe, or a file of the kernel: opened without waiting for a writer, and read neither forever nor in silence.

    Args:
        timeout_s: how long a pipe may have no writer; a note is shown after a silence of as long.
        silence_s: how long the writer may be silent.
        most: bytes that are read at most.
    """

    def __init__(
        self, path: Path, timeout_s: float = PIPE_TIMEOUT_S, silence_s: float = SILENCE_S, most: int = MAX_PIPE
    ) -> None:
        self.path, self.pipe = path, os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.timeout_s, self.silence_s, self.most = timeout_s, silence_s, most
        self.total, self.next_note = 0, most >> 6
        self.deadline = time.monotonic() + (timeout_s if is_pipe(path) else 0.0)  # to have a writer

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            os.close(self.pipe)
        super().close()

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                block = os.read(self.pipe, len(buffer))
            except BlockingIOError:  # a writer is there, but slow
                self._wait()
                continue
            if block or self.deadline == 0.0:
                self.deadline = 0.0
                self._count(len(block))
                buffer[: len(block)] = block
                return len(block)
            if time.monotonic() > self.deadline:
                if not is_pipe(self.path):
                    return 0
                raise InputError(f"nothing was written to the pipe {self.path} in {self.timeout_s:.0f} s: give a file")
            time.sleep(0.01)

    def _wait(self) -> None:
        """Wait for the writer."""
        self.deadline = 0.0
        if select.select([self.pipe], [], [], min(self.timeout_s, self.silence_s))[0]:
            return
        _log.warning("waiting for text from %s", self.path)
        if not select.select([self.pipe], [], [], self.silence_s)[0]:
            raise InputError(f"nothing was written to {self.path} in {self.silence_s:.0f} s: give a file")

    def _count(self, size: int) -> None:
        """Note the size of a long text, and refuse one that may have no end."""
        self.total += size
        if self.total > self.most:
            raise InputError(
                f"{self.path} has more than {self.most >> 20:,} MiB of text, maybe no end: save it to a file"
            )
        if self.total > self.next_note:
            _log.warning("%d MiB of text read from %s", self.total >> 20, self.path)
            self.next_note *= 2


def _decode(raw: bytes, path: Path, offset: int) -> str:
    """Return a line as stripped text; raise an InputError that names the offset of a byte that is not UTF-8."""
    if b"\0" in raw:
        where = offset + raw.index(0)
        raise InputError(f"{path} is not text, or is in UTF-16: it has a NUL at byte {where}; convert it to UTF-8")
    try:
        line = raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise InputError(
            f"{path} is not UTF-8 text: {raw[error.start]:#04x} at byte {at}; convert it to UTF-8"
        ) from None
    return line.strip()
