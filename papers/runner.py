"""Train the runs of a study and record their results.

The best model of a run by validation is scored once on valid and once on test. The run's folder keeps the model, not
the optimizer state. A run that fails to train has a record that gives the reason. Runs that have a record are not
repeated, so an interrupted study resumes.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmmlm.config.networks import BaselineConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import TrainingConfig
from hmmlm.errors import InputError
from hmmlm.runs.folders import saved_config
from papers.commands import command, counted, parts_of, teacher_of
from papers.corpus import text_checksums
from papers.ngrams import NgramConfig, count_and_score
from papers.records import add_record, commit, machine, read_records, recorded_identity
from papers.settings import configuration, identity
from papers.study import CHECKSUMS, Combination, Study, StudyRun

if TYPE_CHECKING:
    from hmmlm.data.tokenfile import TokenFile
    from hmmlm.learning.evaluate import Evaluation
    from hmmlm.lm.lm import LanguageModel
    from hmmlm.lm.textmodel import TextModel

STREAM_LENGTH = 4096  # tokens of a single stream that are read at once
SPEEDS = ("tokens_per_second", "step_ms", "train_seconds", "seconds")
"""Metrics that depend on what else runs on the machine."""


def with_settings(runs: Sequence[StudyRun], settings: Mapping[str, Any]) -> list[StudyRun]:
    """Return the runs with `settings` set, those that are then the same once; every configuration is validated."""
    changed = dict[str, StudyRun]()
    for run in runs:
        run = StudyRun(replace(run.row, settings={**run.row.settings, **settings}), run.seed)
        for part in parts_of(run):
            configuration(part)
        changed.setdefault(identity(run), run)
    return list(changed.values())


def run_study(study: Study, runs: Sequence[StudyRun], out: Path, work: Path, jobs: int, again: bool) -> int:
    """Train the runs that have no record, `jobs` at a time, and add their records; return how many crashed.

    With several jobs no speeds are recorded. Ctrl-C or SIGTERM stops the runs in progress and raises
    KeyboardInterrupt; records of finished runs are kept.
    """
    file = out / f"{study.name}.json"
    if not again:
        recorded = {recorded_identity(record) for record in read_records(file)}
        todo = [run for run in runs if identity(run) not in recorded]
        print(f"{len(todo)} of {len(runs)} runs to train; the others have a record in {file}", flush=True)
        runs = todo
    crashed = 0
    for run, future in _perform_all(runs, work / study.name, jobs):
        try:
            record = future.result()
        except Exception as error:  # one crashed run must not lose the others
            print(f"FAILED {run.row.name}: {error!r}", flush=True)
            crashed += 1
            continue
        add_record(file, record)
        shown = {name: record[name] for name in ("row", "seed", "stopped") if name in record}
        print(json.dumps({**shown, **record["metrics"]}, ensure_ascii=False), flush=True)
    return crashed


def _perform_all(runs: Iterable[StudyRun], work: Path, jobs: int) -> Iterator[tuple[StudyRun, Future[dict[str, Any]]]]:
    """Yield the runs as they end, `jobs` at a time."""
    waiting, running = iter(runs), dict[Future[dict[str, Any]], StudyRun]()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            while True:
                # The pool is given no more than it can start, so that nothing is left in its queue after Ctrl-C.
                for run in islice(waiting, jobs - len(running)):
                    running[pool.submit(perform, run, work, jobs == 1)] = run
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future
        except KeyboardInterrupt:
            for worker in active_children():
                worker.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def perform(run: StudyRun, work: Path, alone: bool = True) -> dict[str, Any]:
    """Train one run and return its record; without speeds unless it is `alone` on the machine."""
    import torch

    from hmmlm.learning.fit import TrainingError

    config = configuration(parts_of(run)[0]) if run.row.combine is not None else _with_teacher(run, work)
    if torch.cuda.is_available():  # a worker does several runs: peak memory is to be that of this one
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    on_gpu = torch.cuda.is_available() and config.train.device != "cpu"
    stopped: dict[str, str] = {}
    metrics: dict[str, Any] = {}
    try:
        if run.row.combine is not None:
            metrics = _combine(run, run.row.combine, work, on_gpu)
        else:
            metrics = _train(config, _new_folder(run, work), on_gpu)
    except TrainingError as error:
        stopped["stopped"] = str(error).partition(": ")[0]  # advice and the folder follow
    if on_gpu and metrics:
        metrics["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    if not alone:
        metrics = {name: value for name, value in metrics.items() if name not in SPEEDS}
    return {
        "row": run.row.name,
        "recipe": run.row.recipe,
        "seed": run.seed,
        "metrics": metrics,
        **stopped,
        "settings": {
            **run.row.settings,
            **({CHECKSUMS: checksums} if (checksums := text_checksums(Path(config.data))) else {}),
        },
        "command": command(run),
        "commit": commit(),
        "machine": machine(on_gpu),
        "date": time.strftime("%Y-%m-%d"),
    }


def _with_teacher(run: StudyRun, work: Path) -> TrainingConfig:
    """Return the configuration of a training run, after the training of its teacher if it has one."""
    config = configuration(run)
    if run.row.teacher is None:
        return config
    assert isinstance(config, RunConfig)
    teacher = train_teacher_of(run, work)
    return config.model_copy(update={"next_words": config.next_words.model_copy(update={"teacher": teacher})})


def train_teacher_of(run: StudyRun, work: Path) -> Path:
    """Return the run of the row's teacher in `work`; it is trained, or its training resumed, unless it is finished."""
    from hmmlm.data.files import PERPLEXITY
    from hmmlm.runs.progress import LineProgress
    from hmmlm.training.networks import train_baseline

    teacher = teacher_of(run)
    folder, config = work / _folder_name(f"teacher-{teacher.row.name}-{teacher.seed}"), configuration(teacher)
    assert isinstance(config, BaselineConfig)
    if not folder.exists() and (trained := _find_finished(teacher, config, work)) is not None:
        return trained  # as a row of its own
    if not (folder / PERPLEXITY).exists():
        result = train_baseline(config, folder, resume=folder.exists(), progress=LineProgress())
        _refuse_interrupted(result.finished)
    return folder


def _folder_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def _stem(run: StudyRun) -> str:
    """Return the beginning of the names of the folders of a run."""
    return _folder_name(f"{run.row.name}-{run.seed}-")


def _new_folder(run: StudyRun, work: Path) -> Path:
    return work / f"{_stem(run)}{time.time():.0f}-{os.getpid()}"


def _combine(run: StudyRun, combination: Combination, work: Path, on_gpu: bool) -> dict[str, Any]:
    """Train the parts of a combination that `work` does not have, combine them, and return the metrics."""
    from hmmlm.cli.combine import CombineArguments
    from hmmlm.cli.join import build as join
    from hmmlm.cli.mix import MixArguments
    from hmmlm.cli.mix import build as mix
    from hmmlm.lm.scoring import perplexity
    from hmmlm.report.results import score_tokens
    from hmmlm.training.prepare import reopen

    began, tokens, folders = time.perf_counter(), 0, list[Path]()
    for part in parts_of(run):
        config = _with_teacher(part, work)
        folder = _find_finished(part, config, work)
        if folder is None:
            folder = _new_folder(part, work)
            tokens += int(_train(config, folder, on_gpu)["tokens"])
        folders.append(folder)
    device = "cuda" if on_gpu else "cpu"
    common: dict[str, Any] = {"models": tuple(folders), "out": work / "combined", "device": device}
    model: TextModel
    if combination.mixed == "sequence":
        model, weights, perplexities = join(CombineArguments(**common))
        assert perplexities is not None
        valid = perplexities[-1]
    else:
        model, scored, valid_tokens = mix(MixArguments(**common, **counted(combination)))
        weights, valid = model.weights.mean(0).tolist(), perplexity(scored[-1], valid_tokens)
    test = score_tokens(model, reopen(folders[0]).tokens["test"]).perplexity
    return {
        "valid_perplexity": round(valid, 3),
        "test_perplexity": round(test, 3),
        **{f"weight_{i}": round(weight, 4) for i, weight in enumerate(weights, 1)},
        "seconds": round(time.perf_counter() - began, 1),
        "tokens": tokens,
    }


def _find_finished(run: StudyRun, config: TrainingConfig, work: Path) -> Path | None:
    """Return the folder of a finished run with this configuration."""
    from hmmlm.training.prepare import with_actual_text

    wanted = with_actual_text(config, None)
    for folder in sorted(work.glob(f"{_stem(run)}*")):
        if (folder / "final").exists() and saved_config(type(config), folder) == wanted:
            return folder
    return None


def _train(config: TrainingConfig, folder: Path, on_gpu: bool) -> dict[str, Any]:
    """Train an HMM or a neural baseline in `folder` and return its metrics; the folder keeps its models."""
    from hmmlm.runs.checkpoint import remove_folder

    try:
        return _train_and_score(config, folder, on_gpu)
    finally:
        for link in ("last", "previous", "restore"):  # checkpoints of large networks soon fill a disk
            remove_folder(folder, link)


def _train_and_score(config: TrainingConfig, folder: Path, on_gpu: bool) -> dict[str, Any]:
    from hmmlm.data.files import PERPLEXITY, read_json
    from hmmlm.runs.history import read_history
    from hmmlm.runs.progress import LineProgress
    from hmmlm.training.networks import train_baseline
    from hmmlm.training.train import train

    began = time.perf_counter()
    if isinstance(config, NgramConfig):
        return count_and_score(config, folder)
    if isinstance(config, BaselineConfig):
        result = train_baseline(config, folder, progress=LineProgress())
    else:
        assert isinstance(config, RunConfig)
        result = train(config, folder, progress=LineProgress())
    _refuse_interrupted(result.finished)
    seconds = time.perf_counter() - began
    perplexities = evaluate_best(folder, on_gpu) if isinstance(config, RunConfig) else read_json(folder / PERPLEXITY)
    history = read_history(folder / "history.jsonl")
    speeds = [event["tokens_per_second"] for event in history if event["event"] == "train"][1:]
    speed = statistics.median(speeds) if speeds else result.tokens / result.seconds
    return {
        **_metrics(perplexities, history, speed, config.batches.batch_size * config.batches.length),
        "train_seconds": round(result.seconds, 1),
        "seconds": round(seconds, 1),
        "epochs": round(result.epochs, 2),
        "tokens": result.tokens,
        "skipped": max((event.get("skipped", 0) for event in history), default=0),
    }


def evaluate_best(folder: Path, on_gpu: bool) -> dict[str, float]:
    """Return the perplexities of a run's best model on valid and test."""
    from hmmlm.lm.lm import load
    from hmmlm.training.prepare import reopen

    lm, data = load(folder), reopen(folder)
    lm = lm.to("cuda") if on_gpu else lm
    return {split: evaluate_tokens(lm, data.tokens[split]).perplexity for split in ("valid", "test")}


def evaluate_tokens(lm: LanguageModel, tokens: TokenFile) -> Evaluation:
    """Evaluate a model on a text, which is read as `lm.perplexity` reads it.

    Validation during training reads a text through which the chain continues as several streams, each from the start
    distribution, because that is faster. Here it is one stream. At the end of a window it loses states whose
    probability is below the range of the dtype; `hmmlm.report.results.score_tokens` keeps them.
    """
    from hmmlm.config.sections import StreamConfig
    from hmmlm.learning.evaluate import evaluate
    from hmmlm.training.prepare import evaluation_batches, trained_batches

    batches = trained_batches(lm.config)
    if isinstance(batches, StreamConfig) and not batches.eval_reset_at_eos:
        batches = batches.model_copy(update={"batch_size": 1, "length": STREAM_LENGTH})
    return evaluate(lm.hmm, evaluation_batches(batches, tokens, lm.tokenizer.eos_id).epoch(0))


def _refuse_interrupted(finished: bool) -> None:
    """Raise an error if a run was interrupted: its metrics so far are not those of the row."""
    if not finished:
        raise InputError("interrupted: the run has no record and starts again when the study is run again")


def _metrics(
    perplexities: Mapping[str, float], history: Sequence[dict[str, Any]], speed: float, batch: int
) -> dict[str, Any]:
    """Return what every run has: perplexities, training loss, tokens per second, the step of the best model."""
    losses = [event["loss"] for event in history if event["event"] == "train" and event.get("objective") != "joint"]
    return {
        **{f"{split}_perplexity": round(value, 3) for split, value in perplexities.items()},
        "train_perplexity": round(math.exp(statistics.mean(losses[-10:])), 3) if losses else None,
        "tokens_per_second": round(speed),
        "step_ms": round(1000 * batch / speed, 3),
        "best_step": max((event["step"] for event in history if event.get("best")), default=0),
    }
