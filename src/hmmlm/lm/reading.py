"""The part of a stored training configuration that decides how a model reads a text."""

from pathlib import Path
from typing import Any

from hmmlm.data.files import require_like
from hmmlm.data.text import UNITS
from hmmlm.errors import InputError

_READING: dict[str, dict[str, Any]] = {
    "batches": {"kind": "", "batch_size": 0, "length": 0, "reset_at_eos": False, "eval_reset_at_eos": False},
    "text": {"unit": ""},
}
"""Settings of a training configuration that evaluation uses, with a value of the type of each."""


def check_training(path: Path, training: Any) -> dict[str, Any]:
    """Return the training configuration in the model file `path`, of any version; how text is read depends on it."""
    if training is None:
        return {}
    require_like(path, training, {}, "training")
    for section, examples in _READING.items():
        values = training.get(section, {})
        require_like(path, values, {}, f"training.{section}")
        require_like(path, values, {k: v for k, v in examples.items() if k in values}, f"training.{section}")
    if training.get("batches", {}).get("length") == 0:
        raise InputError(f"{path}: training.batches.length is 0, not a number of at least 1: save the model again")
    unit = training.get("text", {}).get("unit", "line")
    if unit not in UNITS:
        raise InputError(f"{path}: training.text.unit is {unit!r:.40}, not {' or '.join(UNITS)}: save the model again")
    for name in ("data", "data_folder"):
        if not isinstance(training.get(name), str | None):
            raise InputError(f"{path}: training.{name} is {training[name]!r:.40}, not a string: save the model again")
    return dict(training)
