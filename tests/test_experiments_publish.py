"""Documentation from results: seeds gathered, ratios, order, tokens, notes; whatever is missing or unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from hmmlm.errors import InputError
from hmmlm.experiments import publish
from hmmlm.experiments.catalogue import STUDIES
from hmmlm.experiments.catalogue.initialization import APART
from hmmlm.experiments.figures import DRAWINGS, bars, draw, lines, number
from hmmlm.experiments.networks_table import networks_table, one_rate_table
from hmmlm.experiments.summary import order_sentences, ratio, rows_of

README = "before\n<!-- results -->\nold\n<!-- /results -->\nafter\n"


def record(row: str, test: float, seed: int = 42, recipe: str = "lee-base", **more: Any) -> dict[str, Any]:
    """A made-up run; keywords are metrics, but for settings and what records have beside metrics."""
    beside = {key: more.pop(key) for key in ("settings", "note", "machine", "commit", "date") if key in more}
    metrics = {"test_perplexity": test, "valid_perplexity": test + 1, **more}
    return {"row": row, "recipe": recipe, "seed": seed, "settings": {}, "metrics": metrics, **beside}


def cells(name: str, records: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The table of a study: by row, then by column."""
    header, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in publish.table(name, rows_of(name, records))
    ]
    return {line[0]: dict(zip(header[1:], line[1:], strict=True)) for line in lines}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs").mkdir()
    marks = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in ("networks", "one rate"))
    (tmp_path / "docs" / "lee2025.md").write_text(f"above\n{marks}below\n")
    (tmp_path / "results").mkdir()
    return tmp_path


def write(repository: Path, study: str, records: Any) -> None:
    (repository / "results" / f"{study}.json").write_text(json.dumps(records))


def page(repository: Path) -> str:
    publish.main()
    return (repository / "docs" / "results.md").read_text()


def test_seeds_are_one_line_with_ratios_to_the_scalar_row() -> None:
    records = [
        *(record("HMM, scalar", test, seed, "lee-table1-scalar") for seed, test in ((42, 490), (52, 500), (62, 540))),
        *(record("Ablation B (split H)", test, seed) for seed, test in ((42, 300.0), (52, 306.0))),
        record("Chiu and Rush", 255.0, 42, "lee-table1-mlp"),
    ]  # fmt: skip
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
    def found(*records: dict[str, Any]) -> list[float | None]:
        rows = rows_of("lee2025-tuned", records)
        return [ratio(row, rows)[0] for row in rows]

    names = ("512 states, scalar, tuned", "512 states, ablation B", "4096 states, scalar, tuned",
             "4096 states, ablation B")  # fmt: skip
    assert found(*map(record, names, (300.0, 270.0, 250.0, 200.0))) == [1, 0.9, 1, 0.8]
    assert found(record(names[0], 300.0, tokens=5e8), record(names[1], 270.0, tokens=1e8)) == [1, None]
    # scalar with distillation is not what others are compared with; a row without a number of states has 512
    rows = rows_of("lee2025-figure4", [
        record("scalar, LVD", 100.0, recipe="lee-table1-scalar"),
        record("scalar, no LVD", 400.0, recipe="lee-table1-scalar"),
        record("512 states, MLP-ψ, 2^22 parameters, LVD", 300.0)])  # fmt: skip
    assert [ratio(row, rows)[0] for row in rows] == [1, 0.25, 0.75]


def test_tokens_and_passes_and_what_the_recipe_asked_for() -> None:
    short = {"train.max_tokens": "100000000"}
    table = cells("lee2025-table1", [
        record("HMM, scalar", 500.0, tokens=500_006_400, epochs=4.17),
        record("Chiu and Rush", 500.0, tokens=100_006_400, epochs=2.0, settings=short),
        record("Ablation B (split H)", 500.0, tokens=80_000_000, epochs=1.0), record("Ablation A (single H)", 500.0)])
    assert table["HMM, scalar"]["tokens"] == "500M, 4.17 passes"
    assert table["Chiu and Rush"]["tokens"] == "100M of 500M, 2 passes"
    assert table["Ablation B (split H)"]["tokens"] == "80M of 500M, 1 pass"
    assert table["Ablation A (single H)"]["tokens"] == ""


def test_runs_of_a_row_with_other_settings_are_another_row_and_say_so() -> None:
    where = {"data": "/somewhere/on/a/machine/corpus", "tokenizer.file": "/elsewhere/llama.model"}
    told = {"train.max_tokens": "500000000", "optimizer.weight_decay": "0.10", "train.seed": 42}  # as in the recipe
    rows = rows_of("lee2025-table1", [
        record("HMM, scalar", 510.0, 52, settings={"optimizer.rate": 0.2, **where}),
        record("HMM, scalar", 500.0, 42, settings={**where, **told}),
        record("HMM, scalar", 520.0, 62, settings={**where, "tokenizer.file": "llama.model"}),
    ])  # fmt: skip
    assert [[run["seed"] for run in row.records] for row in rows] == [[42, 62], [52]]
    text = "\n".join([*publish.table("lee2025-table1", rows), *publish.remarks(rows, rows[0].records)])
    assert "| HMM, scalar |" in text and "| HMM, scalar (rate 0.2) |" in text
    assert "All rows: tokenizer.file llama.model." in text and "somewhere" not in text and "corpus" not in text


def test_settings_of_distillation_are_said_once_of_the_rows_that_have_it() -> None:
    lvd = {"initialization.tokens": 5_000_000, "initialization.kmeans.tokens": 5_000_000}
    records = [
        record("no LVD", 400.0, recipe="lee-lvd-scalar", settings=dict(STUDIES["lee2025-figure3"][0].settings)),
        *(record(row, 300.0, recipe="lee-lvd-scalar", settings=lvd) for row in ("stories15M", "SmolLM2-135M")),
    ]  # fmt: skip
    once = "All rows with LVD: initialization.kmeans.tokens 5M, initialization.tokens 5M.\n"
    rows = rows_of("lee2025-figure3", records)
    assert publish.remarks(rows, records) == [once]
    assert [publish.differing(row, rows) for row in rows] == ["", "", ""]
    records[1]["settings"] = {**lvd, "initialization.kmeans.tokens": 10_000_000}  # as the recipe has it
    rows = rows_of("lee2025-figure3", records)
    assert publish.remarks(rows, records) == ["All rows with LVD: initialization.tokens 5M.\n"]
    assert [publish.differing(row, rows) for row in rows] == ["", "", " (kmeans.tokens 5M)"]


def test_baum_welch_is_no_baseline() -> None:
    rows = rows_of("lee2025-figure4", [
        record("scalar, no LVD", 400.0, recipe="lee-table1-scalar"),
        record("scalar, Baum-Welch, no LVD", 200.0, recipe="lee-baum-welch"),
    ])  # fmt: skip
    assert [ratio(row, rows)[0] for row in rows] == [1.0, 0.5]


def test_order_of_rows_against_the_paper() -> None:
    def sentences(study: str, **tests: float) -> list[str]:
        names = {"a": "a factored", "b": "b factored", "ab": "a, b factored", "none": "nothing factored"}
        return order_sentences(rows_of(study, [record(names.get(k, k), test) for k, test in tests.items()]))

    assert sentences("lee2025-table2", a=800.0, b=350.0, none=600.0) == [
        "Order by test perplexity: as in the paper for 3 of 3 pairs of rows."]
    assert sentences("lee2025-table2", b=340.0, ab=345.5) == [
        "Order by test perplexity: as in the paper for 0 of 1 pair of rows; "
        "not for “a, b factored” and “b factored” (paper 338 and 345, here 345.5 and 340.0)."]  # fmt: skip
    assert sentences("lee2025-table2", a=800.0) == sentences("lee2025-figure3", a=1.0, b=2.0) == []
    # rows of different texts are not compared: each text has its own pair
    both = order_sentences(rows_of("chiu2020-table1", [
        record("PTB, VL-HMM 2^15", 300.0), record("WikiText-2, VL-HMM 2^15", 100.0), record("PTB, KN 5-gram", 400.0)]))
    assert both == ["Order by test perplexity: as in the paper for 1 of 1 pair of rows."]


def test_missing_metrics_and_unknown_rows_recipes_and_studies(repository: Path) -> None:
    write(repository, "lee2025-table1", [
        {"row": "HMM, scalar", "metrics": {}},
        {"row": "of another | kind <eos>", "recipe": "gone",
         "metrics": {"valid_perplexity": None, "test_perplexity": 7}},
        record("Chiu and Rush", float("inf")),
    ])  # fmt: skip
    write(repository, "lee2025-throughput", [
        {"row": "here", "metrics": {"tokens_per_second": 9e6, "times_other": 3.5}}])
    write(repository, "nobody-knows", [
        record("a row", 5.0, 3, machine="abacus", commit="0123456789", date="2026-01-02")])
    write(repository, "nothing-yet", [])
    text = page(repository)
    assert "| of another \\| kind &lt;eos> |" in text and "| 7.0 |" in text
    assert "Not run yet: 2 of 4 rows." in text
    assert "|  | tokens a second | times other |\n|---|---|---|\n| here | 9,000,000 | 3.5 |" in text
    assert "nothing-yet" not in text
    assert "## nobody-knows" in text and "Made on abacus; commit 0123456; 2026-01-02." in text
    assert (repository / "docs/figures/lee2025-table1.png").exists()  # what is known and finite
    assert draw("lee2025-table1", rows_of("lee2025-table1", [{"row": "HMM, scalar", "metrics": {}}])) is None
    assert draw("nobody-knows", rows_of("nobody-knows", [record("a row", 5.0)])) is None


def test_notes_machines_commits_and_dates_once() -> None:
    made = {"machine": "abacus, torch 2", "commit": "0123456789", "date": "2026-01-02", "note": "slow beads."}
    records = [
        record("x", 1.0, 1, **made), record("x", 2.0, 2, **made), record("y", 3.0, **{**made, "commit": "0123456"}),
        record("z", 4.0, note="new beads"),
    ]  # fmt: skip
    remarks = publish.remarks(rows_of("unknown", records), records)
    assert [line.strip() for line in remarks] == [
        "Notes: slow beads; new beads.", "Made on abacus, torch 2; commit 0123456; 2026-01-02."]


def test_every_study_has_a_title_and_every_figure_is_drawn(repository: Path) -> None:
    assert set(STUDIES) <= set(publish.TITLES)
    for study, runs in STUDIES.items():
        write(repository, study, [
            record(run.row, 100.0 + number % 9, run.seed, run.recipe, settings=run.settings)
            for number, run in enumerate(runs)])  # fmt: skip
    text = page(repository)
    assert {file.stem for file in (repository / "docs" / "figures").iterdir()} == set(DRAWINGS)
    assert all(f"(figures/{study}.png)" in text for study in DRAWINGS)
    assert "Not run yet" not in text and "The paper prints no figures" in text
    readme = (repository / "README.md").read_text()
    shown = [line for line in readme.splitlines() if line.startswith("**")]
    assert shown == [f"**{publish.TITLES[study]}**" for study in publish.README_STUDIES]
    assert readme.startswith("before") and readme.endswith("after\n") and "old" not in readme
    lee = (repository / "docs" / "lee2025.md").read_text()
    assert lee.startswith("above") and lee.endswith("below\n") and "old" not in lee
    best, same = lee.split("<!-- one rate -->")
    assert best.count("further apart") == len(APART) + 1
    assert "| stories15M | as far apart as words | 0.003 |" in same  # of runs of two studies


@pytest.mark.parametrize("study", sorted(DRAWINGS))
def test_figures_have_every_row(study: str) -> None:
    runs = [run for run in STUDIES[study] if study != "lee2025-apart" or "LVD" not in run.row]  # those are not drawn
    rows = rows_of(study, [record(run.row, 100.0, run.seed) for run in runs])
    figure = draw(study, rows)
    assert figure is not None
    (axes,) = figure.axes
    bars_drawn = sum(len(bars) for bars in axes.containers)
    points = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() not in "x|")
    printed = sum("test_perplexity" in row.paper or "valid_perplexity" in row.paper for row in rows)
    assert bars_drawn == len(rows) + printed or points == len(rows)


def test_networks_are_told_at_the_rate_that_the_first_seed_chooses() -> None:
    def run(row: str, rate: float, test: float, seed: int = 42) -> dict[str, Any]:
        return record(row, test, seed, "lee-lvd-transformer", settings={"optimizer.rate": rate})

    cells = networks_table({
        "lee2025-table4": [run("stories15M, random", 0.001, 340.0), run("stories15M, random", 0.001, 350.0, 52)],
        "lee2025-figure6": [run("pretrained, rate 0.001", 0.001, 300.0), run("pretrained, rate 0.003", 0.003, 310.0)],
        "lee2025-apart": [
            run("stories15M, pretrained, LVD, rate 0.001", 0.001, 270.0),
            run("stories15M, pretrained, LVD, rate 0.003", 0.003, 260.0),
            run("stories15M, pretrained, LVD, rate 0.003", 0.003, 290.0, 62),  # the mean is worse, the first is not
            run("stories15M, pretrained as it comes, LVD, rate 0.001", 0.001, 265.0),
            run("stories15M, random, rate 0.003", 0.003, 280.0),
        ],
        "lee2025-table4-cpu": [run("stories15M, random, rate 0.01", 0.01, 250.0)],
    })  # fmt: skip
    assert publish.markdown(cells)[2:] == [
        "| TinyLlama-1.1B, the paper's figures |  | 365 | 333 | 317 | 313 |",
        "| own decoder | as far apart as words |  | 300.0 (0.001; 1) |  |  |",
        "| stories15M | as far apart as words | 345.0 (0.001; 2) |  |  |  |",
        "| stories15M | further apart, sizes as they come | 280.0 (0.003; 1) |  |  | 265.0 (0.001; 1) |",
        "| stories15M | further apart | 280.0 (0.003; 1) |  |  | 275.0 (0.003; 2) |",
        "| stories15M, PTB, 128 states | further apart | 250.0 (0.01; 1) |  |  |  |",
    ]


def test_kinds_are_ordered_at_one_rate_where_all_were_run() -> None:
    def run(kind: str, rate: float, test: float, seed: int = 42, more: str = "") -> dict[str, Any]:
        settings = {"optimizer.rate": rate}
        return record(f"SmolLM2-135M, {kind}{more}", test, seed, "lee-lvd-transformer", settings=settings)

    trial = ", rate 0.001, 50M tokens"
    cells = one_rate_table({
        "lee2025-table4": [
            run("random", 0.001, 400.0), run("random", 0.001, 100.0, 52), run("random, LVD", 0.001, 350.0)],
        "lee2025-networks": [
            run("pretrained", 0.001, 340.0, more=trial), run("pretrained, LVD", 0.001, 330.0, more=trial),
            run("pretrained", 0.001, 900.0, more=", rate 0.001, 10M tokens")],
        "lee2025-apart": [run(kind, 0.003, 300.0, more=", rate 0.003") for kind in ("random", "pretrained")],
    })  # fmt: skip
    assert cells[1:] == [
        ["SmolLM2-135M", "as far apart as words", "0.001", "400.0", "340.0", "350.0", "330.0", "5 of 6"]
    ]


def test_runs_that_were_stopped_are_said_and_their_rate_is_not_chosen() -> None:
    def run(rate: float, test: float | None, seed: int = 42) -> dict[str, Any]:
        row, settings = f"stories15M, random, rate {rate:g}", {"optimizer.rate": rate}
        made = record(row, test or 0.0, seed, "lee-lvd-transformer", settings=settings)
        return made if test else {**made, "metrics": {}, "stopped": "NaN in step 7"}

    records = [run(0.001, 300.0), run(0.003, 250.0), run(0.003, None, 52), run(0.01, None)]
    seeds = {row: line["seeds"] for row, line in cells("lee2025-apart", records).items()}
    assert seeds == {
        "stories15M, random, rate 0.001": "seed 42", "stories15M, random, rate 0.003": "2 seeds, 1 stopped",
        "stories15M, random, rate 0.01": "seed 42, 1 stopped",
    }  # fmt: skip
    assert "Stopped, because they failed to train: NaN in step 7.\n" in publish.remarks([], records)
    assert networks_table({"lee2025-apart": records})[-1][2] == "300.0 (0.001; 1)"
    assert networks_table({"lee2025-apart": records[-1:]})[-1][2] == "stopped (0.01; 1)"
    untested = {**run(0.0001, 1.0), "metrics": {"valid_perplexity": 200.0}}
    assert networks_table({"lee2025-apart": [untested, *records]})[-1][2] == "300.0 (0.001; 1)"


def test_bars_carry_their_numbers_and_whiskers() -> None:
    series = {"here": {"a": (9, 10, 12), "b": (5, 5, 5)}, "the paper": {"b": (7, 7, 7)}}
    (axes,) = bars(["a", "b"], series, "perplexity").axes
    assert [text.get_text() for text in axes.texts] == ["10.0", "5.0", "7"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[9, 12]]  # one seed has none
    assert axes.get_xlim()[0] == 0 and axes.get_xlabel() == "perplexity"


def test_lines_are_sorted_by_x_with_what_the_paper_prints() -> None:
    ticks = {2.0: "two", 4.0: "four"}
    series = {"here": {4.0: (1, 2, 3), 2.0: (5, 5, 5)}, "there": {4.0: (7, 7, 7)}}
    (axes,) = lines(series, {"here": {4.0: 2.5}}, ticks, "states", "perplexity").axes
    ours, paper, *_ = axes.lines
    assert list(ours.get_xdata()) == [2, 4] and list(ours.get_ydata()) == [5, 2]
    assert list(paper.get_xdata()) == [4] and list(paper.get_ydata()) == [2.5]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["two", "four"]
    assert [number(text) for text in ("2^14", "0.1M", "0.003", "1e-05")] == [16384, 100_000, 0.003, 1e-05]


def test_paired_lines_share_colours_and_dashes() -> None:
    point = {1.0: (1, 1, 1), 10.0: (9, 9, 9)}
    names = ("a, random", "a, pretrained", "b, random", "b, pretrained")
    (axes,) = lines(dict.fromkeys(names, point), {}, {1.0: "", 10.0: ""}, "rate", "perplexity", True, 5.0).axes
    looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines if line.get_label() in names]
    assert looks[0][0] == looks[1][0] != looks[2][0] == looks[3][0]
    assert looks[0][1] == looks[2][1] != looks[1][1] == looks[3][1]
    assert axes.get_ylim()[1] == 5


def test_what_cannot_be_published_is_said_in_a_line(repository: Path) -> None:
    with pytest.raises(InputError, match=r"no results in .*: run this in the root"):
        publish.main()
    write(repository, "odd", {"row": "not a list"})
    with pytest.raises(InputError, match=r"odd.json: not a list of runs"):
        publish.main()
    (repository / "results" / "odd.json").write_text("{")
    with pytest.raises(InputError, match=r"odd.json: not JSON"):
        publish.main()
    write(repository, "odd", [record("x", 1.0)])
    (repository / "README.md").write_text("nothing here")
    with pytest.raises(InputError, match=r"README.md: no lines <!-- results -->"):
        publish.main()
    assert (repository / "README.md").read_text() == "nothing here"
