"""The settings that follow from a text, and what overrides them."""

from __future__ import annotations

from typing import Any

import pytest

from hmmlm.config.defaults import TextSize, complete, names_of, settings_for
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config

FEW = TextSize(words=6, tokens=44_000, lines=700)
MANY = TextSize(words=2_000, tokens=40_000, lines=700)
LARGE = TextSize(words=10_000, tokens=2_000_000, lines=70_000)


def completed(text: TextSize, **given: Any) -> RunConfig:
    return complete(read_config(RunConfig, {**given, "chosen": names_of(given)}), text)[0]


@pytest.mark.parametrize("words", [3, 50, 400, 501, 3_000, 50_000])
@pytest.mark.parametrize("tokens", [10, 1_000, 50_000, 100_000, 1_000_000, 10**9])
def test_every_text_has_settings(words: int, tokens: int) -> None:
    config, line = complete(RunConfig(chosen=()), TextSize(words, tokens, tokens // 10))
    assert config.chosen is None
    assert (
        f"chosen for {tokens:,} tokens, {words:,} words: {config.model.kind}, {config.model.num_states:,} sta" in line
    )


def test_the_family_follows_from_words_and_tokens() -> None:
    few, many, large = (completed(text) for text in (FEW, MANY, LARGE))
    assert (few.model.kind, few.model.blocks_needed, few.initialization.kind) == ("scalar", 0, "none")
    assert few.model.num_states * (few.model.num_states + 6) <= 4 * 44_000
    assert (many.model.kind, many.initialization.kind) == ("scalar", "bigram") and many.model.blocks_needed <= 2_000
    assert (large.model.kind, large.model.num_states) == ("neural", 4096)
    characters = completed(TextSize(words=1_100, tokens=110_000, lines=5_000))  # Chinese
    assert (characters.initialization.kind, characters.model.blocks_needed) == ("bigram", 1_100)
    assert large.train.epochs < few.train.epochs  # type: ignore[operator]


def test_what_the_user_chose_stays() -> None:
    config = completed(LARGE, model={"num_states": 2}, train={"epochs": 3, "seed": 7}, data="x.txt")
    assert (config.model.kind, config.model.num_states, config.data) == ("scalar", 2, "x.txt")
    assert (config.train.epochs, config.train.seed) == (3, 7)
    assert completed(MANY, optimizer={"kind": "baum-welch"}).optimizer.kind == "baum-welch"
    assert completed(FEW, model={"kind": "neural"}).model == RunConfig(model={"kind": "neural"}).model  # type: ignore[arg-type]
    fixed = RunConfig(train={"epochs": 2})  # type: ignore[arg-type]
    assert complete(fixed, LARGE) == (fixed, "")


def test_small_models_are_started_several_times_and_large_ones_once() -> None:
    starts = [completed(FEW, model={"num_states": states}).train.restarts for states in (2, 512)]
    assert starts[0] > 4 > starts[1] - 4 and "restarts" not in settings_for(LARGE, {})["train"]
    assert completed(FEW, model={"num_states": 2}, train={"restarts": 1}).train.restarts == 1


def test_a_change_of_the_family_by_an_initialization_is_said() -> None:
    given = {"initialization": {"kind": "lvd", "teacher": "teachers/mine"}}
    config, line = complete(read_config(RunConfig, {**given, "chosen": names_of(given)}), LARGE)
    assert config.model.kind == "scalar" and "--init lvd changes the model, which is neural of 4,096 states" in line
