"""Distilling from Python: `hmmlm.distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hmmlm.arguments import check_arguments
from hmmlm.config.distill import DistillConfig
from hmmlm.config.explain import explain
from hmmlm.errors import InputError
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.runs.folders import new_folder
from hmmlm.runs.progress import terminal_progress
from hmmlm.training.distill import distill as distill_in_folder


@check_arguments
def distill(model: str | Path, out: str | Path | None = None, **settings: Any) -> LanguageModel:
    """Distill a causal language model of Hugging Face into an HMM as `hmmlm distill` does, and return it.

    Ctrl-C saves the run, then raises KeyboardInterrupt; `hmmlm distill --resume OUT` continues it.

    Args:
        model: a Hugging Face folder, a name on the hub, or a GGUF file.
        out: the folder of the run; None: a new one in runs/.
        settings: fields of `hmmlm.config.distill.DistillConfig`: tokens=1_000_000, num_states=1024, prompts="file.txt".
    """
    try:
        config = DistillConfig(model=str(model), **settings)
    except ValidationError as error:
        raise InputError(f"hmmlm.distill: {explain(DistillConfig, error)}") from None
    with new_folder(None if out is None else Path(out), "runs", Path(model).stem) as folder:
        result = distill_in_folder(config, folder, progress=terminal_progress())
    if not result.finished:
        raise KeyboardInterrupt(f"saved; continue with: hmmlm distill --resume {folder}")
    return load(folder, config.device)
