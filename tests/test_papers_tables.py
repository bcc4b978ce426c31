"""Tables of studies: seeds gathered, ratios, tokens, settings that differ, order of rows, remarks."""

from typing import Any

from helpers.papers_runs import cells, record, rows_of

from papers.catalogue import STUDIES
from papers.rows import ratios
from papers.tables import order_sentences, own_overrides, remarks, study_table


def test_seeds_are_one_line_with_ratios_to_the_scalar_row() -> None:
    records = [
        *(record("HMM, scalar", test, seed, "lee-table1-scalar") for seed, test in ((42, 490), (52, 500), (62, 540))),
        *(record("Ablation B (split H)", test, seed) for seed, test in ((42, 300.0), (52, 306.0))),
        record("Chiu and Rush", 255.0, 42, "lee-table1-mlp"),
    ]
    table = cells("lee2025-table1", records)
    assert list(table) == ["Ablation B (split H)", "HMM, scalar", "Chiu and Rush"]  # the catalogue's order
    scalar, linear, network = table["HMM, scalar"], table["Ablation B (split H)"], table["Chiu and Rush"]
    assert scalar["test, min / mean / max"] == "490.0 / 510.0 / 540.0"
    assert (scalar["valid"], scalar["seeds"], scalar["ratio to scalar"]) == ("511.0", "3 seeds", "1.00")
    assert linear["test, min / mean / max"] == "300.0 / 303.0 / 306.0" and linear["seeds"] == "2 seeds"
    assert (linear["ratio to scalar"], linear["paper's ratio"]) == ("0.59", "0.64")  # 303 / 510, 348 / 540
    assert (network["test, min / mean / max"], network["seeds"]) == ("255.0", "seed 42")
    assert network["paper test"] == "357"


def test_ratios_are_within_a_number_of_states_and_a_length() -> None:
    def found(study: str, *records: dict[str, Any]) -> list[float | None]:
        rows = rows_of(study, list(records))
        return [ratios(row, rows)[0] for row in rows]

    names = (
        "512 states, scalar, tuned",
        "512 states, ablation B",
        "4096 states, scalar, tuned",
        "4096 states, ablation B",
    )
    assert found("lee2025-tuned", *map(record, names, (300.0, 270.0, 250.0, 200.0))) == [1, 0.9, 1, 0.8]
    longer, shorter = record(names[0], 300.0, tokens=5e8), record(names[1], 270.0, tokens=1e8)
    assert found("lee2025-tuned", longer, shorter) == [1, None]
    # neither scalar with distillation nor Baum-Welch is what others are compared with
    rows = (
        record("scalar, LVD", 100.0),
        record("scalar, no LVD", 400.0),
        record("scalar, Baum-Welch, no LVD", 200.0),
        record("512 states, MLP-ψ, 2^22 parameters, LVD", 300.0),
    )
    assert found("lee2025-figure4", *rows) == [1, 0.25, 0.5, 0.75]


def test_tokens_and_passes_and_those_of_the_recipe() -> None:
    short = {"train.max_tokens": "100000000"}
    table = cells(
        "lee2025-table1",
        [
            record("HMM, scalar", 500.0, tokens=500_006_400, epochs=4.17),
            record("Chiu and Rush", 500.0, tokens=100_006_400, epochs=2.0, settings=short),
            record("Ablation B (split H)", 500.0, tokens=80_000_000, epochs=1.0),
            record("Ablation A (single H)", 500.0),
        ],
    )
    assert table["HMM, scalar"]["tokens"] == "500M, 4.17 passes"
    assert table["Chiu and Rush"]["tokens"] == "100M of 500M, 2 passes"
    assert table["Ablation B (split H)"]["tokens"] == "80M of 500M, 1 pass"
    assert table["Ablation A (single H)"]["tokens"] == ""
    figure = cells("chiu2020-figure3", [record("PTB, 2^10 states", 200.0, 0, tokens=7_436_712, epochs=8.0)])
    assert figure["PTB, 2^10 states"]["tokens"] == "7.44M, 8 of 30 passes"


def test_runs_of_a_row_with_other_settings_are_another_row() -> None:
    where = {"data": "/somewhere/on/a/machine/corpus", "tokenizer.file": "/elsewhere/llama.model"}
    same = {"train.max_tokens": "500000000", "optimizer.weight_decay": "0.10", "train.seed": 42}  # as in the recipe
    records = [
        record("HMM, scalar", 510.0, 52, "lee-table1-scalar", settings={"model.num_states": 256, **where}),
        record("HMM, scalar", 500.0, 42, "lee-table1-scalar", settings={**where, **same}),
        record("HMM, scalar", 520.0, 62, "lee-table1-scalar", settings={**where, "tokenizer.file": "llama.model"}),
    ]
    rows = rows_of("lee2025-table1", records)
    assert [[run["seed"] for run in row.records] for row in rows] == [[42, 62], [52]]
    text = "\n".join([*study_table(STUDIES["lee2025-table1"], rows), *remarks(rows, rows[0].records)])
    assert "| HMM, scalar |" in text and "| HMM, scalar (num_states 256) |" in text
    assert "llama" not in text and "somewhere" not in text and "corpus" not in text  # where a run finds its text


def test_settings_of_distillation_are_stated_once_for_the_rows_that_have_it() -> None:
    plans = {row.name: row for row in STUDIES["lee2025-figure3"].rows}

    def made(row: str, **more: int) -> dict[str, Any]:
        settings = {**plans[row].settings, **{f"initialization.{name}": value for name, value in more.items()}}
        return record(row, 300.0, recipe="lee-lvd-scalar", settings=settings)

    records = [made("no LVD"), *(made(row, tokens=2_000_000) for row in ("stories15M", "SmolLM2-135M"))]
    rows = rows_of("lee2025-figure3", records)
    assert remarks(rows, records) == ["All rows with LVD: initialization.tokens 2M."]
    assert [own_overrides(row, rows) for row in rows] == ["", "", ""]
    records[1] = made("stories15M")
    rows = rows_of("lee2025-figure3", records)
    assert remarks(rows, records) == []
    assert [own_overrides(row, rows) for row in rows] == ["", "", " (initialization.tokens 2M)"]


def test_order_of_rows_against_the_paper() -> None:
    def sentences(study: str, **tests: float) -> list[str]:
        names = {"a": "a factored", "b": "b factored", "ab": "a, b factored", "none": "nothing factored"}
        return order_sentences(rows_of(study, [record(names[key], test) for key, test in tests.items()]))

    assert sentences("lee2025-table2", a=800.0, b=350.0, none=600.0) == [
        "Order by test perplexity: as in the paper for 3 of 3 pairs of rows."
    ]
    assert sentences("lee2025-table2", b=340.0, ab=345.5) == [
        "Order by test perplexity: as in the paper for 0 of 1 pair of rows; "
        "reversed for “a, b factored” and “b factored” (paper 338 and 345, here 345.5 and 340.0)."
    ]
    assert sentences("lee2025-table2", a=800.0) == sentences("lee2025-figure3", a=1.0, b=2.0) == []
    # rows on different texts are not compared: PTB has the only pair
    names = {"PTB, VL-HMM 2^15": 300.0, "WikiText-2, VL-HMM 2^15": 100.0, "PTB, KN 5-gram": 400.0}
    both = order_sentences(rows_of("chiu2020-table1", [record(name, test) for name, test in names.items()]))
    assert both == ["Order by test perplexity: as in the paper for 1 of 1 pair of rows."]


def test_notes_machines_commits_and_dates_once() -> None:
    made = {"machine": "abacus, torch 2", "commit": "0123456789", "date": "2026-01-02", "note": "slow beads."}
    records = [
        record("x", 1.0, 1, **made),
        record("x", 2.0, 2, **made),
        record("y", 3.0, **{**made, "commit": "0123456"}),
        record("z", 4.0, note="new beads"),
    ]
    assert remarks(rows_of("steering", records), records) == [
        "Notes: slow beads; new beads.",
        "Made on abacus, torch 2; commit 0123456; 2026-01-02.",
    ]
    texts = [
        {**run, "settings": {"data_sha256": {"train": digest * 64}}}
        for run, digest in zip(records, "aabb", strict=True)
    ]
    assert remarks(rows_of("steering", texts), texts)[-1].endswith(
        f"2026-01-02; sha256 of train.bin {'a' * 12} and {'b' * 12}."
    )
