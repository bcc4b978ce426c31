"""The file of a study: a list of records, one a run, as `studies.perform` makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError


def read_records(file: Path) -> list[dict[str, Any]]:
    """The runs in a file of results; none where there is no file."""
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
    """Add a run to a study's file; an earlier record of the same row, seed and settings is replaced."""
    records = [old for old in read_records(file) if identity(old) != identity(record)]
    records.append(record)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, (json.dumps(records, indent=1, ensure_ascii=False) + "\n").encode())


def identity(run: Mapping[str, Any]) -> str:
    """What tells runs, or their records, apart; of baselines beside a study little is known."""
    return json.dumps([run["row"], run.get("seed"), run.get("settings")], sort_keys=True)
