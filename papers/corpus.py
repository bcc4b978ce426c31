"""`python -m papers.corpus SOURCE --tokenizer FILE --out TOKENS`: token files for the studies of lee2025.

The source is a folder of text, or shards of SlimPajama. Every split is read from its beginning until it has enough
tokens, so neither the source nor the token files have to fit in memory. TOKENS/corpus.json says what was read, by which
rule it was split, and the sha256 of the token files and of the split; records of runs hold these checksums.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from hmmlm.data.corpora import SPLITS, document_tokens
from hmmlm.data.files import read_json, write_bytes
from hmmlm.data.text import held_out, read_lines, stream_lines
from hmmlm.data.tokenfile import write_tokens
from hmmlm.data.tokenizers import Tokenizer, find_tokenizer
from hmmlm.errors import InputError
from hmmlm.runs.folders import refuse_used, removed_on_failure
from hmmlm.terminal import print_table

FACTS = "corpus.json"
TEXT, JSON_LINES = ".txt", ".jsonl"
COMPRESSIONS = ("", ".gz", ".xz", ".zst")
FOLDERS = {"train": ("train",), "valid": ("validation", "valid"), "test": ("test",)}
"""Folders of the splits of a source that is divided already, as SlimPajama is."""
BY_FOLDER = "the folders train, validation (or valid) and test of the source"
BY_HASH = (
    "sha256 of the lines of a document, joined by line breaks: first 8 bytes modulo 20; 0 valid, 1 test, else train"
)
TRAIN_TOKENS, HELD_OUT_TOKENS = 500_000_000, 1_000_000
"""Table 5 of the paper."""


class Text(NamedTuple):
    """A document: its lines that are not blank, and the part of the corpus that it is of."""

    lines: list[str]
    part: str = ""


def build(source: Path, tokenizer: Path, out: Path, train_tokens: int, held_out_tokens: int) -> dict[str, Any]:
    """Write the token files of a source and return what `corpus.json` has; documents are not cut.

    Args:
        source: a folder with files of text (.txt, whose documents are separated by blank lines) or with a JSON object
            per line (.jsonl, with `text`), plain or as .gz, .xz or .zst; or one such file. Every line of a document
            that is not blank is followed by <eos>, as everywhere in hmmlm.
        tokenizer: tokenizer.json or tokenizer.model.
        out: a new folder for data/ and tokenizer/.
        train_tokens: tokens of train, after which no document is added.
        held_out_tokens: the same of valid and of test.
    """
    refuse_used(out)
    files, divided = find_files(source)
    reader = find_tokenizer(tokenizer)
    facts: dict[str, Any] = {"split": BY_FOLDER if divided else BY_HASH, "splits": {}}
    whole = hashlib.sha256()
    with removed_on_failure(out, ("tokenizer", "data", FACTS), not out.exists()):
        reader.save(out / "tokenizer")
        for split in SPLITS:
            own = _Split(split, divided, train_tokens if split == "train" else held_out_tokens)
            write_tokens(
                out / "data" / split,
                own.read(files[split], source if source.is_dir() else source.parent, reader),
                reader.vocab_size,
                reader.fingerprint(),
                f"{source.name} {split}",
                partial(getattr, own, "text_bytes"),
                "document",
            )
            facts["splits"][split] = own.facts()
            whole.update(f"{split} {own.digest.hexdigest()}\n".encode())
        facts["split_sha256"] = whole.hexdigest()
        made = [*(out / "data").glob("*.bin"), *(out / "data").glob("*.idx"), *(out / "tokenizer").iterdir()]
        facts["sha256"] = {file.relative_to(out).as_posix(): checksum(file) for file in sorted(made)}
        write_bytes(out / FACTS, (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode())
    return facts


class _Split:
    """The documents of one split, and what was read of them."""

    def __init__(self, split: str, divided: bool, most: int) -> None:
        self.split, self.divided, self.most = split, divided, most
        self.digest, self.text_bytes = hashlib.sha256(), 0
        self.tokens, self.count = 0, 0
        self.sizes: dict[str, int] = {}
        self.parts: Counter[str] = Counter()

    def read(self, files: Sequence[Path], root: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
        """Yield the tokens of each document of the split, until there are enough."""
        for file in files:
            self.sizes[file.relative_to(root).as_posix()] = file.stat().st_size
            for document in read_documents(file):
                text = "\n".join(document.lines)
                if not self.divided and held_out(text) != self.split:
                    continue
                ids = document_tokens(document.lines, tokenizer)
                self.digest.update(hashlib.sha256(text.encode()).digest())
                self.text_bytes += len(text.encode()) + 1
                self.tokens, self.count = self.tokens + len(ids), self.count + 1
                self.parts[document.part] += len(ids)
                yield ids
                if self.tokens >= self.most:
                    return
        if not self.count:
            raise InputError(f"{root} has no document for {self.split}: give more text, or a folder for each split")

    def facts(self) -> dict[str, Any]:
        parts = {name: count for name, count in sorted(self.parts.items()) if name}
        of_parts = {"tokens_of_parts": parts} if parts else {}
        return {"tokens": self.tokens, "documents": self.count, **of_parts, "bytes_of_files": self.sizes}


def find_files(source: Path) -> tuple[dict[str, list[Path]], bool]:
    """Return the files of each split, sorted by path, and whether the source has a folder for each."""
    found = [next((source / name for name in FOLDERS[split] if (source / name).is_dir()), None) for split in SPLITS]
    divided = all(found)
    files = {
        split: _text_files(folder if divided and folder is not None else source)
        for split, folder in zip(SPLITS, found, strict=True)
    }
    return files, divided


def _text_files(source: Path) -> list[Path]:
    if source.is_file() and _kind(source):
        return [source]
    files = sorted(path for path in source.rglob("*") if path.is_file() and _kind(path)) if source.is_dir() else []
    if not files:
        raise InputError(
            f"no text in {source}: give a folder with files {TEXT} or {JSON_LINES}, plain or as .gz, .xz or .zst"
        )
    return files


def _kind(file: Path) -> str:
    """Return the suffix of a file of text without its compression; empty for another file."""
    stem = file.name.removesuffix(file.suffix) if file.suffix in COMPRESSIONS[1:] else file.name
    return next((kind for kind in (TEXT, JSON_LINES) if stem.endswith(kind)), "")


def read_documents(file: Path) -> Iterator[Text]:
    """Yield the documents of a file that have any text."""
    lines = stream_lines(file, lambda: _open_zstd(file)) if file.suffix == ".zst" else read_lines(file)
    if _kind(file) == TEXT:
        yield from (Text(list(group)) for filled, group in groupby(lines, bool) if filled)
        return
    for number, line in enumerate(lines, 1):
        document = _from_json(line, f"{file}, line {number}") if line else Text([])
        if document.lines:
            yield document


def _from_json(line: str, where: str) -> Text:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}): each line is an object with a text") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise InputError(f'{where}: no text: each line is an object such as {{"text": "…"}}')
    meta = entry.get("meta")
    part = meta.get("redpajama_set_name", "") if isinstance(meta, dict) else ""
    return Text([kept for line in entry["text"].splitlines() if (kept := line.strip())], str(part))


def _open_zstd(file: Path) -> BinaryIO:
    """Return the text of a file that zstd compressed; damage is an OSError, as `stream_lines` reports it."""
    try:
        import zstandard
    except ImportError:
        raise InputError(
            f"{file} is compressed with zstd, which needs the package zstandard: pip install zstandard, or decompress "
            "the files with `zstd -d`"
        ) from None

    class Decompressed(io.RawIOBase):
        def __init__(self) -> None:
            self.stream = zstandard.ZstdDecompressor().stream_reader(file.open("rb"), read_across_frames=True)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            try:
                return cast(int, self.stream.readinto(buffer))
            except zstandard.ZstdError as error:
                raise OSError(0, f"damaged ({error}): copy the file again") from None

        def close(self) -> None:
            self.stream.close()
            super().close()

    return io.BufferedReader(Decompressed())


def checksum(file: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def text_checksums(folder: Path) -> dict[str, str]:
    """Return the sha256 of the token files in a folder, and that of the split if `build` made it; empty without any."""
    files = {split: folder / "data" / f"{split}.bin" for split in SPLITS}
    if not all(file.exists() for file in files.values()):
        return {}
    found = {split: checksum(file) for split, file in files.items()}
    if (folder / FACTS).exists():
        found["split"] = read_json(folder / FACTS)["split_sha256"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m papers.corpus",
        description="Write the token files (train, valid, test) of a folder of text or of shards of SlimPajama, and "
        "their checksums. A folder with train, validation and test is divided as it is; other documents are divided by "
        "a hash. Files are read in the order of their paths.",
    )
    parser.add_argument("source", type=Path, help="folder of .txt or .jsonl files, plain or as .gz, .xz or .zst")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.model or tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, metavar="TOKENS", help="new folder, for --set data=TOKENS")
    parser.add_argument("--train-tokens", type=int, default=TRAIN_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--held-out-tokens", type=int, default=HELD_OUT_TOKENS, metavar="N", help="each, %(default)s")
    options = parser.parse_args(argv)
    try:
        facts = build(options.source, options.tokenizer, options.out, options.train_tokens, options.held_out_tokens)
    except InputError as error:
        print(f"papers: error: {error}", file=sys.stderr)
        return 2
    rows = [
        (split, f"{own['tokens']:,}", f"{own['documents']:,}", facts["sha256"][f"data/{split}.bin"][:16])
        for split, own in facts["splits"].items()
    ]
    print_table(("split", "tokens", "documents", "sha256"), rows)
    print(f"split {facts['split_sha256']}; written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
