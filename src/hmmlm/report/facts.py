"""Facts about a training run: device, speed and time from its history, and the settings that it changed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hmmlm.config.run import RunConfig
from hmmlm.runs.folders import flat_settings
from hmmlm.section import Section


def training_facts(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return device, number of parameters, speed and time of a run by label, where its history has them."""
    last = {name: value for record in history for name, value in record.items() if value is not None}
    speeds = [record["tokens_per_second"] for record in history if record.get("tokens_per_second") is not None]
    facts = {}
    if "device" in last:
        facts["device"] = str(last["device"])
    if "parameters" in last:
        facts["parameters"] = f"{last['parameters']:,}"
    if speeds:  # the first record includes compilation and warm-up
        facts["training speed"] = f"{statistics.median(speeds[1:] or speeds):,.0f} tokens/s"
    if "seconds" in last:
        facts["training time"] = _duration(last["seconds"])
    if "tokens" in last:
        facts["training tokens"] = f"{last['tokens']:,}"
    facts["validation checks"] = str(sum(record["event"] == "valid" for record in history))
    return facts


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def split_settings(config: RunConfig) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (name, value) of the settings that differ from their defaults, and of the others."""
    defaults = RunConfig.model_construct().model_dump(mode="json")
    for name, section in config:
        if isinstance(section, Section):
            kind = {field: defaults[name][field] for field in ("kind",) if field in defaults[name]}
            defaults[name] = type(section).model_construct().model_dump(mode="json") | kind
    if config.optimizer.kind == "adamw":
        defaults["optimizer"] |= config.model.optimizer_defaults
    settings, usual = flat_settings(config.dump()), flat_settings(defaults)
    changed = {name for name, value in settings.items() if name not in usual or usual[name] != value}
    rows = [(name, str(value)) for name, value in settings.items()]
    return [row for row in rows if row[0] in changed], [row for row in rows if row[0] not in changed]
