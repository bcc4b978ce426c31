"""The arithmetic of large models: it agrees with models that exist."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.scaling import FLOAT, HIDDEN, RESULTS, STATE, WORDS, factored, normalizer_rate, table
from hmmlm.models.neural import Neural
from hmmlm.structure.blocks import Blocks


def test_parameters_are_those_of_the_models() -> None:
    blocks = Blocks.from_clusters(torch.arange(WORDS) % 4, 64, vocab_size=WORDS)
    neural = Neural(blocks, hidden=HIDDEN, form="printed")
    count = sum(p.numel() for p in neural.parameters())
    assert factored(64, 32, 4, 1).held == pytest.approx(FLOAT * STATE * count, rel=1e-3)


def test_the_rate_predicts_another_measured_step() -> None:
    rows = {row["row"]: row for row in json.loads((RESULTS / "chiu2020-largest.json").read_text())}
    measured = rows["PTB, 2^18 states, one epoch"]["metrics"]["step_ms"]
    assert 1e3 * factored(2**18, 2**16, 128, 1).normalizer / normalizer_rate() == pytest.approx(measured, rel=0.15)


def test_the_table_has_a_line_per_model_and_number_of_gpus() -> None:
    header, rule, *lines = table().splitlines()
    assert len(lines) == len({tuple(line.split(" | ")[:2]) for line in lines}) == 6
    assert {line.count("|") for line in (header, rule, *lines)} == {7}
