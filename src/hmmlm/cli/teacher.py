"""`hmmlm teacher`: train a small transformer that an HMM can be distilled from."""

from __future__ import annotations

from pathlib import Path

OVERVIEW = """usage: hmmlm teacher [OPTIONS]

Train a small decoder-only transformer: a teacher, from whose contextual embeddings a
hidden Markov model can be initialized (hmmlm train --init lvd --teacher FOLDER). 1 MB of
text takes about three minutes on two CPU cores; progress shows the time left.

Give the HMM the same token files, through --data of the run or of `hmmlm data`, so that
their tokens line up one to one.

most used options:
  --data NAME_OR_PATH       as in `hmmlm train`
  --out FOLDER              folder of the run (default: teachers/NAME-TIME)
  --resume FOLDER           resume a run (Ctrl-C saves and stops)
  --model.hidden N          width
  --model.layers N          blocks
  --model.heads N           attention heads
  --train.epochs N          passes over the text
  --convert FILE.gguf       train nothing: write a GGUF file as a Hugging Face folder (--out)

All settings, by section: hmmlm teacher --help SECTION
  SECTION is text, tokenizer, batches, model, optimizer, schedule, train, or all

examples:
  hmmlm teacher --data my.txt --out teachers/mine
  hmmlm teacher --data runs/mine --model.layers 6 --train.epochs 5
  hmmlm teacher --resume teachers/mine
  hmmlm teacher --convert tinyllama-1.1b.gguf --out teachers/tinyllama-1.1b
"""


def run(argv: list[str]) -> int:
    from hmmlm.cli.launch import launch
    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.cli.parse import parse
    from hmmlm.cli.training import TeacherArguments, config_of, run_training
    from hmmlm.config.networks import TeacherConfig

    arguments = parse(TeacherArguments, argv, "teacher", OVERVIEW, defaults=TeacherConfig())

    from hmmlm.runs.progress import perplexity_text
    from hmmlm.training.networks import train_teacher

    if arguments.convert is not None:
        return _convert(arguments.convert, arguments.out)
    if (code := launch("teacher", argv, arguments.train)) is not None:
        return code
    config = config_of(TeacherConfig, arguments)
    name = Path(arguments.data).stem
    result, reports = run_training("teacher", config, arguments, name, train_teacher)
    if not (result.finished and reports):
        return 0 if result.finished else INTERRUPTED
    print(f"valid perplexity {perplexity_text(result.best_perplexity)}")
    return 0


def _convert(source: Path, out: Path | None) -> int:
    from hmmlm.errors import InputError
    from hmmlm.runs.folders import refuse_used
    from hmmlm.teachers.huggingface import convert_gguf
    from hmmlm.terminal import printable

    if out is None:
        raise InputError("--convert needs a folder to write to: give --out")
    refuse_used(out)
    convert_gguf(source, out)
    print(printable(f"the teacher is in {out}"))
    return 0
