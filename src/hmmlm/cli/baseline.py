"""`hmmlm baseline`: trains a neural language model to compare a hidden Markov model with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from hmmlm.cli.main import INTERRUPTED
from hmmlm.cli.networks import train_in
from hmmlm.cli.parse import parse, resumed
from hmmlm.data.files import read_json
from hmmlm.learning.config_baseline import BaselineConfig, saved_baseline_config

if TYPE_CHECKING:
    from hmmlm.learning.network import NetworkResult

DESCRIPTION = """Train a neural language model on the text of a hidden Markov model, to
compare the two: an LSTM, or a feed-forward model of n words. They are scored as
the HMM is, on every token, <eos> and <unk> too. (n-grams need no training: all
reports of `hmmlm train` have them.)

Give both the same token files, by --data of the run or of `hmmlm data`.
Ctrl-C saves and stops.

examples:
  hmmlm baseline --data runs/mine --out baselines/lstm
  hmmlm baseline --data tokens --model.kind feedforward --batch-size 128
  hmmlm baseline --resume baselines/lstm"""


@dataclass(frozen=True)
class Arguments:
    run: Annotated[BaselineConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Folder of the run; None: baselines/, then the name of the data and the time."""
    resume: Path | None = None
    """Go on with the run in this folder, with its settings."""


def run(argv: list[str]) -> int:
    resume = resumed(argv, "baseline")
    start = BaselineConfig() if resume is None else saved_baseline_config(resume)
    arguments = parse(Arguments, argv, "baseline", DESCRIPTION, Arguments(start))
    result = train_in("baseline", arguments.run, arguments.out, resume, partial(_train, arguments.run))
    if not result.finished:
        return INTERRUPTED
    from hmmlm.learning.baseline import PERPLEXITY
    from hmmlm.learning.progress import perplexity_text

    scores = {split: perplexity_text(value) for split, value in read_json(result.out / PERPLEXITY).items()}
    print(f"{result.steps:,} steps, {result.seconds:,.0f} s; the best model is in {result.out / 'best'}")
    print(f"perplexity: valid {scores['valid']}, test {scores['test']}")
    return 0


def _train(config: BaselineConfig, out: Path, resume: bool) -> NetworkResult:
    from hmmlm.learning.baseline import train_baseline
    from hmmlm.learning.progress import terminal_progress

    return train_baseline(config, out, resume=resume, progress=terminal_progress())
