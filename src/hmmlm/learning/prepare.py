"""From text to what training reads: a tokenizer and token files, kept in the run's folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from hmmlm.data.corpora import SPLITS, Documents, encode_documents, load_text
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizer import HuggingFaceTokenizer, Tokenizer, WordTokenizer, load_tokenizer
from hmmlm.learning.config import RunConfig, TokenizerConfig
from hmmlm.learning.progress import Progress

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prepared:
    """What a run trains and validates on."""

    tokenizer: Tokenizer
    tokens: dict[str, TokenFile]
    """train, valid and test."""


def prepare(config: RunConfig, run: Path, progress: Progress) -> Prepared:
    """Train or load the tokenizer, then encode every split, into run/tokenizer and run/data."""
    progress.note(f"reading {config.data}")
    splits = load_text(config.data, folder=config.data_folder, download=True)
    with progress.phase("tokenizer", unit="lines") as phase:
        lines = (line for document in splits["train"] for line in document)
        tokenizer = make_tokenizer(config.tokenizer, _counted(lines, phase.advance))
    shutil.rmtree(run / "tokenizer", ignore_errors=True)  # of an earlier start that came to no checkpoint
    tokenizer.save(run / "tokenizer")
    tokens = {}
    for split, documents in splits.items():
        with progress.phase(f"encoding {split}", unit="documents") as phase:
            counted = Documents(documents.source, partial(_counted, documents, phase.advance))
            tokens[split] = encode_documents(counted, tokenizer, run / "data" / split)
    return Prepared(tokenizer, tokens)


def reopen(run: Path) -> Prepared:
    """What `prepare` made, for a run that resumes: the text itself is not needed any more."""
    tokenizer = load_tokenizer(run / "tokenizer")
    fingerprint = tokenizer.fingerprint()
    return Prepared(tokenizer, {split: TokenFile.open(run / "data" / split, fingerprint) for split in SPLITS})


def make_tokenizer(config: TokenizerConfig, lines: Iterable[str]) -> Tokenizer:
    """The tokenizer a configuration asks for; `lines` are those of the training text."""
    if config.kind == "file":
        assert config.file is not None  # the configuration was validated
        return load_tokenizer(config.file)
    if config.kind == "bpe":
        return HuggingFaceTokenizer.train(lines, config.vocab_size)
    return WordTokenizer.train(
        lines, config.vocab_size, config.min_count, split=config.split, lowercase=config.lowercase
    )


def _counted(items: Iterable[Item], advance: Callable[[int], None]) -> Iterator[Item]:
    for item in items:
        yield item
        advance(1)
