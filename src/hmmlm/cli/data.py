"""`hmmlm data`: token files, and public corpora by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from hmmlm.cli.parse import Arguments, parse
from hmmlm.config.sections import AutoTokenizerConfig, TextConfig, TokenizerConfig
from hmmlm.config.training import TrainingConfig, fill_in_kinds, with_words
from hmmlm.section import Passes
from hmmlm.terminal import counted, print_table, printable

if TYPE_CHECKING:
    from hmmlm.data.corpora import Documents

DESCRIPTION = """Write the token files of a corpus (train, valid, test) and its tokenizer.

PTB and WikiText-2 are taken from --data-folder (else $HMMLM_DATA, else the cache), or downloaded to
it and checked.

examples:
  hmmlm data ptb --out data/ptb
  hmmlm data wikitext-2 --data-folder ~/corpora --out data/wikitext-2
  hmmlm data my.txt --out data/mine --tokenizer.kind bpe
  hmmlm data ptb --out data/ptb-128 --clusters 128
  hmmlm data large.txt --out data/large --workers 16"""
MADE = ("tokenizer", "data", "clusters.paths")
UNFINISHED = "unfinished.json"
"""File with the settings of token files that are made in parts, until they are complete."""


class DataArguments(Arguments):
    corpus: Annotated[
        CliPositionalArg[str],
        Field(description="embedded, ptb, wikitext-2, a text file, or a folder with train, valid and test files."),
    ]
    out: Path
    """New folder for the token files (data/) and the tokenizer (tokenizer/)."""
    data_folder: Path | None = None
    """Folder of named corpora, to which missing ones are downloaded."""
    clusters: Annotated[int, Field(ge=0, le=4_096)] = 0
    """Also cluster the words of the training text into this many Brown clusters, for --model.clusters; 0: none."""
    exchange_passes: Passes = 0
    """Passes over all words that move each to the best cluster afterwards."""
    workers: Annotated[int, Field(gt=0, le=1_024)] | None = None
    """Processes that read the text, in parts; after an interruption, the same command continues with the parts that are
    missing. Lines of plain text files are divided; other texts are one part each. None: one process, without parts."""
    text: TextConfig = TextConfig()
    tokenizer: TokenizerConfig = AutoTokenizerConfig()
    quiet: bool = False
    """Print results and warnings only."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        return fill_in_kinds(cls, with_words(values, "corpus"))


def _settings(config: TrainingConfig, source: Mapping[str, Documents] | Path) -> bytes:
    """Return everything that token files depend on."""
    texts = str(source) if isinstance(source, Path) else {split: text.source for split, text in source.items()}
    return json.dumps({"config": config.dump(), "texts": texts}, indent=1).encode()


def _refuse_used(out: Path, workers: int | None) -> None:
    """Raise an InputError unless `out` is new, or has unfinished token files that workers can continue."""
    from hmmlm.runs.folders import refuse_used

    if workers is None or not (out / UNFINISHED).exists():
        refuse_used(out)


def _refuse_other(out: Path, settings: bytes) -> None:
    """Raise an InputError if a folder has unfinished token files of other settings."""
    from hmmlm.data.files import read_bytes
    from hmmlm.errors import InputError

    path = out / UNFINISHED
    if path.exists() and read_bytes(path) != settings:
        raise InputError(
            f"{out} has unfinished token files of another text, tokenizer or unit ({path}): give the same settings and "
            "the same text to continue, delete the folder to start anew, or give another folder"
        )


@contextmanager
def _unfinished(out: Path, settings: bytes) -> Iterator[None]:
    """Mark the token files in `out` as unfinished until the block ends; if it fails before any was made, leave nothing.

    Otherwise a corrected text would be refused as another one.
    """
    from hmmlm.data.files import write_bytes
    from hmmlm.runs.folders import LOCK

    write_bytes(out / UNFINISHED, settings)
    try:
        yield
    except BaseException:
        made = (path for path in out.rglob("*") if path.is_file() and path.name not in (UNFINISHED, LOCK))
        if next(made, None) is None:
            (out / UNFINISHED).unlink()
            for folder in filter(Path.is_dir, list(out.iterdir())):
                shutil.rmtree(folder)
        raise
    (out / UNFINISHED).unlink()


def run(argv: list[str]) -> int:
    arguments = parse(DataArguments, argv, "data", DESCRIPTION)

    from hmmlm.data.tokenfile import unknown_fraction
    from hmmlm.runs.folders import lock_run, removed_on_failure
    from hmmlm.runs.progress import Progress, terminal_progress
    from hmmlm.structure.paths import write_paths
    from hmmlm.training.prepare import check_data, cluster_words, find_data, prepare

    out = arguments.out
    config = TrainingConfig(
        data=arguments.corpus,
        data_folder=arguments.data_folder,
        text=arguments.text,
        tokenizer=arguments.tokenizer,
    )
    _refuse_used(out, arguments.workers)
    check_data(config)
    progress = Progress() if arguments.quiet else terminal_progress()
    source = find_data(config)
    settings = _settings(config, source)
    with lock_run(out):
        _refuse_used(out, arguments.workers)  # again: another process may have used it
        if arguments.workers is not None:
            _refuse_other(out, settings)
        cleared = _unfinished(out, settings) if arguments.workers is not None else removed_on_failure(out, MADE, False)
        with cleared:
            prepared = prepare(config, source, out, progress, workers=arguments.workers, max_unknown=1.0)
            if arguments.clusters:
                words = [prepared.tokenizer.token(i) for i in range(prepared.tokenizer.vocab_size)]
                clustering = cluster_words(
                    prepared.tokens["train"], arguments.clusters, arguments.exchange_passes, progress
                )
                write_paths(out / "clusters.paths", clustering, words)
                print(printable(f"{counted(len(clustering.paths), 'cluster')}: {out / 'clusters.paths'}"))
    rows = []
    for split, tokens in prepared.tokens.items():
        unknown = unknown_fraction(tokens, prepared.tokenizer.unk_id, prepared.tokenizer.eos_id)
        rows.append((split, f"{len(tokens):,}", f"{len(tokens.documents) - 1:,}", f"{unknown:.2%}"))
    print_table(("split", "tokens", "documents", "unknown words"), rows)
    print(printable(f"vocabulary {prepared.tokenizer.vocab_size:,}; written to {out}"))
    return 0
