"""Tables, figures and pages from results/*.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from papers.claims import claims_table
from papers.drawing import draw
from papers.records import read_records
from papers.rows import MeasuredRow, Results, main_rows, measured_rows
from papers.study import TEST, Record, Study
from papers.tables import comparison, escape, markdown, number, remarks, seeds, study_table

PAGE, FIGURES = Path("docs/reproduction/results.md"), Path("docs/reproduction/figures")
INTRODUCTION = (
    "Generated from `results/*.json` by `python -m papers publish`; each record there holds the command of its run. "
    "Numbers are perplexities unless noted; “paper” is the value that the paper prints. Rows with several seeds show "
    "the mean, for test also minimum and maximum. Models and settings are chosen on valid. Every run also reports "
    "test, exploratory runs too, so test was seen more than once. Runs with fewer tokens than their recipe have a "
    "proportionally shorter warm-up. Settings in brackets differ from the row's plan."
)


def publish(root: Path, studies: Mapping[str, Study]) -> None:
    """Write docs/reproduction/results.md, its figures, and the generated blocks of README.md and the papers' pages."""
    found = _read_all(root / "results", studies)
    results = {name: measured_rows(studies[name], found[name]) for name in studies if name in found}
    (root / FIGURES).mkdir(parents=True, exist_ok=True)
    text = ["# Results", "", INTRODUCTION, "", *_contents(studies, results), ""]
    for name, rows in results.items():
        text += _section(studies[name], rows, found[name], results, root / FIGURES)
    pages = {root / PAGE: "\n".join(text)}
    # Pages with text of their own are read last: drawing takes a while, and they may be edited meanwhile.
    pages[root / "README.md"] = _filled(root / "README.md", "results", markdown(headline_table(results)))
    for paper in dict.fromkeys(study.paper for study in studies.values() if study.paper):
        of_paper = [study for study in studies.values() if study.paper == paper]
        page = root / paper.page
        pages[page] = _filled(page, "claims", markdown(claims_table(of_paper, results)))
    for file, page_text in pages.items():
        write_bytes(file, page_text.encode())


def _read_all(folder: Path, studies: Mapping[str, Study]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of every results file by study; an error names a file that belongs to no study."""
    found = {file.stem: records for file in sorted(folder.glob("*.json")) if (records := read_records(file))}
    if not found:
        raise InputError(f"no results in {folder}: run this in the root of the repository")
    for name in found:
        if name not in studies:
            raise InputError(f"{folder / name}.json belongs to no study; add a Study named {name!r} to papers/")
    return found


def headline_table(results: Results) -> list[list[str]]:
    """Return the rows that have a headline, with the paper's test perplexity and ours; header first."""
    lines = [["test perplexity", "paper", "here", "seeds", "table"]]
    for name, rows in results.items():
        link = f"[{name}]({PAGE}#{name})"
        for row in main_rows(rows):
            if row.plan.headline and row.mean(TEST) is not None:
                paper = number(row.plan.paper.get(TEST), "{:.1f}")
                lines.append([row.plan.headline, paper, number(row.mean(TEST)), seeds(row), link])
    return lines


def _filled(file: Path, name: str, lines: Sequence[str]) -> str:
    """Return the text of a file with `lines` between its marks <!-- name --> and <!-- /name -->."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    pattern = re.compile(f"{begin}.*{end}", flags=re.S)
    text = file.read_text() if file.exists() else ""
    if not pattern.search(text):
        raise InputError(f"{file}: no marks {begin} and {end}, between which the {name} go")
    block = "\n".join([begin, "", *lines, "", end])
    return pattern.sub(lambda _: block, text)


def _contents(studies: Mapping[str, Study], results: Results) -> list[str]:
    """Return the list of sections, tables and figures of the papers before trials."""
    trials = [name for name in results if studies[name].trials]
    others = [name for name in results if name not in trials]
    lines = []
    for heading, names in (("Tables, figures and measurements:", others), ("Trials of settings:", trials)):
        lines += [heading, "", *(f"- [{escape(studies[name].title)}](#{name})" for name in names), ""]
    return lines[:-1]


def _section(
    study: Study, rows: Sequence[MeasuredRow], records: Sequence[Record], results: Results, figures: Path
) -> list[str]:
    """Return the lines of a study's section; its figure is written to `figures`."""
    parts = [[f'<a id="{study.name}"></a>'], [f"## {study.title}"]]
    for heading in dict.fromkeys(study.part_of(row.name) for row in rows):
        parts += [[f"### {heading}"]] if heading else []
        parts.append(study_table(study, [row for row in rows if study.part_of(row.name) == heading]))
    figure = draw(study, rows)
    if figure is not None:
        figure.savefig(figures / f"{study.name}.png", dpi=150)
        parts.append([f"![{study.title}](figures/{study.name}.png)"])
    parts += [[line] for line in (comparison(study, rows), *remarks(rows, records)) if line]
    for summary in study.summaries:
        parts += [[f"### {summary.title}"], [summary.text], markdown(summary.build(results))]
    return [line for part in parts for line in (*part, "")]
