"""The settings that follow from a text: what `hmmlm train` chooses where neither the user nor a recipe does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hmmlm.config.recipe import merge
from hmmlm.config.run import RunConfig
from hmmlm.config.training import drop_other_kinds, read_config
from hmmlm.terminal import counted

Sections = dict[str, dict[str, Any]]
FEW_WORDS = 500
"""Up to this vocabulary every state may emit every word: such models learn more from a text than a bigram knows."""
FEW_TOKENS = 100_000
"""Up to this length a text of many words is best learned from its bigram on."""
BLOCKS = 1536
TEXT = ("data", "data_folder", "text", "tokenizer")
"""The sections that say which text it is."""


class TextSize(NamedTuple):
    """What the settings follow from, of the training text."""

    words: int
    """Different ones: the size of the vocabulary."""
    tokens: int
    lines: int


def settings_for(text: TextSize, own: Mapping[str, Mapping[str, Any]]) -> Sections:
    """Return the settings for a text, by section, beside the user's own (the table in docs/guide/train.md)."""
    model = own.get("model", {})
    if model.get("kind", "scalar") != "scalar" or model.get("blocks"):
        return {}  # the family's defaults
    if text.words <= FEW_WORDS or {"model", "optimizer", "initialization", "labels"} & own.keys():
        # At most four parameters per token; small models are started from several seeds, which takes them seconds.
        sizes = (s for s in (512, 256, 128, 64, 32) if s * (s + text.words) <= 4 * text.tokens)
        states = model.get("num_states") or next(sizes, 16)
        epochs = max(6, min(30, 500_000 // max(1, text.tokens)))
        work = epochs * text.tokens * states * (states + 32)
        restarts = 1 if work > 5e10 or {"initialization", "labels"} & own.keys() else 4 if work > 1e9 else 16
        return {"model": {"kind": "scalar", "num_states": states}, "train": {"epochs": epochs, "restarts": restarts}}
    # A block for every word is worth it in longer texts too.
    if text.tokens <= FEW_TOKENS or (text.words <= BLOCKS and text.tokens <= 5 * FEW_TOKENS):
        width = 2 if text.words <= 2 * BLOCKS else 1  # rather than blocks of several words
        blocks = min(text.words, 4096 if width == 1 else 2048 if text.tokens <= FEW_TOKENS // 2 else BLOCKS)
        return {
            "model": {"kind": "scalar", "num_states": width * blocks, "blocks": blocks},
            "optimizer": {"lr": 0.5},
            "initialization": {"kind": "bigram"},
            "train": {"epochs": max(3, min(6, 1_000_000 // max(1, text.tokens)))},
        }
    return {
        "model": {"kind": "neural", "num_states": 4096, "blocks": 128, "hidden": 128, "dropout": 0.5},
        "optimizer": {"lr": 0.006, "weight_decay": 0.1, "max_grad_norm": 5.0},
        "train": {"epochs": max(3, min(10, 3_000_000 // text.tokens))},
    }


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
        own[section] = {**own.get(section, {}), field: values[section][field]} if field else values[section]
    rule = settings_for(text, {name: value for name, value in own.items() if name not in TEXT})
    completed = read_config(RunConfig, merge(drop_other_kinds(RunConfig, rule, own), own))
    model, train, start = completed.model, completed.train, completed.initialization.kind
    blocks = f" in {model.blocks_needed:,} blocks" if model.blocks_needed else ""
    length = counted(train.epochs, "epoch") if train.epochs else counted(train.max_tokens or 0, "token")
    starts = f", {train.restarts} starts" if train.restarts > 1 else " from a bigram" if start == "bigram" else ""
    line = (
        f"chosen for {counted(text.tokens, 'token')}, {counted(text.words, 'word')}: {model.kind}, "
        f"{model.num_states:,} states{blocks}, {length}{starts}; "
        "--model.num-states, --train.epochs and others override"
    )
    alone = settings_for(text, {})["model"]
    if "initialization" in own and alone != {"kind": model.kind, "num_states": model.num_states}:
        line += (
            f"\n--init {start} changes the model, which is {alone['kind']} of {alone['num_states']:,} states without "
            "it: compare it with a run of the same --model.kind and --model.num-states"
        )
    return completed, line
