"""Three training steps of every recipe, on a tiny text with tiny sizes: what a rename would break."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.config.recipe import recipe_names
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.errors import InputError
from hmmlm.learning.fit import TrainingError
from hmmlm.training.networks import train_baseline, train_teacher
from hmmlm.training.train import train
from papers.settings import FOLDER, configuration, recipe_settings, sections
from papers.study import BASELINE, StudyRow, StudyRun
from papers.variants import VARIANTS

RECIPES = (*recipe_names(), *recipe_names(BASELINE), *sorted(file.stem for file in FOLDER.glob("*.toml")), *VARIANTS)
STEPS, BATCH, LENGTH = 3, 4, 8
SMALL: dict[str, Any] = {
    "model.num_states": 16,
    "model.blocks": 4,
    "model.hidden": 8,
    "model.embedding": 8,
    "model.layers": 2,
    "model.capacity": 20_000,
    "model.exchange_passes": 1,
    "initialization.tokens": 32,
    "initialization.kmeans.tokens": 64,
}
"""Sizes for settings of a recipe that are larger."""


def three_steps(recipe: str, folder: Path) -> str:
    """Train a recipe for three steps in a folder of its own; return why that failed, or nothing."""
    planned = recipe_settings(recipe)
    settings = _tiny(_text(folder))
    for name, size in SMALL.items():
        if isinstance(planned.get(name), int) and planned[name] > size:
            settings[name] = size
    if planned.get("model.capacity"):  # then it says how large `hidden` is
        settings.pop("model.hidden", None)
    for name in ("model.teacher", "initialization.teacher"):
        settings |= {name: str(_teacher(folder))} if planned.get(name) else {}
    if planned.get("initialization.cache"):
        settings["initialization.cache"] = str(folder / "cache")
    try:
        config = configuration(StudyRun(StudyRow(name=recipe, recipe=recipe, settings=settings), 0))
        assert isinstance(config, RunConfig | BaselineConfig)
        out = folder / recipe
        result = train_baseline(config, out) if isinstance(config, BaselineConfig) else train(config, out)
    except (InputError, TrainingError) as error:
        return str(error)
    return "" if result.steps == STEPS else f"{result.steps} steps instead of {STEPS}"


def _tiny(text: Path) -> dict[str, Any]:
    """Return the settings of three steps on a text, by dotted name."""
    return {
        "data": str(text),
        "tokenizer.kind": "word",
        "tokenizer.split": "whitespace",
        "batches.batch_size": BATCH,
        "batches.length": LENGTH,
        "schedule.warmup": 0,
        "train.epochs": 1,
        "train.max_tokens": STEPS * BATCH * LENGTH,
        "train.precision": "32-true",
        "train.device": "cpu",
        "train.tensorboard": False,
    }


def _text(folder: Path) -> Path:
    """Return a text of 200 lines of eight words."""
    path, chance = folder / "text.txt", random.Random(0)
    if not path.exists():
        words = [f"w{i}" for i in range(60)]
        path.write_text("".join(" ".join(chance.choices(words, k=8)) + "\n" for _ in range(200)))
    return path


def _teacher(folder: Path) -> Path:
    """Return a tiny transformer, trained for three steps."""
    path = folder / "teacher"
    if not path.exists():
        values = {**sections(_tiny(_text(folder))), "model": {"hidden": 16, "heads": 2, "layers": 1}}
        train_teacher(read_config(TeacherConfig, values), path)
    return path
