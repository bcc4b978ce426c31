"""Corpora as documents of lines, and their token files.

A document is a list of lines, and every line ends with the tokenizer's eos. A document is one line in PTB and in user
texts, one article in WikiText-2, and one paragraph in the embedded corpus.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

from hmmlm.data.embedded import embedded_corpus
from hmmlm.data.public import PTB, WIKITEXT_2, locate
from hmmlm.data.text import (
    check_text_file,
    held_out,
    is_pipe,
    line_ranges,
    looks_wrapped,
    read_documents,
    read_lines,
    read_paragraphs,
    read_range,
    split_long,
)
from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.terminal import counted

SPLITS = ("train", "valid", "test")
NAMES = ("embedded", PTB.name, WIKITEXT_2.name)
TEXT_SUFFIXES = ("", ".gz", ".xz")
Document = list[str]
MANY_REPEATED, MIN_REPEATED = 0.1, 20
"""Fraction of test lines in the training text that is reported, and the bytes of a line that is not short."""


class LabelledLine(list[str]):
    """A document of one line, with what is known of the states of its tokens."""

    def __init__(self, line: str, labels: str, where: str) -> None:
        super().__init__([line])
        self.labels, self.where = labels, where


@dataclass(frozen=True)
class Documents:
    """The documents of one split, read from their source at every iteration."""

    source: str  # identifies the content: changes when the content changes
    read: Callable[[], Iterable[Document]]
    note: str = ""  # how the text was divided, if not as usual
    unit: str = "line"  # what an example is
    parts: Callable[[], list[Documents]] | None = None  # divides them into parts that can be read on their own

    def __iter__(self) -> Iterator[Document]:
        return iter(self.read())

    def divide(self) -> list[Documents]:
        """Return parts that make up the documents, in order; the documents themselves if they cannot be divided."""
        return [self] if self.parts is None else self.parts()


def load_text(
    name_or_path: str,
    *,
    folder: Path | None = None,
    download: bool = False,
    unit: str = "line",
    labels: Path | None = None,
) -> dict[str, Documents]:
    """Return the train, valid and test documents of a corpus.

    Args:
        name_or_path: a name ("embedded", "ptb" or "wikitext-2"); a folder with train.txt, valid.txt and test.txt (or
            .gz, .xz); or one text file, whose units are split into 90% train, 5% valid and 5% test. With the unit
            "document" also a folder of text files, each a document, which are split in the same way.
        folder: where to find a named corpus; by default $HMMLM_DATA or the cache.
        download: whether to download a named corpus that is missing.
        unit: "line", "paragraph" or "document" (see `hmmlm.config.sections.TextConfig`); not of named corpora.
        labels: a file with a line for each of the text (of train.txt in a folder), whose training lines then have them.
    """
    if labels is not None:
        return _labelled_text(Path(name_or_path), unit, labels)
    if name_or_path == "embedded":
        return {split: _paragraphs(lines) for split, lines in embedded_corpus().items()}
    for corpus, read in ((PTB, _one_a_line), (WIKITEXT_2, _articles)):
        if name_or_path == corpus.name:
            found = locate(corpus, folder, download)
            return {split: Documents(checksum, partial(read, path)) for split, (path, checksum) in found.items()}
    path = Path(name_or_path)
    if path.is_dir() and unit == "document" and not any(path.glob("train.txt*")):
        files = sorted(file for suffix in TEXT_SUFFIXES for file in path.rglob(f"*.txt{suffix}"))
        source = " ".join(map(_file_source, files))
        return _held_out_splits(path, source, lambda: map(_whole_file, files), unit)
    if path.is_dir():
        return {split: file_documents(_split_file(path, split), unit) for split in SPLITS}
    if not path.exists():
        raise InputError(f"no corpus {name_or_path!r}: give a file, a folder, or one of {', '.join(NAMES)}")
    if is_pipe(path):
        raise InputError(f"{path} is a pipe, which can be read only once, and its splits are read one by one: save it")
    return _held_out_splits(path, _file_source(path), partial(_units, path, unit), unit)


def file_documents(path: Path, unit: str = "line") -> Documents:
    """Return a whole text file as one split, with one document per unit."""
    source = f"{_file_source(path)} {unit}"
    return Documents(source, partial(_units, path, unit), unit=unit, parts=_parts(path, unit, source, None))


def _labelled_text(path: Path, unit: str, labels: Path) -> dict[str, Documents]:
    """Return the documents of a text whose training lines have labels."""
    text = _split_file(path, "train") if path.is_dir() else path
    if unit != "line" or not text.is_file():
        raise InputError(f"labels are of a text file with one example per line, not of {path} by {unit}")
    if not labels.is_file():
        raise InputError(f"no file {labels} with labels")

    def lines() -> Iterator[Document]:
        for number, (line, own) in enumerate(zip_longest(read_lines(text), read_lines(labels)), 1):
            if line is None or own is None:
                raise InputError(f"{labels} has {'more' if line is None else 'fewer'} lines than {text}: one for each")
            if line:
                yield LabelledLine(line, own, f"{labels}, line {number}")

    source = f"{_file_source(text)} {_file_source(labels)}"
    if not path.is_dir():
        return _held_out_splits(path, source, lines, unit)
    return {**load_text(str(path)), "train": Documents(source, lines)}


def notices(name_or_path: str, splits: Mapping[str, Documents]) -> Iterator[str]:
    """Yield what may be wrong with a text, and what helps: one line each."""
    if name_or_path in NAMES:
        return
    path = Path(name_or_path)
    path = _split_file(path, "train") if path.is_dir() and splits["train"].unit == "line" else path
    if splits["train"].unit == "line" and looks_wrapped(read_lines(path)):
        yield "lines look wrapped: --text.unit paragraph joins them"
    test = Counter(line for document in splits["test"] for line in document)
    found = {line for document in splits["train"] for line in document if line in test}
    repeated = sum(test[line] for line in found if len(line.encode()) >= MIN_REPEATED) / max(1, test.total())
    if repeated > MANY_REPEATED:
        yield f"{repeated:.0%} of the test lines occur in the training text, so that its perplexity is too low"


def encode_documents(documents: Documents, tokenizer: Tokenizer, path: Path) -> TokenFile:
    """Return the token file `path` of `documents`, with eos after every line; write it unless it is up to date."""
    fingerprint = tokenizer.fingerprint()
    if (existing := open_tokens(documents, path, fingerprint)) is not None:
        return existing
    text_bytes = 0

    def encoded() -> Iterator[list[int]]:
        nonlocal text_bytes
        for document in documents:
            text_bytes += sum(len(line.encode()) + 1 for line in document)
            yield document_tokens(document, tokenizer)

    return write_tokens(
        path, encoded(), tokenizer.vocab_size, fingerprint, documents.source, lambda: text_bytes, documents.unit
    )


def open_tokens(documents: Documents, path: Path, fingerprint: str) -> TokenFile | None:
    """Return the token file `path` if it is that of `documents`; None if it is missing, damaged or of other tokens."""
    try:
        existing = TokenFile.open(path, fingerprint)
    except InputError:
        return None
    return existing if existing.source == documents.source else None


def document_tokens(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a document, with eos after every line."""
    tokens: list[int] = []
    for line in document:
        tokens += tokenizer.encode(line)
        tokens.append(tokenizer.eos_id)
    return tokens


def _paragraphs(lines: list[str]) -> Documents:
    source = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Documents(source, lambda: ([line] for line in lines))


def _units(path: Path, unit: str) -> Iterator[Document]:
    """Yield the lines, paragraphs or documents of a file."""
    if unit == "line":
        return _one_a_line(path)
    documents = read_paragraphs(path)
    return documents if unit == "document" else ([paragraph] for document in documents for paragraph in document)


def _whole_file(path: Path) -> Document:
    """Return a file as one document of paragraphs."""
    return [paragraph for document in read_paragraphs(path) for paragraph in document]


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
    candidates = [folder / f"{split}.txt{suffix}" for suffix in TEXT_SUFFIXES]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(f"no {split}.txt (or .gz, .xz) in {folder}: a corpus folder needs train, valid and test")
    return found


def _file_source(path: Path) -> str:
    """Return a text that changes when the file does: its path, size and modification time."""
    check_text_file(path)
    status = path.stat()
    return f"{path.resolve()} {status.st_size} bytes {status.st_mtime_ns}"


def _held_out_splits(
    path: Path, source: str, documents: Callable[[], Iterable[Document]], unit: str, note: str = ""
) -> dict[str, Documents]:
    """Split documents by their hash, so that none is in two splits; by position if a split would be empty.

    A text of one or two long lines is divided into sentences.
    """
    seen: set[str] = set()
    count = 0
    for count, document in enumerate(documents(), 1):  # noqa: B007
        seen.add(held_out("\n".join(document)))
        if len(seen) == len(SPLITS):
            assign: Callable[[int, str], str] = _by_hash
            break
    else:
        if count < len(SPLITS) and unit == "line" and not note:
            note = f"({'its one line' if count == 1 else f'its {count} lines'} divided into sentences)"
            pieces = lambda: ([piece] for document in documents() for piece in split_long(document[0]))  # noqa: E731
            return _held_out_splits(path, f"{source} sentences", pieces, unit, note)
        if count < len(SPLITS):
            raise InputError(f"{path} has {counted(count, unit)}, too few for train, valid and test: {_ADVICE[unit]}")
        assign = partial(_by_position, min(count, 20))

    def read(split: str) -> Iterator[Document]:
        return (document for i, document in enumerate(documents()) if assign(i, "\n".join(document)) == split)

    def of_split(split: str) -> Documents:
        name = f"{source} {unit} {split}"
        parts = _parts(path, unit, name, split) if assign is _by_hash and not note else None
        return Documents(name, partial(read, split), note, unit, parts)

    return {split: of_split(split) for split in SPLITS}


PART_BYTES = 1 << 28
"""Bytes of a text that one process reads at a time."""


def _parts(path: Path, unit: str, source: str, split: str | None) -> Callable[[], list[Documents]] | None:
    """Return the function that divides the lines of a plain text file, those of a split; None if it has other units."""
    if unit != "line" or path.is_dir() or is_pipe(path) or path.suffix in TEXT_SUFFIXES[1:]:
        return None
    return partial(_line_parts, path, source, split)


def _line_parts(path: Path, source: str, split: str | None) -> list[Documents]:
    ranges = line_ranges(path, PART_BYTES)
    return [Documents(f"{source} {b}-{e}", partial(_lines_within, path, b, e, split)) for b, e in ranges]


def _lines_within(path: Path, begin: int, end: int, split: str | None) -> Iterator[Document]:
    lines = (line for line in read_range(path, begin, end) if line)
    return ([line] for line in lines if split is None or held_out(line) == split)


_ADVICE = {
    "line": "write one example per line",
    "paragraph": "separate paragraphs by a blank line, or use --text.unit line",
    "document": "separate documents by two blank lines, give a folder with a file each, or use --text.unit paragraph",
}


def _by_hash(_: int, text: str) -> str:
    return held_out(text)


def _by_position(period: int, i: int, _: str) -> str:
    return {period - 2: "valid", period - 1: "test"}.get(i % period, "train")
