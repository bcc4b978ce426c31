"""Corpora as documents of lines, and their token files.

A document is a list of lines, and every line ends with the tokenizer's eos. A document is one line in PTB and in user
texts, one article in WikiText-2, and one paragraph in the embedded corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hmmlm.data.embedded import embedded_corpus
from hmmlm.data.public import PTB, WIKITEXT_2, locate
from hmmlm.data.text import check_text_file, held_out, is_pipe, read_documents, read_lines
from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError

SPLITS = ("train", "valid", "test")
NAMES = ("embedded", PTB.name, WIKITEXT_2.name)
Document = list[str]


@dataclass(frozen=True)
class Documents:
    """The documents of one split, read from their source at every iteration."""

    source: str  # identifies the content: changes when the content changes
    read: Callable[[], Iterable[Document]]

    def __iter__(self) -> Iterator[Document]:
        return iter(self.read())


def load_text(name_or_path: str, *, folder: Path | None = None, download: bool = False) -> dict[str, Documents]:
    """Return the train, valid and test documents of a corpus.

    Args:
        name_or_path: a name ("embedded", "ptb" or "wikitext-2"); a folder with train.txt, valid.txt and test.txt (or
            .gz, .xz); or one text file, whose lines are split into 90% train, 5% valid and 5% test.
        folder: where to find a named corpus; by default $HMMLM_DATA or the cache.
        download: whether to download a named corpus that is missing.
    """
    if name_or_path == "embedded":
        return {split: _paragraphs(lines) for split, lines in embedded_corpus().items()}
    for corpus, read in ((PTB, _one_a_line), (WIKITEXT_2, _articles)):
        if name_or_path == corpus.name:
            found = locate(corpus, folder, download)
            return {split: Documents(checksum, partial(read, path)) for split, (path, checksum) in found.items()}
    path = Path(name_or_path)
    if path.is_dir():
        return {split: file_documents(_split_file(path, split)) for split in SPLITS}
    if not path.exists():
        raise InputError(f"no corpus {name_or_path!r}: give a file, a folder, or one of {', '.join(NAMES)}")
    if is_pipe(path):
        raise InputError(f"{path} is a pipe, which can be read only once, and its splits are read one by one: save it")
    return _held_out_splits(path)


def file_documents(path: Path) -> Documents:
    """Return a whole text file as one split, with one document per line."""
    return Documents(_file_source(path), partial(_one_a_line, path))


def encode_documents(documents: Documents, tokenizer: Tokenizer, path: Path) -> TokenFile:
    """Return the token file `path` of `documents`, with eos after every line; write it unless it is up to date."""
    fingerprint = tokenizer.fingerprint()
    try:
        existing = TokenFile.open(path, fingerprint)
        if existing.source == documents.source:
            return existing
    except InputError:
        pass  # missing, damaged or of another tokenizer: written below
    text_bytes = 0

    def encoded() -> Iterator[list[int]]:
        nonlocal text_bytes
        for document in documents:
            text_bytes += sum(len(line.encode()) + 1 for line in document)
            yield [i for line in document for i in (*tokenizer.encode(line), tokenizer.eos_id)]

    return write_tokens(path, encoded(), tokenizer.vocab_size, fingerprint, documents.source, lambda: text_bytes)


def _paragraphs(lines: list[str]) -> Documents:
    source = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Documents(source, lambda: ([line] for line in lines))


def _one_a_line(path: Path) -> Iterator[Document]:
    return ([line] for line in read_documents(path))


def _articles(path: Path) -> Iterator[Document]:
    """Yield the articles of WikiText; one starts with ` = Title = ` between blank lines, and contains blank lines."""
    article: Document = []
    titled = False
    waiting: str | None = None  # a possible title: the blank line after it decides
    for line in read_lines(path):
        if waiting is not None:
            if line == "" and titled:
                yield article
                article = []
            titled = titled or line == ""
            article.append(waiting)
            waiting = None
        if _is_title(line) and (not article or article[-1] == ""):
            waiting = line
        else:
            article.append(line)
    if waiting is not None:
        article.append(waiting)
    yield article


def _is_title(line: str) -> bool:
    return line.startswith("= ") and line.endswith(" =") and not line.startswith("= =") and len(line) > 4


def _split_file(folder: Path, split: str) -> Path:
    """Return the text file of a split in a corpus folder."""
    candidates = [folder / f"{split}.txt{suffix}" for suffix in ("", ".gz", ".xz")]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(f"no {split}.txt (or .gz, .xz) in {folder}: a corpus folder needs train, valid and test")
    return found


def _file_source(path: Path) -> str:
    """Return a text that changes when the file does: its path, size and modification time."""
    check_text_file(path)
    status = path.stat()
    return f"{path.resolve()} {status.st_size} bytes {status.st_mtime_ns}"


def _held_out_splits(path: Path) -> dict[str, Documents]:
    """Split a file by the hash of a line, so that no line is in two splits; by position if a split would be empty."""
    seen: set[str] = set()
    count = 0
    for count, line in enumerate(read_documents(path), 1):  # noqa: B007
        seen.add(held_out(line))
        if len(seen) == len(SPLITS):
            assign: Callable[[int, str], str] = _by_hash
            break
    else:
        if count < len(SPLITS):
            lines = "1 line" if count == 1 else f"{count} lines"
            raise InputError(f"{path} has {lines}, too few for train, valid and test: write one example per line")
        assign = partial(_by_position, min(count, 20))

    def read(split: str) -> Iterator[Document]:
        return ([line] for i, line in enumerate(read_documents(path)) if assign(i, line) == split)

    return {split: Documents(f"{_file_source(path)} {split}", partial(read, split)) for split in SPLITS}


def _by_hash(_: int, line: str) -> str:
    return held_out(line)


def _by_position(period: int, i: int, _: str) -> str:
    return {period - 2: "valid", period - 1: "test"}.get(i % period, "train")
