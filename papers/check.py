"""`python -m papers --check`: can every recorded number be made again?

- The command of every record, as it is generated today, parses to the recorded configuration.
- Every record is a planned run, or of a method that was removed; every planned run has a record, or a reason.
- Every recipe trains for three steps on a tiny text.
- The pages are what `python -m papers publish` writes, and their numbers come from records.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hmmlm.cli.combine import CombineArguments
from hmmlm.cli.data import DataArguments
from hmmlm.cli.eval import EvalArguments
from hmmlm.cli.mix import MixArguments
from hmmlm.cli.ngram import NgramArguments
from hmmlm.cli.parse import Arguments, parse
from hmmlm.cli.training import BaselineArguments, TrainArguments, config_of
from hmmlm.config.networks import BaselineConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import TrainingConfig
from hmmlm.errors import InputError
from papers.commands import commands, trainings
from papers.frozen import changes
from papers.ngrams import NgramConfig
from papers.publish import stale_pages
from papers.records import read_records
from papers.renames import commanded, present_settings, removed_by
from papers.selection import planned_runs
from papers.settings import identity, recorded_run, resolved_settings, settings_of
from papers.smoke import RECIPES, three_steps
from papers.study import NGRAM, Record, Study, StudyRow, StudyRun

Finding = tuple[str, str]
"""What was found, as it is counted, and where."""
FACTS = ("records", "measurements", "removed methods", "planned runs", "not run", "recipes")
FAULTS = ("refused", "other models", "unrecognised", "without record or reason", "failing recipes", "stale pages")
PRINTED = (*FAULTS, "removed methods", "not run")
ARGUMENTS: dict[str, type[Arguments]] = {
    "train": TrainArguments,
    "baseline": BaselineArguments,
    "data": DataArguments,
    "ngram": NgramArguments,
    "join": CombineArguments,
    "mix": MixArguments,
    "eval": EvalArguments,
}


def check(root: Path, studies: Mapping[str, Study], recipes: Sequence[str] = RECIPES) -> int:
    """Print what cannot be made again, and how many of everything there are; return the exit code."""
    counts: Counter[str] = Counter()
    for kind, text in _findings(root, studies, recipes):
        counts[kind] += 1
        if kind in PRINTED:
            print(f"{kind}: {text}", flush=True)
    print("; ".join(f"{counts[kind]} {kind}" for kind in (*FACTS, *FAULTS)))
    return int(any(counts[kind] for kind in FAULTS))


def _findings(root: Path, studies: Mapping[str, Study], recipes: Sequence[str]) -> Iterator[Finding]:
    recorded = set[str]()
    for study in studies.values():
        records = read_records(root / "results" / f"{study.name}.json")
        refused = {number: text for number, record in enumerate(records) if (text := _unreadable(record))}
        yield from (("refused", f"{study.name}: {records[number]['row']}: {text}") for number, text in refused.items())
        records = [record for number, record in enumerate(records) if number not in refused]
        recorded |= {run.row.recipe for record in records if (run := recorded_run(record)) is not None}
        yield from _check_study(study, records)
    for recipe in sorted(recorded):
        yield from (("other models", f"recipe {recipe}: {text}") for text in changes(recipe, root))
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes:
            yield "recipes", recipe
            if reason := three_steps(recipe, Path(folder)):
                yield "failing recipes", f"{recipe}: {reason}"
    try:
        yield from (("stale pages", page) for page in stale_pages(root, studies))
    except InputError as error:  # of a record that was refused above
        yield "stale pages", str(error)


def _unreadable(record: Record) -> str:
    """Return why the settings of a record are none of today's; empty if they are."""
    try:
        run = recorded_run(record)
        if run is not None:
            identity(run)
    except InputError as error:
        return str(error)
    return ""


def _check_study(study: Study, records: Sequence[Record]) -> Iterator[Finding]:
    """Yield what is wrong with the records and the plan of a study, and an entry for everything that is counted."""
    plan = {identity(run): run for run in planned_runs(study, records)}
    recorded: dict[str, StudyRun] = {}
    for record in records:
        run = recorded_run(record)
        if run is None:
            yield "measurements", record["row"]
            yield from _check_program(study)
            continue
        where, found = f"{study.name}: {run.row.name}, seed {run.seed}", identity(run)
        recorded[found] = run
        yield "records", where
        if commit := removed_by(record):
            yield "removed methods", f"{where}: the method was removed in {commit}"
        elif found not in plan:
            yield "unrecognised", where
        planned = [resolved_settings(each) for each in trainings(plan.get(found, run))]
        if planned != _recorded_settings(record):
            yield "other models", f"{where}: the plan is not what the record trained"
    for found, run in plan.items():
        yield "planned runs", run.row.name
        if found not in recorded:
            where = f"{study.name}: {run.row.name}, seed {run.seed}"
            reason = next((listed.reason for listed in study.not_run if run in listed), None)
            yield ("not run", f"{where}: {reason}") if reason else ("without record or reason", where)
    rows = {identity(StudyRun(run.row, 0)): run for run in (recorded | plan).values()}  # seeds differ in one option
    for run in rows.values():
        yield from ((kind, f"{study.name}: {run.row.name}: {text}") for kind, text in _check_commands(run))


def _check_program(study: Study) -> Iterator[Finding]:
    """Yield the programs of a study of measurements that do not exist."""
    programs = re.findall(r"python (?:-m )?([\w./]+)", study.made_by)
    files = [Path(name if "/" in name else name.replace(".", "/") + ".py") for name in programs]
    if not files or not all(file.exists() or Path("tests", file).exists() for file in files):
        yield "refused", f"{study.name}: no program {study.made_by!r}"


def _check_commands(run: StudyRun) -> Iterator[Finding]:
    """Yield what is wrong with the commands that make a run today."""
    try:
        made = [settings_of(config) for config in _configurations(commands(run))]
    except InputError as error:
        yield "refused", str(error)
        return
    if made != [resolved_settings(each) for each in trainings(run)]:
        yield "other models", "the command parses to another configuration"


def _recorded_settings(record: Record) -> list[dict[str, Any]]:
    """Return all settings of the models that a record trained, each once; those of a chain are in its command alone."""
    runs = [recorded_run(record)]
    if " && " in record["command"] and record.get("recipe") != NGRAM:  # what an n-gram is counted on is prepared first
        runs = [
            StudyRun(StudyRow(name="", recipe=recipe, settings=present_settings(recipe, settings)), int(seed))
            for recipe, settings in commanded(record["command"])
            for seed in [settings.pop("train.seed")]
        ]
    found = [resolved_settings(run) for run in runs if run is not None]
    return [settings for place, settings in enumerate(found) if settings not in found[:place]]


def _configurations(lines: Iterator[list[str]]) -> Iterator[TrainingConfig]:
    """Parse commands of `hmmlm`, and yield the configuration of every model that they train or count."""
    source: Any = None
    for command, *words in lines:
        arguments: Any = parse(ARGUMENTS[command], words, command, "")
        if command == "data":
            source = arguments
        elif command == "ngram":
            text = {"data": source.corpus, "text": source.text, "tokenizer": source.tokenizer}
            yield NgramConfig(**text, order=arguments.order, reset_at_eos=arguments.reset_at_eos)
        elif command in ("train", "baseline"):
            yield config_of(RunConfig if command == "train" else BaselineConfig, arguments)
