"""The history of a run: JSON lines, and the same figures for TensorBoard and other loggers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from hmmlm.runs.loggers import Logger, Loggers

HISTORY = "history.jsonl"


class History:
    """One JSON object per line: {"event": "start" | "train" | "valid", "step": …, figures …}.

    Opening it at a checkpoint's step drops the later lines, so that a resumed run does not write them twice.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        tensorboard: bool = False,
        loggers: Sequence[Logger] = (),
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.path = run / HISTORY
        kept = [record for record in read_history(self.path) if record["step"] <= step] if self.path.exists() else []
        self.empty = not kept
        write_bytes(self.path, "".join(map(_line, kept)).encode())
        self._file = self.path.open("a", encoding="utf-8")
        # purge_step hides the events after the checkpoint that an earlier process wrote
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
        self._loggers = Loggers(loggers, run)
        self._loggers.start(settings or {})

    def write(self, event: str, step: int, **figures: Any) -> None:
        """Append a record. It survives a kill of the process immediately, a loss of power after `sync`."""
        self._file.write(_line({"event": event, "step": step, **figures}))
        self._file.flush()
        scalars = {f"{event}/{name}": value for name, value in figures.items() if isinstance(value, int | float)}
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        self._loggers.log(scalars, step)

    def sync(self) -> None:
        """Flush the records to disk; done before each checkpoint, so that no checkpoint is ahead of the history."""
        os.fsync(self._file.fileno())

    def close(self, failed: bool = False) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        self._loggers.finish(failed)

    def __enter__(self) -> History:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(failed=raised[0] is not None)


class NoHistory:
    """What a process that writes no history has instead."""

    empty = False

    def write(self, event: str, step: int, **figures: Any) -> None:
        """Write nothing."""

    def sync(self) -> None:
        """Write nothing."""

    def __enter__(self) -> NoHistory:
        return self

    def __exit__(self, *raised: object) -> None:
        """Close nothing."""


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read the records of a history file. A truncated last line is left out; any other bad line is an error."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return list(_records(path, lines))


def _records(path: Path, lines: list[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines[:-1], 1):  # text after the last line break is a truncated line
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"{path}, line {number}, is not a record of a training history") from None
        yield record


def _line(record: dict[str, Any]) -> str:
    """Serialize a record; infinity and NaN, which JSON lacks, become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
