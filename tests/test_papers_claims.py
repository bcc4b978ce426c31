"""Verdicts on claims, and the tables of networks over several studies."""

from typing import Any

from helpers.papers_runs import cells, record, results_of

from papers.claims import claims_table
from papers.networks import KINDS, best_rate_table, one_rate_table
from papers.rows import measured_rows
from papers.study import CHIU, TEST, Cell, Claim, Study, StudyRow
from papers.tables import markdown, remarks


def test_networks_are_shown_at_the_rate_that_the_first_seed_chooses() -> None:
    def run(row: str, test: float, seed: int = 42) -> dict[str, Any]:
        return record(row, test, seed, "lee-lvd-transformer")

    table = best_rate_table(
        results_of(
            {
                "lee2025-table4": [run("stories15M, random", 340.0), run("stories15M, random", 350.0, 52)],
                "lee2025-figure6": [run("pretrained, rate 0.001", 300.0), run("pretrained, rate 0.003", 310.0)],
                "lee2025-apart": [
                    run("stories15M, pretrained, LVD, rate 0.001", 270.0),
                    run("stories15M, pretrained, LVD, rate 0.003", 260.0),
                    run("stories15M, pretrained, LVD, rate 0.003", 290.0, 62),  # the mean is worse, the first is not
                    run("stories15M, pretrained as it comes, LVD, rate 0.001", 265.0),
                    run("stories15M, random, rate 0.003", 280.0),
                ],
                "lee2025-table4-cpu": [run("stories15M, random, rate 0.006", 250.0)],
            }
        )
    )
    assert markdown(table)[2:] == [
        "| TinyLlama-1.1B, paper |  | 365 | 333 | 317 | 313 |",
        "| own decoder | like words |  | 300.0 (0.001; 1) |  |  |",
        "| stories15M | like words | 345.0 (0.001; 2) |  |  |  |",
        "| stories15M | spread out, unscaled | 280.0 (0.003; 1) |  |  | 265.0 (0.001; 1) |",
        "| stories15M | spread out | 280.0 (0.003; 1) |  |  | 275.0 (0.003; 2) |",
        "| stories15M, PTB, 128 states | spread out | 250.0 (0.006; 1) |  |  |  |",
    ]


def test_kinds_are_ordered_at_one_rate_where_all_were_run() -> None:
    def run(kind: str, test: float, seed: int = 42, more: str = "") -> dict[str, Any]:
        return record(f"SmolLM2-135M, {kind}{more}", test, seed, "lee-lvd-transformer")

    def tiny(kind: str, test: float) -> dict[str, Any]:
        return record(f"TinyLlama-1.1B, {kind}, rate 0.0001, 50M tokens", test, 42, "lee-lvd-transformer")

    trial = ", rate 0.0003, 50M tokens"
    table = one_rate_table(
        results_of(
            {
                "lee2025-table4": [run("random", 400.0), run("random", 100.0, 52), run("random, LVD", 350.0)],
                "lee2025-networks": [
                    run("pretrained", 340.0, more=trial),
                    run("pretrained, LVD", 330.0, more=trial),
                    run("random", 900.0, more=", rate 0.0003, 10M tokens"),
                    *(tiny(kind, 400.0 - 10 * place) for place, kind in enumerate(KINDS)),
                ],
                "lee2025-apart": [run(kind, 300.0, more=", rate 0.003") for kind in ("random", "pretrained")],
            }
        )
    )
    assert table[1:] == [
        ["SmolLM2-135M", "like words", "0.0003", "400.0", "340.0", "350.0", "330.0", ""],  # not the paper's network
        ["TinyLlama-1.1B", "like words", "0.0001", "400.0", "390.0", "380.0", "370.0", "6 of 6"],
    ]


def test_runs_that_were_stopped_are_stated_and_their_rate_is_not_chosen() -> None:
    def run(rate: float, test: float | None, seed: int = 42) -> dict[str, Any]:
        made = record(f"stories15M, random, rate {rate:g}", test or 0.0, seed, "lee-lvd-transformer")
        return made if test else {**made, "metrics": {}, "stopped": "NaN in step 7"}

    def best(*records: dict[str, Any]) -> str:
        return best_rate_table(results_of({"lee2025-apart": list(records)}))[-1][2]

    records = [run(0.001, 300.0), run(0.003, 250.0), run(0.003, None, 52), run(0.01, None)]
    seeds = {row: line["seeds"] for row, line in cells("lee2025-apart", records).items()}
    assert seeds == {
        "stories15M, random, rate 0.001": "seed 42",
        "stories15M, random, rate 0.003": "2 seeds, 1 stopped",
        "stories15M, random, rate 0.01": "seed 42, 1 stopped",
    }
    assert "Stopped because training failed: NaN in step 7." in remarks([], records)
    assert best(*records) == "300.0 (0.001; 1)"
    assert best(records[-1]) == "stopped (0.01; 1)"
    untested = {**run(0.01, 1.0), "metrics": {"valid_perplexity": 200.0}}
    assert best(untested, *records[:3]) == "300.0 (0.001; 1)"


def test_claims_are_decided_by_the_results() -> None:
    def verdicts(a: float, b: float, c: float | None) -> list[str]:
        known = {"a": a, "b": b, "c": c}
        records = [record(name, value) for name, value in known.items() if value is not None]
        return [line[3] for line in claims_table([study], {"new": measured_rows(study, records)}, CHIU.page)[1:]]

    chain = {"": (Cell("a", "a"), Cell("b", "b"), Cell("c", "c"))}
    study = Study(
        name="new",
        title="New",
        rows=tuple(StudyRow(name=name, paper={TEST: 10.0}) for name in "abc"),
        claims=(
            Claim("order", "ascending", chain),
            Claim("other order", "descending", chain),
            Claim("alike", "similar", chain, tolerance=0.1),
            Claim("as good", "reached", chain, tolerance=0.1),
            Claim("ever less", "diminishing", chain),
        ),
    )
    assert verdicts(10.0, 10.5, 10.9) == ["holds", "does not hold", "holds", "holds", "holds"]
    assert verdicts(10.0, 9.0, 12.0) == [
        "holds for 2 of 3",
        "holds for 1 of 3",
        "does not hold",
        "holds for 2 of 3",
        "does not hold",
    ]
    assert verdicts(10.0, 9.0, None) == [
        "does not hold (2 not run)",
        "holds (2 not run)",
        "not run",
        "holds (1 not run)",
        "not run",
    ]


def test_claims_show_numbers_changes_and_ranges() -> None:
    two = (Cell("a", "first"), Cell("b", "second"))
    ranges = tuple(Cell(name, statistic="range") for name in "ab")
    study = Study(
        name="new",
        title="New",
        rows=(StudyRow(name="a", paper={TEST: 80.0}), StudyRow(name="b")),
        claims=(
            Claim("values", "ascending", {"": two}),
            Claim("change", "ascending", {"by it": two}, show="change"),
            Claim("range", "ascending", {"": ranges}),
        ),
    )
    records = [record("a", 90.0), record("a", 92.0, 52), record("b", 180.0), record("b", 184.0, 52)]
    values, change, spread = claims_table([study], {"new": measured_rows(study, records)}, CHIU.page)[1:]
    assert values[1:] == ["first 80", "first 91.0 / second 182.0", "holds"]
    assert change[1:] == ["no number printed", "by it: -50.0%", "holds"]
    assert spread[1:] == ["no number printed", "2.0 / 4.0", "holds"]
    assert values[0] == "values ([data](results/other.md#new))"
    assert claims_table([study], {}, CHIU.page)[1][0] == "values"  # no page has a section of a study that was not run
