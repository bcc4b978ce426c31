"""Pages from results: everything published, whatever is missing or unknown, and a study from its entry alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.papers_runs import DRAWN, record, results_of, rows_of
from matplotlib.figure import Figure

from hmmlm.errors import InputError
from papers.catalogue import STUDIES
from papers.drawing import draw
from papers.listing import list_studies
from papers.numbers import fill, unrecorded
from papers.publish import headline_table, publish
from papers.rows import measured_rows
from papers.study import CHIU, LEE, PARAMETERS, RESULTS_PAGES, TEST, Cell, Claim, Lines, Study, StudyRow
from papers.tables import comparison, escape

PAGES = {"README.md": "results", CHIU.page: "claims", LEE.page: "claims"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for page, name in PAGES.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(f"before\n<!-- {name} -->\nreplaced\n<!-- /{name} -->\nafter\n")
    (tmp_path / "results").mkdir()
    return tmp_path


def write(repository: Path, study: str, records: Any) -> None:
    (repository / "results" / f"{study}.json").write_text(json.dumps(records))


def published(repository: Path, studies: Mapping[str, Study] = STUDIES) -> str:
    """Publish, and return the text of all pages of tables."""
    publish(repository, studies)
    return "\n".join(file.read_text() for file in sorted((repository / RESULTS_PAGES).glob("*.md")))


def test_missing_metrics_and_unknown_rows_and_recipes(repository: Path) -> None:
    unknown = {"row": "of another | kind <eos>", "recipe": "gone", "metrics": {"valid_perplexity": None, TEST: 7}}
    made = {"machine": "abacus", "commit": "0123456789", "date": "2026-01-02"}
    write(
        repository,
        "lee2025-table1",
        [{"row": "HMM, scalar", "metrics": {}}, unknown, record("Chiu and Rush", float("inf"), **made)],
    )
    write(repository, "lee2025-throughput", [{"row": "x", "metrics": {"tokens_per_second": 9e6, "times_other": 3.5}}])
    write(repository, "lee2025-table2", [])
    text = published(repository)
    assert "| of another \\| kind &lt;eos> |" in text and "| 7.0 |" in text
    assert "No record for 2 of 4 rows: Ablation A (single H); Ablation B (split H)." in text
    assert "|  | tokens per second | times other |\n|---|---|---|\n| x | 9,000,000 | 3.5 |" in text
    assert "lee2025-table2" not in text
    assert "Made on abacus; commit 0123456; 2026-01-02." in text
    nothing = rows_of("lee2025-table1", [{"row": "HMM, scalar", "metrics": {}}, unknown])
    assert draw(STUDIES["lee2025-table1"], nothing) is None  # only declared rows with a finite value are drawn
    assert draw(STUDIES["steering"], rows_of("steering", [record("own text", 5.0)])) is None


@pytest.mark.slow
def test_everything_is_published(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, file, dpi: save(self, file, dpi=20))  # drawing takes long
    for study in STUDIES.values():
        made = [
            record(
                run.row.name,
                100.0 + number % 11,
                run.seed,
                run.row.recipe,
                settings=dict(run.row.settings),
                train_perplexity=90.0,
            )
            for number, run in enumerate(study.runs)
        ]
        drawn = {} if study.drawing is None else {study.drawing.metric: 100.0}
        cells = [cell for claim in study.claims for chain in claim.chains.values() for cell in chain]
        metrics = {cell.metric: 100.0 for cell in cells if cell.metric != PARAMETERS}
        made += [record(row.name, 100.0, 0, **{**drawn, **metrics}) for row in study.rows if not row.seeds]
        write(repository, study.name, made or [record("a row", 5.0)])
    text = published(repository)
    assert {file.stem for file in (repository / "docs/reproduction/figures").iterdir()} == {s.name for s in DRAWN}
    assert all(f"(../figures/{study.name}.png)" in text for study in DRAWN)
    assert "No record" not in text
    index = (repository / "docs/reproduction/results.md").read_text()
    for name, study in STUDIES.items():
        own = (repository / RESULTS_PAGES / f"{study.topic.name}.md").read_text()
        assert f'<a id="{name}"></a>\n\n## {study.title}\n' in own
        assert f'<a id="{name}"></a>[' in index and f"](results/{study.topic.name}.md#{name})" in index
    for file in PAGES:
        filled = (repository / file).read_text()
        assert filled.startswith("before") and filled.endswith("after\n") and "replaced" not in filled
    headlines = [row.headline for study in STUDIES.values() for row in study.rows if row.headline]
    readme = (repository / "README.md").read_text()
    assert 8 <= len(headlines) <= 17 and all(f"| {headline} |" in readme for headline in headlines)
    for paper in (CHIU, LEE):
        claims = [claim for study in STUDIES.values() if study.paper == paper for claim in study.claims]
        shown = (repository / paper.page).read_text()
        assert all(f"| {claim.text} (" in shown for claim in claims) and "not run" not in shown
    best = text.split("### Pretrained networks at the best rate of each kind")[1]
    assert best.count("| spread out |") >= 5 and "| stories15M | like words | 0.003 |" in best  # runs of two studies


def test_an_entry_is_all_that_a_new_study_needs(repository: Path) -> None:
    rows = tuple(
        StudyRow(
            name=f"{states} states", recipe="ptb-vl-hmm", settings={"model.num_states": states}, seeds=(0,), x=states
        )
        for states in (128, 256)
    )
    drawing = Lines(TEST, "perplexity", "states")
    claim = Claim("More is better.", "ascending", {"": (Cell("256 states", "256"), Cell("128 states", "128"))})
    study = Study(name="new", title="A new table", paper=CHIU, rows=rows, drawing=drawing, claims=(claim,))
    write(repository, "new", [record(row.name, 100.0 - number, 0) for number, row in enumerate(rows)])
    text = published(repository, {"new": study})
    assert "## A new table" in text and "| 256 states | 100.0 | 99.0 | seed 0 |" in text
    assert "![A new table](../figures/new.png)" in text
    assert (repository / "docs/reproduction/figures/new.png").stat().st_size > 10_000
    assert "| More is better. (" in (repository / CHIU.page).read_text()
    first, second, *_ = list_studies({"new": study}, repository / "results")
    assert (first, second.strip()) == ("new: A new table", "2 rows; seeds 0; data ptb; GPU")
    assert (
        comparison(study, measured_rows(study, [record("128 states", 1.0)])) == "No record for 1 of 2 rows: 256 states."
    )


def test_rows_of_different_kinds_stand_in_tables_of_their_own(repository: Path) -> None:
    calls = {"steered": {"ms_per_call": 2.0}, "Ctrl-G, eager": {"ms_per_call": 9.0, "times_steered": 4.5}}
    records = [{"row": f"{name}, one call, 64 states", "metrics": metrics} for name, metrics in calls.items()]
    write(repository, "control", [*records, {"row": "distilled", "metrics": {"perplexity": 30.0}}])
    text = published(repository)
    times, distilled = text.split("### The distilled HMM")
    times = times.split("### Time of a call")[1]
    assert "| steered, one call, 64 states | 2 |" in times and "perplexity |" not in times
    assert "| distilled | 30 |" in distilled and "| 64 states | × 4.5 |  |" in distilled


def test_headlines_are_the_rows_that_have_one() -> None:
    hmm = record("PTB, VL-HMM 2^15", 110.0, 0, "ptb-vl-hmm", tokens=27_887_670, epochs=8.0)
    results = results_of({"chiu2020-table1": [hmm, record("PTB, FF 5-gram 256", 1.0)]})
    link = "[chiu2020-table1](docs/reproduction/results/chiu2020-tables.md#chiu2020-table1)"
    assert headline_table(STUDIES, results)[1:] == [
        ["VL-HMM, 2^15 states, PTB", "116.0", "110.0", "27.9M, 8 of 30 passes", "seed 0", link]
    ]


def test_labels_name_the_teacher_of_a_model() -> None:
    rows = [row for row in STUDIES["record"].rows if row.headline]
    for row in rows:
        parts = row.combine.parts if row.combine else (row,)
        assert any(part.teacher is not None for part in parts) == ("distilled from an LSTM" in row.headline), row.name
    assert {True, False} == {"distilled" in row.headline for row in rows}


def test_names_of_rows_are_shown_as_they_are() -> None:
    """As Markdown they would be links, emphasis and code, or end a cell."""
    escaped = {r"[A-Z][a-z]+ (is|was) .*": r"\[A-Z\]\[a-z\]+ (is\|was) .\*", r"`\d{3}` <eos>": r"\`\\d{3}\` &lt;eos>"}
    for text, shown in escaped.items():
        assert escape(text) == shown


def numbered(text: str) -> str:
    """Return a page whose numbers are filled in from two made-up rows."""
    rows = [("PTB, VL-HMM 2^15", 110.0), ("PTB, KN 5-gram", 150.0)]
    results = results_of({"chiu2020-table1": [record(name, test, 0, minutes_in_all=3.0) for name, test in rows]})
    return fill(text, "docs/guide/a.md", STUDIES, results)


def test_numbers_of_the_pages_come_from_their_records() -> None:
    where = "../reproduction/results/chiu2020-tables.md#chiu2020-table1"
    hmm, ngram = "chiu2020-table1: PTB, VL-HMM 2^15: test", "chiu2020-table1: PTB, KN 5-gram: test"
    expected = {
        hmm: "110.0",
        "chiu2020-table1: PTB, VL-HMM 2^15: valid": "111.0",
        "chiu2020-table1: PTB, VL-HMM 2^15: paper test": "116.0",
        f"{hmm} over {ngram}": "0.73",
        f"{hmm} below {ngram}": "27%",
        f"{ngram} above {hmm}": "36%",
        f"{hmm} times below {ngram}": "1.4",
    }
    for title, number in expected.items():
        assert numbered(f'It is [?](old.md "{title}") here.') == f'It is [{number}]({where} "{title}") here.'
    assert numbered("[table](results.md#chiu2020-table1)") == f"[table]({where})"
    assert numbered('[a](b.md "an ordinary title")') == '[a](b.md "an ordinary title")'
    for title, missing in {
        "chiu2020-table9: a: test": "'chiu2020-table9'",
        "chiu2020-table1: a: test": "row 'a' of chiu2020-table1",
        "chiu2020-table1: PTB, VL-HMM 2^15: speed": "metric 'speed'",
    }.items():
        with pytest.raises(InputError, match=f"docs/guide/a.md: the number '1' names .*{missing}"):
            numbered(f'[1](a.md "{title}")')


def test_numbers_that_name_no_record_are_found() -> None:
    measured = (
        "123.4",
        "perplexity of 98",
        "12 ms",
        "3.5 minutes",
        "× 4.1",
        "2.5 times faster",
        "16%",
        "12,000 tokens/s",
    )
    plain = ("2^15 states", "16 × 32", "version 0.2", "10,000 words", "Table 3", "`--rate 0.003`", "1e-3", "5.2 GB")
    linked = '[123.4](a.md "study: row: test")'
    assert not list(unrecorded(" and ".join((*plain, linked, "```\n123.4\n```", "<!-- a -->\n123.4\n<!-- /a -->"))))
    for text in measured:
        assert len(list(unrecorded(f"It takes {text} here"))) == 1, text
    assert not list(unrecorded("a 95% interval", frozenset({"95% interval"})))


def test_what_cannot_be_published_is_stated_in_a_line(repository: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match):
            publish(repository, STUDIES)

    refused(r"no results in .*: run this in the root")
    write(repository, "steering", {"row": "not a list"})
    refused(r"steering.json: not a list of runs")
    (repository / "results" / "steering.json").write_text("{")
    refused(r"steering.json: not JSON")
    write(repository, "steering", [record("x", 1.0)])
    write(repository, "odd", [record("x", 1.0)])
    refused(r"odd.json belongs to no study; add a Study named 'odd'")
    (repository / "results" / "odd.json").unlink()
    (repository / "README.md").write_text("nothing here")
    refused(r"README.md: no marks <!-- results -->")
    assert (repository / "README.md").read_text() == "nothing here"
