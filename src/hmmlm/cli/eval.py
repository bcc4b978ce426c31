"""`hmmlm eval`: perplexity of a model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from hmmlm.cli.parse import Arguments, ModelPath, parse

if TYPE_CHECKING:
    from hmmlm.data.tokenfile import TokenFile
    from hmmlm.text.lm import LanguageModel

DESCRIPTION = """Print the perplexity of a model, exp(−Σ log p / tokens), with <eos> and <unk> counted; bits per
token; and the fraction of words outside the vocabulary.

A text file is scored whole, a corpus or a folder by its splits, each read like the model's own
validation text.

examples:
  hmmlm eval runs/mine
  hmmlm eval runs/mine --splits valid,test
  hmmlm eval runs/mine --data another.txt
  hmmlm eval runs/mine --data /dev/stdin"""


class EvalArguments(Arguments):
    model: ModelPath
    data: str | None = None
    """A text file or a pipe (/dev/stdin), a folder with train, valid and test files, a folder made by `hmmlm data`, or
    a corpus by name; None: the data the model was trained on."""
    data_folder: Path | None = None
    """Folder of named corpora."""
    splits: Annotated[tuple[Literal["train", "valid", "test"], ...], Field(min_length=1)] = ("test",)
    """Splits of a corpus, separated by commas."""

    @field_validator("splits", mode="before")
    @classmethod
    def _split_at_commas(cls, values: list[str]) -> list[str]:
        return [name for value in values for name in value.split(",")]


def run(argv: list[str]) -> int:
    arguments = parse(EvalArguments, argv, "eval", DESCRIPTION)

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hmmlm.report.labels import printable
    from hmmlm.report.results import bits_per_token, evaluate_tokens, unknown_fraction
    from hmmlm.runs.progress import perplexity_text
    from hmmlm.text.lm import load

    lm = load(arguments.model)
    table = Table("split", "tokens", "perplexity", "bits per token", "unknown words", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    with tempfile.TemporaryDirectory() as scratch:
        for split, tokens in _token_files(arguments, lm, Path(scratch)).items():
            result = evaluate_tokens(lm, tokens)
            unknown = unknown_fraction(tokens, lm.tokenizer.unk_id, lm.tokenizer.eos_id)
            figures = (perplexity_text(result.perplexity, 2), f"{bits_per_token(result.perplexity):.3f}")
            # Text, not markup: a file may be named "[red].txt".
            table.add_row(Text(printable(split)), f"{result.tokens:,}", *figures, f"{unknown:.2%}")
    Console().print(table)
    return 0


def _token_files(arguments: EvalArguments, lm: LanguageModel, scratch: Path) -> dict[str, TokenFile]:
    from hmmlm.data.corpora import encode_documents, file_documents, load_text
    from hmmlm.data.text import is_pipe
    from hmmlm.errors import InputError
    from hmmlm.learning.prepare import is_prepared, reopen
    from hmmlm.report.results import run_folder

    folder = run_folder(arguments.model) if arguments.data is None else Path(arguments.data)
    if folder is not None and is_prepared(folder):
        prepared = reopen(folder)
        if prepared.tokenizer.fingerprint() != lm.tokenizer.fingerprint():
            raise InputError(
                f"the token files in {folder} have another vocabulary than the model: give the text itself with --data"
            )
        return {split: prepared.tokens[split] for split in arguments.splits}
    if arguments.data is not None and (Path(arguments.data).is_file() or is_pipe(Path(arguments.data))):
        documents = {Path(arguments.data).name: file_documents(Path(arguments.data))}
    else:
        trained_on, trained_folder = lm.config.get("data", "embedded"), lm.config.get("data_folder")
        home = arguments.data_folder or (None if trained_folder is None else Path(trained_folder))
        corpus = load_text(arguments.data or trained_on, folder=home, download=True)
        documents = {split: corpus[split] for split in arguments.splits}
    return {name: encode_documents(d, lm.tokenizer, scratch / str(i)) for i, (name, d) in enumerate(documents.items())}
