"""What every study is and what it takes to run it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.commands import command
from papers.records import read_records
from papers.renames import removed_by
from papers.selection import planned_runs
from papers.settings import identity, planned_settings, recorded_run
from papers.study import Record, Study, StudyRun

NOTE = """
`corpus` and `tokenizer.model` are placeholders for your own text and tokenizer: --set data=FOLDER tokenizer.file=MODEL,
or data=TOKENS for token files made by papers.corpus or hmmlm data. Minutes and memory are the largest recorded values.
Many recorded runs were shorter than their recipe, and runs that shared a GPU have no recorded time."""


def list_studies(studies: Mapping[str, Study], results: Path) -> Iterator[str]:
    """Yield the lines that describe every study, from its entry and its records in the folder `results`."""
    for study in studies.values():
        yield f"{study.name}: {study.title}"
        yield f"    {'; '.join(_facts(study, read_records(results / f'{study.name}.json')))}"
    yield NOTE


def show_study(study: Study, records: Sequence[Record], rows: str = "") -> Iterator[str]:
    """Yield the title of a study, and for every row its seeds and the command that makes it today."""
    yield f"{study.name}: {study.title}"
    yield from command_lines(study, records, rows)


def command_lines(study: Study, records: Sequence[Record], rows: str = "") -> Iterator[str]:
    """Yield the command that makes every row today, with its first seed, after a comment with what was recorded."""
    recorded = {identity(run): record for record in records if (run := recorded_run(record)) is not None}
    runs = {identity(run): run for run in planned_runs(study, records)}
    removed = {key: run for key, record in recorded.items() if key not in runs and (run := recorded_run(record))}
    variants: dict[str, list[StudyRun]] = {}
    for run in (*runs.values(), *removed.values()):
        if rows in run.row.name:
            variants.setdefault(identity(StudyRun(run.row, 0)), []).append(run)
    for same in variants.values():
        yield f"# {same[0].row.name}: {_state(study, same, recorded)}"
        yield command(same[0])
    if not runs:
        yield study.made_by


def _state(study: Study, runs: Sequence[StudyRun], recorded: Mapping[str, Record]) -> str:
    """Return which seeds of a row have a record, and why others have none."""
    made = [run for run in runs if identity(run) in recorded]
    parts = [f"seed{'s' * (len(made) > 1)} {_joined(run.seed for run in made)}"] if made else []
    reasons = [_reason(study, run) for run in runs if run not in made]
    parts += [f"not run: {reason}" for reason in dict.fromkeys(reasons)]
    commits = dict.fromkeys(removed_by(recorded[identity(run)]) for run in made)
    return "; ".join([*parts, *(f"recorded with a method that {commit} removed" for commit in commits if commit)])


def _reason(study: Study, run: StudyRun) -> str:
    return next((listed.reason for listed in study.not_run if run in listed), "no record")


def _facts(study: Study, records: Sequence[Record]) -> Iterator[str]:
    rows = len(dict.fromkeys([*(row.name for row in study.rows), *(record["row"] for record in records)]))
    yield f"{rows} row{'s' * (rows != 1)}"
    if study.runs:
        settings = [planned_settings(row.recipe, row.settings) for row in study.rows if row.seeds]
        yield f"seeds {_joined(sorted({run.seed for run in study.runs}))}"
        yield f"data {study.data or _joined(options['data'] for options in settings)}"
        if needed := list(dict.fromkeys(file for options in settings for file in _needed(options))):
            yield f"needs {_joined(needed)}"
    else:
        yield f"made by {study.made_by}"
    yield study.device
    if minutes := [record["metrics"]["seconds"] / 60 for record in records if "seconds" in record["metrics"]]:
        yield f"up to {max(minutes):.1f} minutes per run"
    if memory := [record["metrics"]["peak_memory_gb"] for record in records if "peak_memory_gb" in record["metrics"]]:
        yield f"up to {max(memory):.1f} GB"


def _needed(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files and folders that a run reads besides its data."""
    if settings.get("tokenizer.kind") == "file":
        yield str(settings["tokenizer.file"])
    for section in ("model", "initialization"):
        if f"{section}.teacher" in settings:
            yield str(settings[f"{section}.teacher"])


def _joined(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))
