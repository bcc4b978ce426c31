"""`hmmlm train`: train a hidden Markov language model, or resume a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hmmlm.config.recipe import recipe_names
from hmmlm.errors import InputError
from hmmlm.teachers.checks import require_readers
from hmmlm.terminal import counted, time_text

if TYPE_CHECKING:
    from hmmlm.cli.training import TrainArguments
    from hmmlm.config.run import RunConfig
    from hmmlm.runs.loggers import Logger
    from hmmlm.training.trainer import TrainResult

OVERVIEW = f"""usage: hmmlm train [OPTIONS]

Train a hidden Markov language model and write its report.

most used options:
  --data NAME_OR_PATH       embedded, ptb, wikitext-2, a text file (one example per line), a folder
                            with train, valid and test files, or one made by `hmmlm data`
  --text.unit UNIT          line (default), paragraph (wrapped lines are joined), document
  --out FOLDER              folder of the run (default: runs/NAME-TIME)
  --resume FOLDER           resume a run (Ctrl-C saves and stops); may change how long it trains;
                            latest: the newest run in runs/
  --recipe NAME             one of {", ".join(recipe_names())}
  --config FILE.toml        start from a recipe of your own
  --model.kind KIND         scalar (default), linear, mlp, neural, … (hmmlm train --help model)
  --model.num-states N      hidden states
  --model.blocks N          word clusters; each state emits the words of one cluster
  --tokenizer.kind KIND     auto (default), word, char, bpe, file
  --optimizer.kind KIND     adamw (default), baum-welch
  --optimizer.lr LR         peak learning rate (default: depends on the model family)
  --init lvd --teacher PATH distill a teacher (a Hugging Face network or one of `hmmlm teacher`)
  --train.epochs N          passes over the text
  --train.seed N            seed of parameters and shuffling
  --train.restarts N        starts with several seeds, of which the best is trained to the end
  --train.device DEVICE     auto (default), cpu, cuda
  --train.devices N         processes on this machine, each with a GPU or a part of the CPU's cores
  --threads N               CPU threads (default: one per core)
  --dry-run                 print what the run would cost (memory, time per epoch), from a few steps
  --quiet                   print results and warnings only

What you leave out follows from the text: its vocabulary and its number of tokens (docs/guide/train.md).

All settings, by section: hmmlm train --help SECTION
  SECTION is text, tokenizer, batches, model, initialization, optimizer, schedule, train, or all

examples:
  hmmlm train --data my.txt
  hmmlm train --data my.txt --model.num-states 1024 --train.epochs 20 --out runs/mine
  hmmlm train --resume runs/mine --train.epochs 40
  hmmlm train --recipe ptb-vl-hmm --train.seed 1
"""
SHORTCUTS = {"initialization.kind": "init", "initialization.teacher": "teacher"}


def _print_estimate(config: RunConfig, arguments: TrainArguments) -> int:
    """Print what a run would cost."""
    from hmmlm.runs.progress import Progress, terminal_progress
    from hmmlm.training.estimate import estimate

    if arguments.resume is not None:
        raise InputError("--dry-run measures a new run: leave out --resume")
    found = estimate(config, Progress() if arguments.quiet else terminal_progress())
    batches = config.batches
    print(
        f"{found.about}\n"
        f"{found.likelihood}\n"
        f"memory: {found.memory / 1e9:.2f} GB\n"
        f"step: {time_text(found.step_seconds)} for {batches.batch_size} × {batches.length} tokens, "
        f"{found.tokens_per_second:,.0f} tokens per second\n"
        f"epoch: {time_text(found.epoch_seconds)} ({counted(found.steps_per_epoch, 'step')}; validation "
        f"{found.checks_per_epoch} × {time_text(found.check_seconds)})\n"
        f"run: {time_text(found.epochs * found.epoch_seconds)} for {found.epochs:.3g} epochs, without word clusters, "
        "initialization, next words of a teacher, and report"
    )
    return 0


def run(argv: list[str]) -> int:
    from hmmlm.cli.launch import launch
    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.cli.parse import parse
    from hmmlm.cli.training import TrainArguments, config_of
    from hmmlm.config.run import RunConfig

    arguments = parse(TrainArguments, argv, "train", OVERVIEW, SHORTCUTS, RunConfig())

    # After parsing: mistakes in options, and what is not installed, are reported without importing torch.
    teacher = getattr(arguments.initialization, "teacher", None)
    if teacher is not None and not Path(teacher).is_dir():  # a folder may be of `hmmlm teacher`, which needs nothing
        require_readers(teacher, getattr(arguments.initialization, "gguf_file", None))
    if arguments.dry_run:
        return _print_estimate(config_of(RunConfig, arguments), arguments)
    if (code := launch("train", argv, arguments.train)) is not None:
        return code

    return 0 if train_and_report(arguments).finished else INTERRUPTED


def train_and_report(arguments: TrainArguments, loggers: Sequence[Logger] = ()) -> TrainResult:
    """Train, evaluate the best model, print its figures and write its report."""
    from hmmlm.cli.models import warn_unknown
    from hmmlm.cli.training import config_of, run_training
    from hmmlm.config.run import RunConfig
    from hmmlm.report.page import write_report
    from hmmlm.report.results import MODEL, evaluate_run
    from hmmlm.runs.progress import perplexity_text
    from hmmlm.terminal import printable
    from hmmlm.training.train import train

    name = arguments.recipe or Path(arguments.config or arguments.data).stem
    result, reports = run_training(
        "train", config_of(RunConfig, arguments), arguments, name, partial(train, loggers=loggers)
    )
    if not (result.finished and reports):
        return result
    results = evaluate_run(result.out)
    score, baselines = results.scores["test"], results.baselines
    figures = {name: perplexity_text(found.perplexity) for name, found in results.best_first().items()}
    (first, best), *others = figures.items()
    print(
        f"test perplexity {best}{'' if first == MODEL else f' of {first}'} "
        f"({', '.join(f'{name} {figure}' for name, figure in others)}); {score.unknown_share:.1%} of the words are "
        f"unknown, perplexity of the HMM without them {perplexity_text(score.known_perplexity)}"
    )
    warn_unknown({"the test text": score.unknown_share}, results.config.data)
    settings, states = results.config.train, results.config.model.num_states
    step = "step" if results.config.optimizer.kind == "baum-welch" else "lr"
    if results.scores["valid"].perplexity > 0.98 * baselines["unigram"]["valid"].perplexity:
        print(
            "hmmlm: warning: the model has learned little more than word frequencies (unigram): try other starts "
            f"(--train.seed {settings.seed + settings.restarts}), one more state than you expect, for the ends of "
            f"lines (--model.num-states {states + 1}), or more epochs (--train.epochs); lower optimizer.{step} if "
            "perplexity rose",
            file=sys.stderr,
        )
    print(printable(f"report: {write_report(results)}"))
    return result
