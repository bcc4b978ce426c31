"""Which runs of a study are meant, and what they need; nothing here imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from hmmlm.errors import InputError, require
from papers.settings import recorded_run
from papers.study import Record, Study, StudyRun
from papers.variants import TEACHERS, VARIANTS


def find_study(name: str, studies: Mapping[str, Study]) -> Study:
    """Return a study by its name."""
    if name not in studies:
        near = difflib.get_close_matches(name, studies, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}" if near else "--list shows all"
        raise InputError(f"no study named {name!r}; {hint}")
    return studies[name]


def planned_runs(study: Study, records: Sequence[Record]) -> list[StudyRun]:
    """Return the runs of a study, with those of its records where these are the plan."""
    declared = {row.name for row in study.rows}
    own = [record for record in records if study.as_recorded and record["row"] not in declared]
    return study.runs + [run for record in own if (run := recorded_run(record)) is not None]


def select_runs(study: Study, records: Sequence[Record], rows: str, seeds: Sequence[int]) -> list[StudyRun]:
    """Return the runs whose row name contains `rows` and whose seed is in `seeds`; all if empty."""
    planned = planned_runs(study, records)
    if not planned:
        raise InputError(f"{study.name} is not run by python -m papers; it is made by: {study.made_by}")
    runs = [run for run in planned if rows in run.row.name and (not seeds or run.seed in seeds)]
    if not runs:
        names = dict.fromkeys(run.row.name for run in planned)
        known = sorted({run.seed for run in planned})
        raise InputError(
            f"no run of {study.name} has {rows!r} in its row name and a seed of {list(seeds) or known}; "
            f"seeds: {known}; rows: {'; '.join(names)}"
        )
    return runs


def refuse_missing_extras(runs: Sequence[StudyRun]) -> None:
    """Raise an InputError that names the extra which a run needs, if it is not installed."""
    for run in runs:
        variant = VARIANTS.get(run.row.recipe)
        settings = {**(variant.settings if variant else {}), **run.row.settings}
        if settings.get("initialization.kind") == "none":
            settings.pop("initialization.teacher", None)
        if {settings.get("initialization.teacher"), settings.get("model.teacher")} & set(TEACHERS.values()):
            require("teacher", "transformers", reader=f"the row {run.row.name!r}")
