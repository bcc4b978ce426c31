"""What `hmmlm teacher` and `hmmlm baseline` share: where a network is trained, and how a run that stops says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hmmlm.errors import InputError
from hmmlm.learning.config_checks import check_data
from hmmlm.learning.config_network import NetworkConfig
from hmmlm.learning.folders import new_folder

if TYPE_CHECKING:
    from hmmlm.learning.network import NetworkResult


def train_in(
    command: str, config: NetworkConfig, out: Path | None, resume: Path | None,
    train: Callable[[Path, bool], NetworkResult],
) -> NetworkResult:  # fmt: skip
    """Train, as `train` does it (folder, whether to resume), in the folder `resume` or `out`, or in a new one that is
    named after command and data."""
    if resume is not None:
        if out is not None:
            raise InputError("--resume has the folder of its run: leave out --out")
        result = train(resume, True)
    else:
        check_data(config.data, config.tokenizer)  # also in training, but that takes seconds to import
        with new_folder(out, f"{command}s", Path(config.data).stem) as folder:
            result = train(folder, False)
    if not result.finished:
        print(f"stopped at step {result.steps:,}, saved; continue with: hmmlm {command} --resume {result.out}")
    return result
