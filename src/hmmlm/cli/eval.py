"""`hmmlm eval`: perplexity of a model."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hmmlm.cli.parse import ModelPath, parse

if TYPE_CHECKING:
    from hmmlm.data.tokenfile import TokenFile
    from hmmlm.learning.config import RunConfig
    from hmmlm.lm import LanguageModel

DESCRIPTION = """Perplexity of a model, exp(−Σ log p / tokens), <eos> and <unk> counted; bits a
token; share of words outside the vocabulary.

A text file is scored whole, a corpus or a folder by its splits, each read as
the model's own validation text was.

examples:
  hmmlm eval runs/mine
  hmmlm eval runs/mine --splits valid test
  hmmlm eval runs/mine --data another.txt"""


@dataclass(frozen=True)
class Arguments:
    model: ModelPath
    data: str | None = None
    """A text file, a folder with train, valid and test files, a folder made by `hmmlm data`, or a corpus by name; None:
    what it was trained on."""
    data_folder: Path | None = None
    """Where corpora given by name lie."""
    splits: tuple[Literal["train", "valid", "test"], ...] = ("test",)
    """Which splits of a corpus."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "eval", DESCRIPTION)

    from rich.console import Console
    from rich.table import Table

    from hmmlm.cli.models import load_model
    from hmmlm.experiments.results import bits, evaluate_split, unknown_share
    from hmmlm.learning.prepare import Prepared
    from hmmlm.learning.progress import perplexity_text

    lm, config = load_model(arguments.model)
    table = Table("split", "tokens", "perplexity", "bits a token", "unknown words", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    with tempfile.TemporaryDirectory() as scratch:
        for split, tokens in _token_files(arguments, lm, config, Path(scratch)).items():
            result = evaluate_split(lm, config, Prepared(lm.tokenizer, {split: tokens}), split)
            unknown = unknown_share(tokens, lm.tokenizer.unk_id, lm.tokenizer.eos_id)
            figures = (perplexity_text(result.perplexity, 2), f"{bits(result.perplexity):.3f}")
            table.add_row(split, f"{result.tokens:,}", *figures, f"{unknown:.2%}")
    Console().print(table)
    return 0


def _token_files(arguments: Arguments, lm: LanguageModel, config: RunConfig, scratch: Path) -> dict[str, TokenFile]:
    from hmmlm.cli.models import run_folder
    from hmmlm.data.corpora import encode_documents, file_documents, load_text
    from hmmlm.errors import InputError
    from hmmlm.learning.prepare import is_prepared, reopen

    folder = run_folder(arguments.model) if arguments.data is None else Path(arguments.data)
    if folder is not None and is_prepared(folder):
        prepared = reopen(folder)
        if prepared.tokenizer.fingerprint() != lm.tokenizer.fingerprint():
            raise InputError(
                f"the token files in {folder} are of another vocabulary than the model: give the text itself by --data"
            )
        return {split: prepared.tokens[split] for split in arguments.splits}
    if arguments.data is not None and Path(arguments.data).is_file():
        documents = {Path(arguments.data).name: file_documents(Path(arguments.data))}
    else:
        corpus = load_text(
            arguments.data or config.data, folder=arguments.data_folder or config.data_folder, download=True
        )
        documents = {split: corpus[split] for split in arguments.splits}
    return {name: encode_documents(d, lm.tokenizer, scratch / str(i)) for i, (name, d) in enumerate(documents.items())}
