"""`hmmlm data`: token files, and public corpora by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from hmmlm.cli.parse import parse
from hmmlm.learning.config import TokenizerConfig
from hmmlm.learning.config_checks import check_data
from hmmlm.learning.folders import refuse_used, removed_on_failure

DESCRIPTION = """Make the token files of a corpus (train, valid, test) and its tokenizer.

PTB and WikiText-2 are taken from --data-folder (else $HMMLM_DATA, else the
cache), or downloaded to it and checked.

examples:
  hmmlm data ptb --out data/ptb --tokenizer.split whitespace
  hmmlm data wikitext-2 --data-folder ~/corpora --out data/wikitext-2
  hmmlm data my.txt --out data/mine --tokenizer.kind bpe
  hmmlm data ptb --out data/ptb-128 --tokenizer.split whitespace --clusters 128"""
MADE = ("tokenizer", "data", "clusters.paths")


@dataclass(frozen=True)
class Arguments:
    corpus: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME_OR_FILE")]
    """embedded, ptb, wikitext-2, a text file, or a folder with train, valid and test files (texts or token files)."""
    out: Path
    """New folder for the token files (data/) and the tokenizer (tokenizer/)."""
    data_folder: Path | None = None
    """Where corpora given by name lie, or are downloaded to."""
    clusters: int = 0
    """Also cluster the words of the training text into so many Brown clusters, for --model.clusters; 0: none."""
    exchange_passes: int = 0
    """Passes of moving single words to better clusters afterwards."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "data", DESCRIPTION)
    out = arguments.out
    refuse_used(out)
    check_data(arguments.corpus, arguments.tokenizer)  # before what follows, which takes seconds to import

    from rich.console import Console
    from rich.table import Table

    from hmmlm.experiments.results import unknown_share
    from hmmlm.learning.config import RunConfig
    from hmmlm.learning.prepare import cluster_words, find_data, prepare
    from hmmlm.learning.progress import terminal_progress
    from hmmlm.structure.paths import write_paths

    config = RunConfig(data=arguments.corpus, data_folder=arguments.data_folder, tokenizer=arguments.tokenizer)
    source = find_data(config)
    with removed_on_failure(out, MADE, made=not out.exists()):
        prepared = prepare(config, source, out, terminal_progress())
        if arguments.clusters:
            words = [prepared.tokenizer.token(i) for i in range(prepared.tokenizer.vocab_size)]
            clustering = cluster_words(prepared.tokens["train"], arguments.clusters, arguments.exchange_passes)
            write_paths(out / "clusters.paths", clustering, words)
            print(f"{len(clustering.paths)} clusters: {out / 'clusters.paths'}")
    table = Table("split", "tokens", "documents", "unknown words", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for split, tokens in prepared.tokens.items():
        unknown = unknown_share(tokens, prepared.tokenizer.unk_id, prepared.tokenizer.eos_id)
        table.add_row(split, f"{len(tokens):,}", f"{len(tokens.documents) - 1:,}", f"{unknown:.2%}")
    console = Console()
    console.print(table)
    console.print(f"vocabulary {prepared.tokenizer.vocab_size:,}; written to {out}", soft_wrap=True)
    return 0
