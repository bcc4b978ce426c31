"""The catalogue: entries that are complete, recipes that resolve, and results files that each belong to a study."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hmmlm.config.recipe import load_recipe, recipe_names
from papers.catalogue import STUDIES
from papers.chiu2020_ablations import RELEASED
from papers.commands import command, parts_of
from papers.networks import KINDS
from papers.records import recorded_identity
from papers.renames import commanded, removed_by, translate
from papers.settings import FOLDER, configuration, differences, identity, recipe_settings
from papers.study import BASELINE, CHIU, Bars, Lines, Study, StudyRow, StudyRun
from papers.tables import COLUMNS
from papers.variants import SEEDS, VARIANTS

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "results").glob("*.json"))
RECORDS = [(file.stem, record) for file in RESULTS for record in json.loads(file.read_text())]
KIND, TEACHER, NETWORK = "initialization.kind", "initialization.teacher", "initialization.network"
EMBEDDINGS, NETWORKS = "model.block_embeddings", "lee-lvd-transformer"
FILES = sorted(file.stem for file in FOLDER.glob("*.toml"))


def test_every_results_file_has_a_study() -> None:
    assert RESULTS and {file.stem for file in RESULTS} <= set(STUDIES)


def test_rows_of_drawn_studies_are_declared() -> None:
    drawn = {study.name: {row.name for row in study.rows} for study in STUDIES.values() if study.drawing}
    assert not {
        (study, record["row"]) for study, record in RECORDS if record["row"] not in drawn.get(study, [record["row"]])
    }


def test_rows_have_the_labels_of_their_drawing() -> None:
    for study in STUDIES.values():
        drawn = [row for row in study.rows if row.drawn]
        if isinstance(study.drawing, Lines):
            points = [(row.series, row.style, row.x) for row in drawn]
            assert all(x is not None for _, _, x in points) and len(set(points)) == len(points), study.name
        elif isinstance(study.drawing, Bars):
            bars = [(row.bar or row.name, row.series) for row in drawn]
            assert len(set(bars)) == len(bars), study.name


def test_a_row_without_its_labels_is_refused() -> None:
    lines = Lines("test_perplexity", "perplexity", "states")
    with pytest.raises(ValueError, match="row 'a' needs an x"):
        Study(name="new", title="New", rows=(StudyRow(name="a"),), drawing=lines)
    with pytest.raises(ValueError, match="two rows are named 'a'"):
        Study(name="new", title="New", rows=(StudyRow(name="a"), StudyRow(name="a")))


def test_columns_claims_and_groups_name_what_exists() -> None:
    rows = {(study.name, row.name) for study in STUDIES.values() for row in study.rows}
    for study in STUDIES.values():
        assert set(study.columns) <= set(COLUMNS), study.name
        assert study.runs or study.made_by or study.as_recorded, study.name
        cells = [cell for claim in study.claims for chain in claim.chains.values() for cell in chain]
        assert {(cell.study or study.name, cell.row) for cell in cells} <= rows, study.name
        for claim in study.claims:
            assert all(len(chain) > 1 for chain in claim.chains.values()), claim.text
        if "ratio to scalar" in study.columns:
            baselines = [row.group for row in study.rows if row.is_baseline]
            assert sorted(baselines) == sorted({row.group for row in study.rows}), study.name  # one per group


def test_recipes_of_records_resolve() -> None:
    names = {record["recipe"] for _, record in RECORDS if "recipe" in record}
    scripts = {name for name in names if (ROOT / name).is_file()}  # benchmarks record their path
    for name in names - scripts:
        assert recipe_settings(name), name


def test_recipes_of_the_package_are_what_users_start_from() -> None:
    users = {"default", "demo", "ptb-vl-hmm", "ptb-vl-hmm-12-cpu", "wikitext2-vl-hmm"}
    assert set(recipe_names()) == users
    assert not set(recipe_names()) & {*FILES, *VARIANTS}


@pytest.mark.parametrize("name", FILES)
def test_recipe_files_are_valid_and_explained(name: str) -> None:
    assert load_recipe(FOLDER / f"{name}.toml").model.num_states > 0
    assert (FOLDER / f"{name}.toml").read_text().startswith("# ")


def test_recipes_of_lee2025_have_the_printed_setting() -> None:
    names = [name for name in (*FILES, *VARIANTS) if name.startswith("lee-")]
    for table, count in (("table1", 4), ("table2", 6), ("table3", 7)):
        assert len([name for name in names if name.startswith(f"lee-{table}-")]) == count
    for name in names:
        values = recipe_settings(name)
        batches = [values[f"batches.{key}"] for key in ("kind", "batch_size", "length")]
        assert batches == ["chunks", 200, 64], name
        assert (values["schedule.kind"], values["schedule.warmup"]) == ("cosine", 25_600_000), name
        assert values["train.max_tokens"] == 500_000_000 and values["train.epochs"] > 1000, name
        assert values["train.precision"] == "bf16-mixed", name
    factors = ("transition", "emission", "start")
    rows = [
        tuple(recipe_settings(name)[f"model.factor_{key}"] for key in factors) for name in VARIANTS if "table2" in name
    ]
    assert len(rows) == len(set(rows)) == 6


def test_released_settings_are_those_of_the_recipe() -> None:
    plain, released = recipe_settings("ptb-vl-hmm"), recipe_settings("ptb-vl-hmm-released")
    changed = {name: value for name, value in released.items() if value != plain.get(name)}
    defaults = {"schedule.factor": 4.0, "schedule.patience": 8}  # of a schedule that ptb-vl-hmm does not have
    assert changed == {**RELEASED, **defaults}


def test_tables_of_lee2025_have_the_printed_numbers_and_seeds() -> None:
    printed = [row.paper["test_perplexity"] for row in STUDIES["lee2025-table1"].rows]
    assert sorted(printed) == [348, 357, 540, 711]
    for table, rows in (("table1", 4), ("table2", 6), ("table3", 8)):
        runs = STUDIES[f"lee2025-{table}"].runs
        seeds = [run.seed for run in runs if run.row in STUDIES[f"lee2025-{table}"].rows]
        assert len({run.row.name for run in runs}) == rows
        assert seeds == [seed for seed in SEEDS for _ in range(rows)]  # all rows, then the next seed
    assert [kind.paper for kind in KINDS.values()] == [365, 333, 317, 313]


def test_figures_of_chiu2020_stand_beside_its_own_models() -> None:
    printed = {row.name for study in STUDIES.values() if study.paper == CHIU for row in study.rows if row.paper}
    assert not [name for name in printed if "no dropout" in name or "weight dropout" in name]
    groups = {row.group for row in STUDIES["chiu2020-table3"].rows if row.paper}
    assert groups == {"PTB"} and sum(bool(row.paper) for row in STUDIES["chiu2020-table3"].rows) == 10


def test_the_command_of_a_combination_makes_its_parts_first() -> None:
    run = next(run for run in STUDIES["record"].runs if run.row.name == "PTB, pure HMM, union of 2")
    first, second, join, evaluate = command(run).split(" && ")
    assert first == f"{command(parts_of(run)[0])} --out parts/1" and "--model.blocks 256" in second
    assert join == "hmmlm join parts/1 parts/2 --out combined"
    assert evaluate == "hmmlm eval combined --data parts/1 --splits valid,test"


def test_runs_are_the_same_if_their_settings_resolve_to_the_same() -> None:
    row = StudyRow(name="a", recipe="lee-base", settings={"train.max_tokens": 50_000_000}, seeds=(1,))
    record = {"row": "a", "recipe": "lee-base", "seed": 1, "settings": {"train.max_tokens": "50000000"}}
    spelled_out = {"model.num_states": 512, "optimizer.lr": 0.1, "data": "/a/folder", "tokenizer.file": "b/my.model"}
    for more in ({}, spelled_out, {"data_folder": "/c", "train.device": "cpu"}):
        made = {**record, "settings": {**record["settings"], **more}}  # type: ignore[dict-item]
        assert recorded_identity(made) == identity(StudyRun(row, 1)) and differences(made, row) == {}
    for more in ({"model.num_states": 256}, {"data": "ptb"}, {"train.max_tokens": 10}, {"initialization.kind": "none"}):
        other = {**record, "settings": {**record["settings"], **more}}  # type: ignore[dict-item]
        same = recorded_identity(other) == identity(StudyRun(row, 1))
        assert same == ("initialization.kind" in more)  # which is the default
        assert set(differences(other, row)) == (set() if same else set(more))
    assert recorded_identity({**record, "seed": 2}) != identity(StudyRun(row, 1))
    assert identity(StudyRun(replace(row, name="b"), 1)) != identity(StudyRun(row, 1))


def test_settings_of_a_command_are_those_of_its_run() -> None:
    line = "hmmlm baseline --recipe ptb-awd-lstm --train.seed 3 --out runs/teacher && hmmlm train --recipe ptb-vl-hmm "
    line += "--no-batches.shuffle --model.neural --train.no-tensorboard --optimizer.betas '[0.9,0.95]' && hmmlm mix a"
    flags = {"batches.shuffle": False, "model.neural": True, "train.tensorboard": False}
    assert list(commanded(line)) == [
        ("ptb-awd-lstm", {"train.seed": "3"}),
        ("ptb-vl-hmm", {**flags, "optimizer.betas": "[0.9,0.95]"}),
    ]


def test_methods_that_were_removed_are_told_from_those_that_were_not() -> None:
    transfer = {
        "row": "a",
        "recipe": "lee-lvd-transformer",
        "commit": "8ad94a17777777",
        "settings": {NETWORK: "pretrained"},
    }
    assert removed_by(transfer) == "616d6b9" and removed_by({**transfer, "commit": "669887f"}) == ""
    assert removed_by({**transfer, "settings": {NETWORK: "random"}}) == ""
    assert removed_by({**transfer, "settings": {NETWORK: "random"}, "commit": "e39b7df"}) == "eb0fb72"


@pytest.mark.parametrize(
    ("recipe", "old", "new"),
    [
        ("ptb-vl-hmm", {"model.structure": "uniform", "model.blocks": 64}, {"model.kind": "uniform"}),
        ("ptb-vl-hmm", {"model.structure": "none"}, {"model.blocks": 0}),
        ("ptb-vl-hmm", {"model.structure": "brown", "model.blocks": 64}, {"model.blocks": 64}),
        ("ptb-vl-hmm", {"model.form": "code", "model.factored": True}, {"model.form": "released", EMBEDDINGS: True}),
        ("lee-figure2", {"model.parameterization": "transformer"}, {"model.kind": "transformer"}),
        ("lee-baum-welch", {"optimizer.baum_welch.step": 0.3}, {"optimizer.step": 0.3}),
        ("lee-base", {"schedule.warmup_tokens": 10}, {"schedule.warmup": 10}),
        ("lee-base", {"schedule.warmup_fraction": 0.1}, {"schedule.warmup": 0.1}),
        ("lee-lvd-scalar", {KIND: "none", TEACHER: None, "initialization.tokens": 5}, {KIND: "none"}),
        (NETWORKS, {NETWORK: "pretrained", TEACHER: "a"}, {"model.weights": "all", "model.teacher": "a", TEACHER: "a"}),
        (
            NETWORKS,
            {NETWORK: "random", KIND: "none", TEACHER: "a", "initialization.alike": 1.0},
            {"model.weights": "random", KIND: "none", "model.teacher": "a", "model.max_initial_similarity": 1.0},
        ),
        (BASELINE, {"length": 64, "rate": 0.1}, {"model.negatives": 0, "batches.length": 64, "optimizer.lr": 0.1}),
    ],
)
def test_settings_of_old_records_are_translated(recipe: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    recorded = [translate({"row": "a", "recipe": recipe, "settings": settings}) for settings in (old, new)]
    assert recorded == [(recipe, new)] * 2


def test_settings_that_another_kind_lacks_are_dropped() -> None:
    row = StudyRow(name="a", recipe="lee-lvd-scalar", settings={"initialization.kind": "none"}, seeds=(7,))
    assert configuration(StudyRun(row, 7)).dump()["initialization"] == {"kind": "none"}
    assert "--initialization.teacher" not in command(StudyRun(row, 7))
    uniform = replace(row, recipe="ptb-vl-hmm", settings={"model.kind": "uniform"})
    model = configuration(StudyRun(uniform, 7)).dump()["model"]
    assert (model["num_states"], model["dropout"]) == (32768, 0.5) and "blocks" not in model


def test_a_variant_is_its_recipe_with_its_settings() -> None:
    row = StudyRow(name="a", recipe="lee-scalar-tuned", settings={"model.num_states": 16}, seeds=(7,))
    values = configuration(StudyRun(row, 7)).dump()
    assert (values["optimizer"]["lr"], values["optimizer"]["weight_decay"]) == (0.3, 0.0)
    assert (values["model"]["num_states"], values["train"]["seed"]) == (16, 7)
    start = "hmmlm train --config papers/recipes/lee-table1-scalar.toml --optimizer.lr 0.3"
    assert command(StudyRun(row, 7)).startswith(start)
    in_package = replace(row, recipe="ptb-vl-hmm", settings={"model.num_states": 256})
    assert command(StudyRun(in_package, 7)) == "hmmlm train --recipe ptb-vl-hmm --model.num-states 256 --train.seed 7"
