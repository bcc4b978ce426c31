"""What the commands that read a model share: the model, and the run it came from where that still exists."""

from __future__ import annotations

from pathlib import Path

from hmmlm.learning.config import RunConfig, config_from_dict
from hmmlm.lm import LanguageModel, load


def load_model(path: Path) -> tuple[LanguageModel, RunConfig]:
    """The model and the configuration it was trained with (the default one if it says nothing)."""
    lm = load(path)
    return lm, config_from_dict(lm.config, str(path))


def run_folder(path: Path) -> Path | None:
    """The training run that `path` is, or lies in (run/best, run/checkpoints/…), if its token files are there."""
    candidates = (path, *path.absolute().parents[:2], *path.resolve().parents[:2])
    return next((folder for folder in candidates if (folder / "data" / "test.json").exists()), None)
