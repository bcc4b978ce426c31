"""`hmmlm baseline`: trains a neural language model to compare a hidden Markov model with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hmmlm.cli.parse import parse, resumed
from hmmlm.errors import InputError
from hmmlm.learning.config_baseline import BaselineConfig, saved_baseline_config
from hmmlm.learning.config_checks import check_data
from hmmlm.learning.folders import new_folder

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
    if resume is not None:
        if arguments.out is not None:
            raise InputError("--resume has the folder of its run: leave out --out")
        return _train(arguments.run, resume, resume=True)
    check_data(arguments.run.data, arguments.run.tokenizer)  # also in training, but that takes seconds to import
    with new_folder(arguments.out, "baselines", Path(arguments.run.data).stem) as out:
        return _train(arguments.run, out, resume=False)


def _train(config: BaselineConfig, out: Path, resume: bool) -> int:
    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.data.files import read_json
    from hmmlm.learning.baseline import PERPLEXITY, train_baseline
    from hmmlm.learning.progress import perplexity_text, terminal_progress

    result = train_baseline(config, out, resume=resume, progress=terminal_progress())
    if not result.finished:
        print(f"stopped at step {result.steps:,}, saved; continue with: hmmlm baseline --resume {out}")
        return INTERRUPTED
    scores = {split: perplexity_text(value) for split, value in read_json(out / PERPLEXITY).items()}
    print(f"{result.steps:,} steps, {result.seconds:,.0f} s; the best model is in {out / 'best'}")
    print(f"perplexity: valid {scores['valid']}, test {scores['test']}")
    return 0
