"""Settings of records under their present names.

Records in results/ are never rewritten. Their settings pass through here before they are compared with a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from papers.study import BASELINE

BAUM_WELCH = ("full_batch", "step", "pseudocount", "momentum")
RENAMED_SETTINGS: dict[str, str] = {
    "model.parameterization": "model.kind",
    "model.factored": "model.block_embeddings",
    "initialization.alike": "model.max_initial_similarity",
    "initialization.shared": "initialization.cache",
    "schedule.warmup_tokens": "schedule.warmup",
    "schedule.warmup_fraction": "schedule.warmup",
    **{f"optimizer.baum_welch.{name}": f"optimizer.{name}" for name in BAUM_WELCH},
}
"""Old dotted name to new: add every rename here."""
RENAMED_BASELINE_SETTINGS: dict[str, str] = {
    **{name: f"batches.{name}" for name in ("batch_size", "length")},
    **{name: f"optimizer.{name}" for name in ("rate", "betas", "weight_decay", "clip")},
}
"""The same for neural baselines, whose settings were not in sections."""
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "model.form": {"code": "released", "paper": "printed"},
    "model.weights": {"pretrained": "all"},
}
"""Old value to new, by the new name of the setting."""
NO_PENALTIES = {"model.size_penalty": 0.0, "model.change_penalty": 0.0}
"""Settings of LSTMs with weight dropout whose recipes had no penalties; later rows state theirs."""
FIRST_WIKITEXT_LSTM = {
    "model.input_dropout": 0.5,
    "model.layer_dropout": 0.3,
    "model.dropout": 0.5,
    "optimizer.weight_decay": 0.01,
}
"""The same of the first recipe for WikiText-2."""


def translate_settings(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record over a recipe under their present names; present settings do not change."""
    given = dict(settings)
    if recipe == BASELINE:
        return {RENAMED_BASELINE_SETTINGS.get(name, name): value for name, value in given.items()}
    if recipe.endswith("-awd-lstm"):
        first = FIRST_WIKITEXT_LSTM if recipe.startswith("wikitext2") else {}
        return {**NO_PENALTIES, **first, **given}
    structure = given.pop("model.structure", "brown")
    if structure == "uniform":
        given.pop("model.blocks", None)
        given["model.parameterization"] = "uniform"
    elif structure == "none":
        given["model.blocks"] = 0
    if "initialization.network" in given:  # the network of a teacher is now a model family with a teacher of its own
        given["model.weights"] = given.pop("initialization.network")
        if "initialization.teacher" in given:
            given["model.teacher"] = given["initialization.teacher"]
    named = {RENAMED_SETTINGS.get(name, name): value for name, value in given.items()}
    if named.get("initialization.kind") == "none":
        unused = [name for name in named if name.startswith("initialization.") and name != "initialization.kind"]
        named = {name: value for name, value in named.items() if name not in unused}
    return {name: RENAMED_VALUES.get(name, {}).get(value, value) for name, value in named.items()}
