"""`hmmlm runs`: the runs in a folder and their results."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from hmmlm.cli.parse import Arguments, parse

DESCRIPTION = """List the runs of `hmmlm train`, `baseline` and `teacher` in a folder, the newest last: data, model,
validation and test perplexity, share of unknown words, and how far a run is. `latest` is a name for
the newest run of `hmmlm train` in every command that takes a run.

examples:
  hmmlm runs
  hmmlm runs experiments --json"""


class RunsArguments(Arguments):
    folder: Annotated[
        CliPositionalArg[Path | None], Field(description="Folder of the runs; null: runs, teachers and baselines.")
    ] = None
    json_output: bool = Field(default=False, alias="json")
    """Print JSON."""


def run(argv: list[str]) -> int:
    arguments = parse(RunsArguments, argv, "runs", DESCRIPTION)

    from hmmlm.errors import InputError
    from hmmlm.runs.folders import FOLDERS, list_runs

    parents = list(map(Path, FOLDERS.values())) if arguments.folder is None else [arguments.folder]
    found = [_summary(folder) for parent in parents for folder in list_runs(parent)]
    if not found:
        raise InputError(f"no runs in the folder {parents[0]}: `hmmlm train` makes one")
    if arguments.json_output:
        print(json.dumps(found, indent=1))
    else:
        _print_table(found)
    return 0


def _summary(folder: Path) -> dict[str, Any]:
    """Return what a run is and what it has reached, as JSON values; null where it is not known yet."""
    from hmmlm.data.files import PERPLEXITY, RESULTS, read_json, require_like
    from hmmlm.errors import InputError
    from hmmlm.runs.folders import CONFIG, command_of
    from hmmlm.runs.history import read_history

    config, command = read_json(folder / CONFIG), command_of(folder)
    try:
        history = read_history(folder / "history.jsonl")
    except InputError:  # not started, or damaged
        history = []
    checks = [record for record in history if record["event"] == "valid"]
    perplexities = [record["perplexity"] for record in checks if record.get("perplexity") is not None]
    results = folder / (PERPLEXITY if command == "baseline" else RESULTS)
    try:
        scores = read_json(results)
        test = {"perplexity": scores["test"]} if command == "baseline" else scores["model"]["test"]
        require_like(results, test, {"perplexity": 0.0} | ({} if command == "baseline" else {"unknown_share": 0.0}))
    except (InputError, KeyError, TypeError):  # not finished, damaged, or the perplexity is infinite
        test = {}
    model = config.get("model", {})
    kind = "transformer" if command == "teacher" else model.get("kind")
    trained = (folder / "final").exists()
    return {
        "run": str(folder),
        "command": command,
        "data": config["data"],
        "model": kind,
        # A union has those of the saved model; `states` is the name of 0.2.
        "states": None if kind == "union" else model.get("num_states", model.get("states")),
        "trained": trained,
        "finished": trained and (command == "teacher" or results.exists()),
        "steps": history[-1]["step"] if history else 0,
        "valid_perplexity": min(perplexities, default=None),
        "test_perplexity": test.get("perplexity"),
        "unknown_share": test.get("unknown_share"),
        "seconds": history[-1].get("seconds") if history else None,
        "changed": time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / CONFIG).stat().st_mtime)),
    }


def _print_table(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hmmlm.runs.progress import perplexity_text
    from hmmlm.terminal import printable

    table = Table(box=None, pad_edge=False)
    for name in ("run", "data", "model"):
        table.add_column(name, overflow="fold")
    for name in ("valid", "test", "unknown"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("progress", no_wrap=True)
    for run in found:
        perplexities = (
            "" if p is None else perplexity_text(p) for p in (run["valid_perplexity"], run["test_perplexity"])
        )
        unknown = "" if run["unknown_share"] is None else f"{run['unknown_share']:.1%}"
        model = " ".join(str(part) for part in (run["model"], run["states"]) if part is not None)
        texts = [Text(printable(str(part))) for part in (run["run"], run["data"], model)]
        progress = "finished" if run["finished"] else "not tested yet" if run["trained"] else f"step {run['steps']:,}"
        table.add_row(*texts, *perplexities, unknown, progress)
    Console().print(table)
