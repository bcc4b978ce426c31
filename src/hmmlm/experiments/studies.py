"""Every table and figure of the papers as a study: runs of recipes, their results one JSON file a study.

    python -m hmmlm.experiments.studies chiu2020-table1 --work runs/studies --out results

A study is a list of runs. Each is trained from its recipe, its best model by validation is scored once on valid and
once on test, and a record of it is added to the study's file: row, recipe, seed, metrics, settings, command, commit,
machine and date. Its folder keeps the model, not the state to resume from. A run that fails to train has a record too,
which says why it was stopped. Records in the file are kept, and runs that have one are not done again, so that a study
that was interrupted goes on.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tyro

from hmmlm.errors import InputError
from hmmlm.experiments.catalogue import STUDIES
from hmmlm.experiments.catalogue.run import BASELINE, Run
from hmmlm.experiments.records import add_record, identity, read_records
from hmmlm.learning.config import RunConfig, config_from_dict, config_to_dict, load_recipe
from hmmlm.learning.config_baseline import BaselineConfig
from hmmlm.learning.history import read_history

SPEEDS = ("tokens_per_second", "step_ms", "train_seconds", "seconds")
"""Metrics that others on the machine change."""


@dataclass(frozen=True)
class Arguments:
    """Run a study of the papers again."""

    study: tyro.conf.Positional[str]
    """Which: see hmmlm.experiments.catalogue."""
    out: Path = Path("results")
    """Folder of the result files."""
    work: Path = Path("runs/studies")
    """Folder for the training runs."""
    rows: str = ""
    """Only rows that match this regular expression."""
    seeds: list[int] = field(default_factory=list)
    """Only runs with these seeds; none: all."""
    jobs: int = 1
    """Runs side by side; of several, nothing is said about speed."""
    again: bool = False
    """Also runs that the study's file has a record of, which are then replaced."""
    set: list[str] = field(default_factory=list)
    """Settings for every run, as model.states=1024."""


def main(argv: list[str] | None = None) -> None:
    arguments = tyro.cli(Arguments, args=argv)
    if arguments.study not in STUDIES:
        raise InputError(f"no study named {arguments.study!r}; there are: {', '.join(sorted(STUDIES))}")
    common = dict(setting.split("=", 1) for setting in arguments.set)
    runs = [
        replace(run, settings={**run.settings, **common})
        for run in STUDIES[arguments.study]
        if re.search(arguments.rows, run.row) and (not arguments.seeds or run.seed in arguments.seeds)
    ]
    if not runs:
        rows = dict.fromkeys(run.row for run in STUDIES[arguments.study])
        seeds = sorted({run.seed for run in STUDIES[arguments.study]})
        raise InputError(
            f"no run of {arguments.study} with a row that matches {arguments.rows!r} and a seed of "
            f"{arguments.seeds or seeds}; seeds: {seeds}; rows: {'; '.join(rows)}"
        )
    file = arguments.out / f"{arguments.study}.json"
    if not arguments.again:
        done = {identity(vars(run)) for run in runs} & {identity(record) for record in read_records(file)}
        runs = [run for run in runs if identity(vars(run)) not in done]
        print(f"{len(runs)} runs; {len(done)} have a record in {file} (--again does them again)", flush=True)
    pool = ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn"))
    with pool:
        work, alone = arguments.work / arguments.study, arguments.jobs == 1
        futures = {pool.submit(perform, run, work, alone): run for run in runs}
        for future in as_completed(futures):
            try:
                record = future.result()
            except Exception as error:  # one failed run must not lose the others
                print(f"FAILED {futures[future].row}: {error!r}", flush=True)
                continue
            add_record(file, record)
            shown = {name: record[name] for name in ("row", "seed", "stopped") if name in record}
            print(json.dumps({**shown, **record["metrics"]}), flush=True)


def perform(run: Run, work: Path, alone: bool = True) -> dict[str, Any]:
    """Train one run and measure it; unless `alone` on the machine, no speeds and times."""
    import torch

    from hmmlm.learning.checkpoint import remove_folder
    from hmmlm.learning.trainer import TrainingError

    config = with_settings(run)
    label = re.sub(r"[^\w.-]+", "-", f"{run.row}-{run.seed}-{time.time():.0f}-{os.getpid()}")
    if torch.cuda.is_available():  # a worker does several runs: what the last one left is not for this one
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    on_gpu = torch.cuda.is_available() and config.train.device != "cpu"
    stopped: dict[str, str] = {}
    metrics: dict[str, Any] = {}
    try:
        metrics = _baseline(config, work / label) if run.recipe == BASELINE else _hmm(config, work / label, on_gpu)
    except TrainingError as error:
        stopped["stopped"] = str(error).partition(": ")[0]  # what follows is advice, and where the run lies
    remove_folder(work / label, "last")  # nobody resumes it now, and of a large network it soon fills a disk
    if on_gpu and metrics:
        metrics["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    if not alone:
        metrics = {name: value for name, value in metrics.items() if name not in SPEEDS}
    return {
        "row": run.row, "recipe": run.recipe, "seed": run.seed, "metrics": metrics, **stopped,
        "settings": run.settings, "command": command(run), "commit": commit(), "machine": machine(on_gpu),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _hmm(config: RunConfig, folder: Path, on_gpu: bool) -> dict[str, Any]:
    """Metrics of a hidden Markov model trained in `folder`."""
    from hmmlm.experiments.results import evaluate_split
    from hmmlm.learning.prepare import reopen
    from hmmlm.learning.progress import LineProgress
    from hmmlm.learning.trainer import train
    from hmmlm.lm import LanguageModel

    began = time.perf_counter()
    result = train(config, folder, progress=LineProgress())
    _refuse_part(result.finished)
    seconds = time.perf_counter() - began
    lm, data = LanguageModel.load(folder), reopen(folder)
    lm = lm.to("cuda") if on_gpu else lm
    perplexities = {split: evaluate_split(lm, config, data, split).perplexity for split in ("valid", "test")}
    history = read_history(folder / "history.jsonl")
    speeds = [event["tokens_per_second"] for event in history if event["event"] == "train"][1:]
    speed = statistics.median(speeds) if speeds else result.tokens / result.seconds
    return {
        **_metrics(perplexities, history, speed, config.batches.batch_size * config.batches.length),
        "train_seconds": round(result.seconds, 1), "seconds": round(seconds, 1), "epochs": round(result.epochs, 2),
        "tokens": result.tokens, "skipped": max((event.get("skipped", 0) for event in history), default=0),
    }  # fmt: skip


def _baseline(config: BaselineConfig, folder: Path) -> dict[str, Any]:
    """Metrics of a neural baseline trained in `folder`."""
    from hmmlm.data.files import read_json
    from hmmlm.learning.baseline import PERPLEXITY, train_baseline
    from hmmlm.learning.network import reopen_data
    from hmmlm.learning.progress import LineProgress

    began = time.perf_counter()
    result = train_baseline(config, folder, progress=LineProgress())
    _refuse_part(result.finished)
    seconds = time.perf_counter() - began
    history, speed = read_history(folder / "history.jsonl"), result.tokens / result.seconds
    return {
        **_metrics(read_json(folder / PERPLEXITY), history, speed, config.batch_size * config.length),
        "train_seconds": round(result.seconds, 1), "seconds": round(seconds, 1),
        "epochs": round(result.tokens / len(reopen_data(config, folder).tokens["train"]), 2), "tokens": result.tokens,
    }  # fmt: skip


def _refuse_part(finished: bool) -> None:
    """An error if a run was interrupted: what it is worth so far is not what its record would say."""
    if not finished:
        raise InputError("interrupted: it has no record, and is begun again when the study is run again")


def _metrics(
    perplexities: Mapping[str, float], history: Sequence[dict[str, Any]], speed: float, batch: int
) -> dict[str, Any]:
    """What every kind of run has: perplexities by split, training loss, tokens a second, the step of the best model."""
    losses = [
        event["loss"] for event in history if event["event"] == "train" and event.get("objective") != "joint"
    ]
    return {
        **{f"{split}_perplexity": round(value, 3) for split, value in perplexities.items()},
        "train_perplexity": round(math.exp(statistics.mean(losses[-10:])), 3) if losses else None,
        "tokens_per_second": round(speed), "step_ms": round(1000 * batch / speed, 3),
        "best_step": max((event["step"] for event in history if event.get("best")), default=0),
    }  # fmt: skip


def with_settings(run: Run) -> Any:
    """The recipe's configuration, or a baseline's own, with the run's settings and seed."""
    baseline = run.recipe == BASELINE
    values = BaselineConfig().model_dump(mode="json") if baseline else config_to_dict(load_recipe(run.recipe))
    for name, value in {**run.settings, "train.seed": run.seed}.items():
        *parents, leaf = name.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        section[leaf] = value
    return BaselineConfig.model_validate(values) if baseline else config_from_dict(values, f"study row {run.row}")


def command(run: Run) -> str:
    """The same run from the command line."""
    settings = {**run.settings, "train.seed": run.seed}
    what = "baseline" if run.recipe == BASELINE else f"train --recipe {run.recipe}"
    return f"hmmlm {what} {' '.join(flag(*setting) for setting in settings.items())}"


def flag(name: str, value: Any) -> str:
    """A setting as the command line takes it; switches are --section.name and --section.no-name."""
    *parents, leaf = name.replace("_", "-").split(".")
    if isinstance(value, bool):
        return "--" + ".".join([*parents, leaf if value else f"no-{leaf}"])
    values = value if isinstance(value, (list, tuple)) else [value]
    return f"--{'.'.join([*parents, leaf])} {shlex.join(map(str, values))}"


def commit() -> str:
    """The commit that is run; $HMMLM_COMMIT where the code was copied without its repository."""
    if "HMMLM_COMMIT" in os.environ:
        return os.environ["HMMLM_COMMIT"]
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def machine(on_gpu: bool) -> str:
    import torch

    if on_gpu:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"studies: error: {error}")
