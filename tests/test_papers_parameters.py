"""Numbers of parameters: of the models of Chiu & Rush 2020, without making them, and of small ones that are made."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.papers_runs import record, results_of

from papers import parameters
from papers.catalogue import STUDIES
from papers.parameters import build_model, count_parameters
from papers.rows import with_times
from papers.settings import configuration
from papers.study import FORWARD, PARAMETERS, StudyRow, StudyRun
from papers.tables import study_table

TABLES = ("chiu2020-table1", "chiu2020-table1-released", "chiu2020-table4-released")
SMALLER = {"PTB, - neural param", "PTB, AWD-LSTM", "WikiText-2, AWD-LSTM"}
"""Rows with fewer parameters than printed; docs/reproduction/chiu2020.md says why."""


def test_numbers_of_parameters_are_those_of_the_paper() -> None:
    rows = [row for study in TABLES for row in STUDIES[study].rows if PARAMETERS in row.paper]
    counts = {row.name: (count_parameters(StudyRun(row, 0)), row.paper[PARAMETERS]) for row in rows}
    assert {name for name, (ours, printed) in counts.items() if ours and ours < 0.95 * printed} == SMALLER
    within = {name: ours / printed for name, (ours, printed) in counts.items() if ours and name not in SMALLER}
    assert len(within) >= 11 and all(0.95 < share < 1.07 for share in within.values()), within
    assert counts["PTB, - neural param"][0] == 2**28 + 2**14 + 10_000 * 128  # emissions are of the block of a word
    assert counts["PTB, KN 5-gram"][0] is None


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("ptb-vl-hmm", {}),
        ("ptb-vl-hmm", {"model.blocks": 0}),
        ("ptb-vl-hmm", {"model.form": "released", "model.block_embeddings": True}),
        ("ptb-vl-hmm", {"model.kind": "uniform", "model.states_per_word": 8}),
        ("ptb-vl-hmm-14-scalar", {}),
        ("ptb-vl-hmm-14-linear", {}),
        ("ptb-awd-lstm", {}),
        ("baseline", {"data": "ptb", "model.kind": "feedforward"}),
    ],
)
def test_parameters_are_counted_as_in_a_model_that_is_made(
    recipe: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"model.num_states": 256} if recipe.startswith("ptb-vl") else {}
    sizes |= {} if recipe.endswith("scalar") else {"model.hidden": 16}
    run = StudyRun(StudyRow(name="a", recipe=recipe, settings={**settings, **sizes}), 0)
    monkeypatch.setitem(parameters.WORDS, "ptb", 307)
    parameters._count.cache_clear()
    made = sum(parameter.numel() for parameter in build_model(configuration(run), 307).parameters())
    assert count_parameters(run) == made > 0
    parameters._count.cache_clear()


def test_vocabularies_that_are_not_known_have_no_number() -> None:
    row = StudyRow(name="a", recipe="lee-table1-scalar")
    assert count_parameters(StudyRun(row, 0)) is None
    assert count_parameters(StudyRun(replace(row, recipe="ngram", settings={"data": "ptb"}), 0)) is None


def test_times_stand_beside_the_rows_of_their_names() -> None:
    released, full = "chiu2020-table4-released", "PTB, VL-HMM (2^14)"
    timed = {"row": full, "metrics": {FORWARD: 0.7512}, "settings": {}}
    trained = record(full, 124.0, 0, "ptb-vl-hmm-14", settings=dict(STUDIES[released].rows[0].settings))
    results = with_times(results_of({released: [trained], "chiu2020-time": [timed]}))
    header, _, line = study_table(STUDIES[released], results[released])
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert (cells["paper ms"], cells["forward ms"]) == ("40", "0.751")
    assert (cells["paper parameters"], cells["parameters"]) == ("7.2M", "7.161M")
