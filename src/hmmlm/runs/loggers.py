"""Loggers of a user, such as those of Lightning Fabric, which receive the figures of a run beside its history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hmmlm.errors import InputError


@runtime_checkable
class Logger(Protocol):
    """What the loggers of Lightning Fabric, and those that Lightning builds on them, have in common."""

    def log_hyperparams(self, params: dict[str, Any]) -> object:
        """Record the configuration of a run; NotImplementedError if the logger has no place for it."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> object:
        """Record the figures of a step."""

    def finalize(self, status: str) -> object:
        """Write what is left, at the end of a run: status is "success" or "failed"."""


class Loggers:
    """Passes everything on to several loggers. An error of one ends the run after its last checkpoint."""

    def __init__(self, loggers: Sequence[Logger], run: Path) -> None:
        self._loggers, self._run = loggers, run

    def start(self, settings: dict[str, Any]) -> None:
        for logger in self._loggers:
            with suppress(NotImplementedError):
                self._guard(logger, logger.log_hyperparams, settings)

    def log(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._loggers:
            self._guard(logger, logger.log_metrics, metrics, step)

    def finish(self, failed: bool) -> None:
        """End the logs; after a failure, errors of a logger do not hide it."""
        for logger in self._loggers:
            with suppress(*[InputError] * failed):
                self._guard(logger, logger.finalize, "failed" if failed else "success")

    def _guard(self, logger: Logger, call: Callable[..., object], *values: object) -> None:
        try:
            call(*values)
        except NotImplementedError:
            raise
        except Exception as error:
            raise InputError(
                f"the logger {type(logger).__name__} raised {type(error).__name__}: {error}; the last checkpoint is "
                f"intact: `hmmlm train --resume {self._run}` continues without the logger"
            ) from error
