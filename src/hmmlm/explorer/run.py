"""The panel of the run: learning curves, results, settings that differ from the defaults, and files."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from hmmlm import __version__
from hmmlm.config.run import RunConfig
from hmmlm.data.files import RESULTS, read_json
from hmmlm.errors import InputError
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.generation import constraint_kinds
from hmmlm.explorer.query import MAX_CHARACTERS, Query
from hmmlm.report.facts import split_settings, training_facts
from hmmlm.runs.folders import flat_settings, saved_config
from hmmlm.runs.history import HISTORY, read_history

POINTS = 600  # of a curve
FILES = 200


class ModelQuery(Query):
    """No fields."""


class RunQuery(Query):
    """No fields."""


def model(explorer: Explorer, query: ModelQuery) -> dict[str, Any]:
    """Return what the page needs to start: the name and the size of the model, and what it accepts."""
    lm = explorer.lm
    return {
        "version": __version__,
        "name": explorer.name,
        "folder": None if explorer.folder is None else str(explorer.folder),
        "states": lm.hmm.num_states,
        "words": lm.hmm.vocab_size,
        "kind": lm.hmm.kind,
        "tokenizer": lm.tokenizer.kind,
        "has_unknown": lm.tokenizer.unk_id is not None,
        "data": lm.config.get("data") if isinstance(lm.config.get("data"), str) else None,
        "sentence": explorer.sentence,
        "constraints": constraint_kinds(),
        "max_characters": MAX_CHARACTERS,
    }


def run(explorer: Explorer, query: RunQuery) -> dict[str, Any]:
    """Return curves, figures, settings and files of the run; parts that are not there are empty, with the reason."""
    folder = explorer.run
    answer: dict[str, Any] = {"folder": None, "facts": {}, "curves": {}, "results": {}, "files": [], "problems": []}
    if folder is None:
        settings = [(name, str(value)) for name, value in flat_settings(explorer.lm.config).items()]
        problem = "this is a model without its run: there are no curves, results and files"
        return answer | {"changed": settings, "defaults": [], "problems": [problem]}
    problems: list[str] = []
    history, results, changed, defaults = list[dict[str, Any]](), dict[str, Any](), list[Any](), list[Any]()
    try:
        history = read_history(folder / HISTORY)
    except InputError as error:
        problems.append(str(error))
    if (folder / RESULTS).exists():
        try:
            results = read_json(folder / RESULTS)
        except InputError as error:
            problems.append(str(error))
    try:
        changed, defaults = split_settings(saved_config(RunConfig, folder))
    except InputError as error:  # of another version: all settings, as they are stored
        problems.append(str(error))
        changed = [(name, str(value)) for name, value in flat_settings(explorer.lm.config).items()]
    return {
        "folder": str(folder),
        "facts": training_facts(history),
        "curves": _curves(history),
        "results": results,
        "changed": changed,
        "defaults": defaults,
        "files": _files(folder),
        "problems": problems,
    }


def _curves(history: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return (tokens, perplexity) of training and validation, and (tokens, rate), at most POINTS of each."""
    curves: dict[str, list[tuple[float, float]]] = {"train": [], "valid": [], "rate": []}
    for record in history:
        event, tokens, loss = record.get("event"), record.get("tokens"), record.get("loss")
        if not isinstance(tokens, int | float):
            continue
        # exp of the loss of P(O, S) is not a perplexity of the text
        if event in ("train", "valid") and isinstance(loss, int | float) and record.get("objective") != "joint":
            curves[event].append((tokens, math.exp(min(loss, 700))))
        if event == "train" and isinstance(record.get("rate"), int | float):
            curves["rate"].append((tokens, record["rate"]))
    return {name: points[:: max(1, math.ceil(len(points) / POINTS))] for name, points in curves.items()}


def _files(folder: Path) -> list[dict[str, Any]]:
    """Return the files of a run and their sizes, at most FILES; links are not followed."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*")):
        with suppress(OSError):  # a run that is still training replaces its checkpoints
            if path.is_file() and not path.name.startswith(".") and len(found) < FILES:
                found.append({"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size})
    return found
