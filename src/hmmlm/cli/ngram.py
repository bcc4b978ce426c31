"""`hmmlm ngram`: Kneser-Ney n-grams, and ARPA files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import CliPositionalArg

from hmmlm.cli.models import print_scores, warn_unknown
from hmmlm.cli.parse import Arguments, parse
from hmmlm.runs.folders import find_run
from hmmlm.terminal import counted

DESCRIPTION = """Print the perplexity of an interpolated modified Kneser-Ney n-gram of the training text of a run, on
the validation and test text of the run. Its context restarts where the model of the run restarts.

--out writes the n-gram as an ARPA file, which SRILM and KenLM read; --arpa reads one instead of
counting.

examples:
  hmmlm ngram runs/mine --order 5
  hmmlm ngram latest --order 3 --out trigram.arpa
  hmmlm ngram latest --arpa trigram.arpa"""


ORDER = 5


class NgramArguments(Arguments):
    data: Annotated[
        CliPositionalArg[Path],
        Field(description="The folder of a run (`latest`: the newest), or one made by `hmmlm data`."),
        AfterValidator(find_run),
    ]
    order: Annotated[int, Field(ge=1, le=10)] | None = None
    """Tokens of an n-gram; 5 unless given, or those of --arpa."""
    reset_at_eos: bool | None = None
    """Restart the context after every <eos>; None: as the model of the run does, and in other folders."""
    out: Path | None = None
    """ARPA file to write."""
    arpa: Path | None = None
    """ARPA file to read; the n-gram is not counted."""
    json_output: bool = Field(default=False, alias="json")
    """Print JSON."""


def run(argv: list[str]) -> int:
    arguments = parse(NgramArguments, argv, "ngram", DESCRIPTION)

    import numpy as np

    from hmmlm.baselines.arpa import arpa_words, read_arpa, write_arpa
    from hmmlm.config.sections import StreamConfig
    from hmmlm.data.files import read_json
    from hmmlm.errors import InputError
    from hmmlm.report.results import BASELINE_TOKENS, count_ngram, score_split
    from hmmlm.runs.folders import CONFIG
    from hmmlm.training.prepare import is_prepared, reopen, trained_batches

    folder = arguments.data
    if not is_prepared(folder):
        raise InputError(f"{folder} has no token files: give the folder of a run, or one made by `hmmlm data`")
    data = reopen(folder)
    batches = trained_batches(read_json(folder / CONFIG)) if (folder / CONFIG).exists() else StreamConfig()
    restarts = isinstance(batches, StreamConfig) and batches.eval_reset_at_eos
    if arguments.reset_at_eos is not None:
        restarts = arguments.reset_at_eos
    words = arpa_words(data.tokenizer, restarts)
    if arguments.arpa is not None:
        model = read_arpa(arguments.arpa, words)
        if arguments.order not in (None, model.order):
            raise InputError(
                f"{arguments.arpa} has n-grams of up to {counted(model.order, 'token')}: leave out --order"
            )
    else:
        model = count_ngram(data, arguments.order or ORDER, restarts)
        if len(data.tokens["train"]) > BASELINE_TOKENS:
            print(f"counted on the first {BASELINE_TOKENS:,} training tokens, as in reports", file=sys.stderr)
    if arguments.out is not None:
        write_arpa(arguments.out, model, words)
    splits = {split: np.asarray(data.tokens[split].tokens) for split in ("valid", "test")}
    scores = {split: score_split(data, split, model.log_probs(ids)) for split, ids in splits.items()}
    if arguments.json_output:
        results = {name: score.figures() for name, score in scores.items()}
        print(json.dumps({"order": model.order, "results": results}, indent=1))
    else:
        print_scores(scores)
    warn_unknown({name: score.unknown_share for name, score in scores.items()}, "")
    return 0
