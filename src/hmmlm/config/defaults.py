"""The settings that follow from a text: what `hmmlm train` chooses where neither the user nor a recipe does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hmmlm.config.recipe import merge
from hmmlm.config.run import RunConfig
from hmmlm.config.training import drop_other_kinds, read_config

Sections = dict[str, dict[str, Any]]
FEW_WORDS = 500
"""Up to this vocabulary every state may emit every word: such models learn more from a text than a bigram knows."""
FEW_TOKENS = 100_000
"""Up to this length a text of many words is best learned from its bigram on."""
TEXT = ("data", "data_folder", "text", "tokenizer")
"""The sections that say which text it is."""


class TextSize(NamedTuple):
    """What the settings follow from, of the training text."""

    words: int
    """Different ones: the size of the vocabulary."""
    tokens: int
    lines: int


def settings_for(text: TextSize, own: Mapping[str, Mapping[str, Any]]) -> Sections:
    """Return the settings for a text, by section, beside the user's own.

    A table in docs/guide/train.md describes the rule.
    """
    model = own.get("model", {})
    if (
        model.get("kind", "scalar") != "scalar"
        or model.get("blocks")
        or "bigram" in own.get("initialization", {}).values()
    ):
        return {}  # the family's defaults
    if text.words <= FEW_WORDS or {"model", "optimizer", "initialization"} & own.keys():
        return dense(text, model.get("num_states"), "initialization" not in own)
    if text.tokens <= FEW_TOKENS:
        blocks = min(text.words, 2048 if text.tokens <= 50_000 else 1536)
        return {
            "model": {"kind": "scalar", "num_states": 2 * blocks, "blocks": blocks},
            "optimizer": {"lr": 0.5},
            "initialization": {"kind": "bigram"},
            "train": {"epochs": 6},
        }
    return {
        "model": {"kind": "neural", "num_states": 4096, "blocks": 128, "hidden": 128, "dropout": 0.5},
        "optimizer": {"lr": 0.006, "weight_decay": 0.1, "max_grad_norm": 5.0},
        "train": {"epochs": max(3, min(10, 3_000_000 // text.tokens))},
    }


def dense(text: TextSize, num_states: int | None, random: bool) -> Sections:
    """Return the settings of a model of two matrices: at most four parameters per token.

    Args:
        num_states: the user's; None: those that follow from the text.
        random: whether it starts from random parameters, of which several are tried.
    """
    states = next((s for s in (512, 256, 128, 64, 32) if s * (s + text.words) <= 4 * text.tokens), 16)
    states = states if num_states is None else num_states
    epochs = max(6, min(30, 500_000 // text.tokens))
    work = epochs * text.tokens * states * (states + 32)
    restarts = 16 if work < 1e9 else 4 if work < 5e10 else 1
    restarts = restarts if random else 1
    return {"model": {"kind": "scalar", "num_states": states}, "train": {"epochs": epochs, "restarts": restarts}}


def names_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dotted names of the settings in the sections that a user gave."""
    names: list[str] = []
    for section in given.keys() & RunConfig.model_fields.keys():
        value = given[section]
        names += [f"{section}.{field}" for field in value] if isinstance(value, Mapping) else [section]
    return tuple(sorted(names))


def complete(config: RunConfig, text: TextSize) -> tuple[RunConfig, str]:
    """Return the configuration with the settings that the user left open, and the line that says which they are."""
    if config.chosen is None:
        return config, ""
    values = config.dump()
    own: dict[str, Any] = {name: values[name] for name in TEXT}
    for name in config.chosen:
        section, _, field = name.partition(".")
        if field:
            own[section] = {**own.get(section, {}), field: values[section][field]}
    rule = settings_for(text, {name: value for name, value in own.items() if name not in TEXT})
    completed = read_config(RunConfig, merge(drop_other_kinds(RunConfig, rule, own), own))
    model, train = completed.model, completed.train
    blocks = f" in {model.blocks_needed:,} blocks" if model.blocks_needed else ""
    restarts = f", {train.restarts} starts" if train.restarts > 1 else ""
    start = f", starting as a {completed.initialization.kind}" if completed.initialization.kind == "bigram" else ""
    line = (
        f"chosen for {text.tokens:,} tokens, {text.words:,} words: {model.kind}, {model.num_states:,} states{blocks}"
        f"{start}, {train.epochs} epochs{restarts}; --model.num-states, --train.epochs and others override"
    )
    alone = settings_for(text, {}).get("model", {})
    if "initialization" in own and (alone["kind"], alone["num_states"]) != (model.kind, model.num_states):
        line += (
            f"\n--init {completed.initialization.kind} changes the model, which is {alone['kind']} of "
            f"{alone['num_states']:,} states without it: compare it with a run of the same --model.kind and "
            "--model.num-states"
        )
    return completed, line
