"""`hmmlm teacher`: trains a small transformer that an HMM can be started from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from hmmlm.cli.main import INTERRUPTED
from hmmlm.cli.networks import train_in
from hmmlm.cli.parse import parse, resumed
from hmmlm.errors import InputError
from hmmlm.learning.config_teacher import TeacherConfig, saved_teacher_config
from hmmlm.learning.folders import refuse_used

if TYPE_CHECKING:
    from hmmlm.learning.network import NetworkResult

DESCRIPTION = """Train a small decoder-only transformer on a corpus: a teacher, from whose
contextual embeddings a hidden Markov model can be initialised.

Give the HMM the same tokenizer and token files, by --data of the run or of
`hmmlm data`, so that their tokens line up one to one. Ctrl-C saves and stops.

With --convert nothing is trained: a Llama in a GGUF file, which takes a minute
to open, is written as a folder that takes seconds.

examples:
  hmmlm teacher --data my.txt --tokenizer.kind bpe --out teachers/mine
  hmmlm teacher --data runs/mine --model.layers 6 --train.epochs 5
  hmmlm teacher --resume teachers/mine
  hmmlm teacher --convert tinyllama-1.1b.gguf --out teachers/tinyllama-1.1b"""


@dataclass(frozen=True)
class Arguments:
    run: Annotated[TeacherConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Folder of the run, to be given as --teacher; None: teachers/, then the name of the data and the time."""
    resume: Path | None = None
    """Go on with the run in this folder, with its settings."""
    convert: Path | None = None
    """A GGUF file to write as a folder (--out), in float16."""


def run(argv: list[str]) -> int:
    resume = resumed(argv, "teacher")
    start = TeacherConfig() if resume is None else saved_teacher_config(resume)
    arguments = parse(Arguments, argv, "teacher", DESCRIPTION, Arguments(start))
    if arguments.convert is not None:
        return _convert(arguments.convert, arguments.out)
    result = train_in("teacher", arguments.run, arguments.out, resume, partial(_train, arguments.run))
    if not result.finished:
        return INTERRUPTED
    from hmmlm.learning.progress import perplexity_text

    best = perplexity_text(result.best_perplexity)
    print(f"valid perplexity {best} after {result.steps:,} steps, {result.seconds:,.0f} s")
    print(f"the teacher is in {result.out / 'best'}")
    return 0


def _train(config: TeacherConfig, out: Path, resume: bool) -> NetworkResult:
    from hmmlm.learning.progress import terminal_progress
    from hmmlm.learning.teacher import train_teacher

    return train_teacher(config, out, resume=resume, progress=terminal_progress())


def _convert(source: Path, out: Path | None) -> int:
    if out is None:
        raise InputError("--convert needs a folder to write to: give --out")
    refuse_used(out)

    from hmmlm.initialization.decoder import DecoderTeacher
    from hmmlm.initialization.llama import Llama, save_llama
    from hmmlm.initialization.teacher import open_teacher

    teacher = open_teacher(str(source), device="cpu")
    if not isinstance(teacher, DecoderTeacher) or not isinstance(teacher.model, Llama):
        raise InputError(f"{source} is no Llama, which is all that --convert writes: use it as it is")
    save_llama(out, teacher)
    print(f"the teacher is in {out}")
    return 0
