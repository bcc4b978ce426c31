"""What is particular to old records, which are never rewritten; `hmmlm.config.renames` has the renamed settings.

A record passes through here before it is compared with a plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hmmlm.config.renames import present_names
from papers.study import BASELINE, CHECKSUMS, NGRAM, Record

NO_PENALTIES = {"model.size_penalty": 0.0, "model.change_penalty": 0.0}
"""Settings of LSTMs with weight dropout whose recipes had no penalties; later rows state theirs."""
FIRST_WIKITEXT_LSTM = {
    "model.input_dropout": 0.5,
    "model.layer_dropout": 0.3,
    "model.dropout": 0.5,
    "optimizer.weight_decay": 0.01,
}
"""The same of the first recipe for WikiText-2."""
BEFORE_SCALING = {
    *("4eabadc", "3031fdd", "566599e", "4615998", "e81156e", "290d6ef", "e39b7df", "9be9237", "8ad94a1", "4a86f29"),
    "f7495ec",
}
"""Commits of records whose pretrained networks and words had the scales that they come with."""
REMOVED_METHODS = {
    "616d6b9": BEFORE_SCALING,
    "e55a851": {"4d5c689"},  # words had the scale that their network's output asked for
}
"""By the commit that removed it: the commits of records of transfer with another scale. Today's command transfers the
same weights, scaled."""
OTHER_SIMILARITY = "eb0fb72", "e39b7df"
"""The commit that changed what `model.max_initial_similarity` bounds, and that of the records before."""

TOKENIZER_BY_TEXT = "2026-11-19"
"""Date from which on a text file has a tokenizer by its text; words before."""


def removed_by(record: Record) -> str:
    """Return the commit that removed the method of a record; empty if the present code has it."""
    _, settings = translate(record)
    weights, commit = settings.get("model.weights"), record.get("commit", "")[:7]
    if weights in ("all", "body"):
        return next((removal for removal, commits in REMOVED_METHODS.items() if commit in commits), "")
    return OTHER_SIMILARITY[0] if weights and commit == OTHER_SIMILARITY[1] else ""


def translate(record: Record) -> tuple[str, dict[str, Any]]:
    """Return the recipe of a record and its settings over it, under present names."""
    recipe, command = record.get("recipe"), record.get("command", "")
    settings = {name: value for name, value in record.get("settings", {}).items() if name != CHECKSUMS}
    if command.startswith("hmmlm.baselines.ngram"):
        if recipe == "ptb-vl-hmm":
            return NGRAM, {"data": "ptb"}
        return NGRAM, {"data": "wikitext-2", "reset_at_eos": False}  # as in the recipe that it names
    if (recipe is None or not settings) and " && " not in command:  # runs by hand: the command has everything
        recipe, settings = next(commanded(command), (recipe, settings))
        if recipe == "ptb-vl-hmm-12-cpu" and record.get("commit") == "7e29b5d":
            settings = {"model.num_states": 4096, **settings}  # its number of states then
        if str(settings.get("data")).endswith(".txt") and record.get("date", "") < TOKENIZER_BY_TEXT:
            settings = {"tokenizer.kind": "word", **settings}
    return ("no recipe", settings) if recipe is None else (recipe, present_settings(recipe, settings))


def present_settings(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a record over a recipe of `hmmlm`; present settings do not change."""
    given = dict(settings)
    if recipe == BASELINE or recipe.endswith("-awd-lstm"):
        given = {
            "model.negatives": 0,
            **given,
        }  # on a GPU all words are used, whatever the setting; later rows state it
    if recipe.endswith("-awd-lstm"):
        first = FIRST_WIKITEXT_LSTM if recipe.startswith("wikitext2") else {}
        given = {**NO_PENALTIES, **first, **given}
    structure = given.pop("model.structure", "brown")
    if structure == "uniform":
        given.pop("model.blocks", None)
        given["model.kind"] = "uniform"
    elif structure == "none":
        given["model.blocks"] = 0
    if "initialization.network" in given:  # the network of a teacher is now a model family with a teacher of its own
        given["model.weights"] = given.pop("initialization.network")
        if "initialization.teacher" in given:
            given["model.teacher"] = given["initialization.teacher"]
    named = present_names(given)
    if named.get("initialization.kind") == "none":
        unused = [name for name in named if name.startswith("initialization.") and name != "initialization.kind"]
        named = {name: value for name, value in named.items() if name not in unused}
    return named


def commanded(command: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the recipe and the settings, by their names of then, of every training in a recorded command."""
    for line in command.split(" && "):
        words = shlex.split(line)
        if words[:2] not in (["hmmlm", "train"], ["hmmlm", "baseline"]):
            continue
        settings = {name: value for name, value in _options(words[2:]) if name != "out"}
        yield settings.pop("recipe", BASELINE if words[1] == "baseline" else ""), settings


def _options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command line by dotted name."""
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            switch = name.replace("no_", "", 1) if name.startswith("no_") or ".no_" in name else name
            yield (name, following) if not following.startswith("--") else (switch, switch == name)
