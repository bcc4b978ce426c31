"""`hmmlm distill`: from a causal language model to an HMM that steers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import CliPositionalArg

from hmmlm.cli.parse import Arguments, parse
from hmmlm.config.distill import DistillConfig
from hmmlm.errors import InputError
from hmmlm.runs.folders import CONFIG, find_run, new_folder
from hmmlm.teachers.checks import require_readers

DESCRIPTION = """Distill a causal language model of Hugging Face into a hidden Markov model with the same
tokens, which steers it (docs/guide/steering.md).

Texts are sampled from the model, each state starts as a cluster of its hidden states, and
training continues on the samples. The report compares the HMM with an n-gram and with the
model itself on held-out samples, by position in the text. Ctrl-C saves and stops.

Before it starts, it measures its speed and prints the time of each phase; --minutes M chooses tokens
and states to fit. The defaults are meant for ten minutes on two cores for a model of 15 million
parameters, and twenty on a GPU for one of a billion. RUN/samples has the token files; train on them in other
ways with `hmmlm train --data RUN/samples`.

examples:
  hmmlm distill path/to/model --out runs/distilled
  hmmlm distill gpt2 --tokens 2000000 --num-states 1024
  hmmlm distill path/to/model --minutes 30
  hmmlm distill model.gguf --prompts prompts.txt
  hmmlm distill --resume runs/distilled"""


def _find_started(path: Path) -> Path:
    """Return the folder of a run that was started, which `path` names."""
    out = find_run(path)
    if not (out / CONFIG).exists():
        raise InputError(f"no run to resume in {out}: {out / CONFIG} does not exist")
    return out


class DistillArguments(Arguments, DistillConfig):  # type: ignore[misc]
    model: Annotated[
        CliPositionalArg[str], Field(description="A Hugging Face folder, a name on the hub, or a GGUF file.")
    ] = ""
    out: Path | None = None
    """Folder of the run; None: a new one in runs/, named after the model and the time."""
    resume: Annotated[Path, AfterValidator(_find_started)] | None = None
    """Resume the distillation in this folder (latest: the newest run), with its settings."""
    quiet: bool = False
    """Print results and warnings only."""


def run(argv: list[str]) -> int:
    arguments = parse(DistillArguments, argv, "distill", DESCRIPTION)
    if arguments.model:
        require_readers(arguments.model, arguments.gguf_file)

    from hmmlm.cli.main import INTERRUPTED
    from hmmlm.report.distill import evaluate_distillation, print_distillation
    from hmmlm.report.page import write_report
    from hmmlm.runs.progress import Progress, terminal_progress
    from hmmlm.terminal import printable
    from hmmlm.training.distill import distill, resume_distillation

    progress = Progress() if arguments.quiet else terminal_progress()
    if arguments.resume is not None:
        given = sorted(arguments.model_fields_set - {"resume", "quiet", "threads"})
        if given:
            raise InputError(f"--resume has the settings and the folder of its run: leave out {given[0]}")
        result = resume_distillation(arguments.resume, progress)
    elif not arguments.model:
        raise InputError("give a model to distill: a Hugging Face folder, a name on the hub, or a GGUF file")
    else:
        config = DistillConfig(**{name: getattr(arguments, name) for name in DistillConfig.model_fields})
        with new_folder(arguments.out, "runs", Path(arguments.model).stem) as out:
            result = distill(config, out, progress)
    if not result.finished:
        print(printable(f"stopped, saved; continue with: hmmlm distill --resume {result.out}"))
        return INTERRUPTED
    results = evaluate_distillation(result.out)
    print_distillation(results)
    print(printable(f"report: {write_report(results.run)}"))
    print(printable(f"the HMM is in {result.out / 'best'}; steer the model with it: docs/guide/steering.md"))
    return 0
