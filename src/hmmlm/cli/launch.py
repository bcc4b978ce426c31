"""Start the processes of `--train.devices N` or `--devices N` on this machine with the engine of torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from typing import Protocol

LAUNCHER_S = 1.0
"""Seconds between two looks at the process that started this one."""


class Devices(Protocol):
    """Where a command computes."""

    @property
    def device(self) -> str: ...

    @property
    def devices(self) -> int:
        """Number of processes."""


def launch(
    command: str,
    argv: list[str],
    config: Devices,
    setting: str = "train.devices",
    advice: str = "continue the run with --resume",
) -> int | None:
    """Run a command in `config.devices` processes and return its exit code; None if this process is to run it.

    If one of them fails or is killed, the others are ended; Ctrl-C lets all of them save.

    Args:
        setting: the name of `devices` in errors.
        advice: what to do after a process was killed.
    """
    from hmmlm.distributed.ranks import started_by_torchrun

    if config.devices == 1 or started_by_torchrun():
        if "TORCHELASTIC_RUN_ID" in os.environ:  # else the parent may be a shell that ends
            _end_with_launcher()
        return None

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from hmmlm.cli.main import INTERRUPTED

    _check_gpus(config, setting)
    # Threads of all processes together: one per core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.devices)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it reports is reported below
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "hmmlm", command, *argv)
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:  # the process has printed what was wrong
            return failure.exitcode
        print(
            f"hmmlm: error: rank {rank} of {config.devices} (process {failure.pid}) was ended by "
            f"{failure.signal_name()}, and the others with it; {advice}",
            file=sys.stderr,
        )
        return 2
    return 0


def _end_with_launcher() -> None:
    """Interrupt this process, as Ctrl-C does, when the one that started it is killed: nothing else would end it."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def _check_gpus(config: Devices, setting: str) -> None:
    """Raise an InputError if there are fewer GPUs than processes that need one."""
    import torch

    from hmmlm.device import pick_device
    from hmmlm.errors import InputError
    from hmmlm.terminal import counted

    gpus = torch.cuda.device_count()
    if pick_device(config.device).type == "cuda" and gpus < config.devices:
        raise InputError(
            f"{setting} is {config.devices}, but this machine has {counted(gpus, 'GPU')}: set it to "
            f"{gpus} or less, or start processes on several machines with torchrun"
        )
