"""The results file of a study: a list of records, one per run, as `papers.runner` and the benchmarks make them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from papers.settings import identity, recorded_run
from papers.study import Record


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a results file; none if the file does not exist."""
    if not file.exists():
        return []
    try:
        records = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file}: not JSON: {error}") from None
    if not isinstance(records, list) or any({"row", "metrics"} - set(record) for record in records):
        raise InputError(f"{file}: not a list of runs with `row` and `metrics`; move it out of {file.parent}/")
    return records


def add_record(file: Path, record: dict[str, Any]) -> None:
    """Add a record to a results file; it replaces an earlier one of the same row, seed and settings."""
    records = [old for old in read_records(file) if recorded_identity(old) != recorded_identity(record)]
    records.append(record)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, (json.dumps(records, indent=1, ensure_ascii=False) + "\n").encode())


def recorded_identity(record: Record) -> str:
    """Return the identity of the run of a record; of a benchmark's, its row, seed and settings."""
    run = recorded_run(record)
    if run is not None:
        return identity(run)
    return json.dumps([record["row"], record.get("seed"), record.get("settings", {})], sort_keys=True)


def commit() -> str:
    """Return the commit of the code; $HMMLM_COMMIT if the code was copied without its repository."""
    if "HMMLM_COMMIT" in os.environ:
        return os.environ["HMMLM_COMMIT"]
    command, folder = ["git", "rev-parse", "HEAD"], Path(__file__).parent
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(on_gpu: bool) -> str:
    """Return the name of the GPU, or the processor and its number of cores, and the version of torch."""
    import torch

    if on_gpu:
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
