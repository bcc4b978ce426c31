"""Tables, figures and pages from results/*.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from papers import frozen
from papers.claims import claims_table
from papers.drawing import draw, has_figure
from papers.listing import command_lines
from papers.numbers import fill, unrecorded
from papers.records import read_records
from papers.rows import MeasuredRow, Results, main_rows, measured_rows, with_times
from papers.settings import recorded_run
from papers.study import RESULTS_PAGES, TEST, TOPICS, Record, Study, Topic
from papers.tables import comparison, escape, markdown, number, remarks, seeds, study_table, training

INDEX, FIGURES = Path("docs/reproduction/results.md"), Path("docs/reproduction/figures")
INTRODUCTION = (
    "Generated from `results/*.json` by `python -m papers publish`. Numbers are perplexities unless noted; “paper” is "
    "the value that the paper prints. Rows with several seeds show the mean, for test also minimum and maximum. Models "
    "and settings are chosen on valid. Every run also reports test, exploratory runs too, so test was seen more than "
    "once. Runs with fewer tokens than their recipe have a proportionally shorter warm-up. Settings in brackets differ "
    "from the row's plan. Below each table are the commands that make its rows with the present code; the command and "
    "commit of then are in the record. `corpus` and `tokenizer.model` in recipes are placeholders: give your own text "
    "and tokenizer with `--data` and `--tokenizer.file`."
)
WITH_NUMBERS = ("README.md", "docs/architecture.md", "docs/reproduction/chiu2020.md", "docs/reproduction/lee2025.md")
"""Pages with text of their own, whose numbers name records; those of docs/guide too."""
KNOWN = frozenset(
    {
        "95% interval",
        "5% of the lines",
        "5% of the documents",
        "5% for test",
        "16 streams × 32 tokens",
        "127.0.0.1",
    }
)
"""Where numbers of these pages that look measured are settings."""


def publish(root: Path, studies: Mapping[str, Study]) -> None:
    """Write the pages of docs/reproduction with their figures, and what other pages say of the results."""
    found = _read_all(root / "results", studies)
    results = _measured(studies, found)
    runs = (recorded_run(record) for records in found.values() for record in records)
    frozen.add((run.row.recipe for run in runs if run is not None), root)
    (root / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, rows in results.items():
        figure = draw(studies[name], rows)
        if figure is not None:
            figure.savefig(root / FIGURES / f"{name}.png", dpi=150)
    # After drawing, which takes a while: pages with text of their own may be edited meanwhile.
    for file, text in _pages(root, studies, found, results).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, text.encode())


def stale_pages(root: Path, studies: Mapping[str, Study]) -> Iterator[str]:
    """Yield the pages that `publish` would change, and numbers that name no record."""
    found = _read_all(root / "results", studies)
    results = _measured(studies, found)
    for file, text in _pages(root, studies, found, results).items():
        name = file.relative_to(root)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            yield f"{name}: python -m papers publish would change it"
        if file.parent.name != RESULTS_PAGES.name:
            yield from (f"{name}: a number without a record: … {around} …" for around in unrecorded(text, KNOWN))


def _measured(studies: Mapping[str, Study], found: Mapping[str, Sequence[Record]]) -> Results:
    return with_times({name: measured_rows(studies[name], found[name]) for name in studies if name in found})


def _pages(
    root: Path, studies: Mapping[str, Study], found: Mapping[str, Sequence[Record]], results: Results
) -> dict[Path, str]:
    """Return the text of every page with results, by its file."""
    of_topics = {topic: [studies[name] for name in results if studies[name].topic == topic] for topic in TOPICS}
    of_topics = {topic: own for topic, own in of_topics.items() if own}
    pages = {root / INDEX: "\n".join(["# Results", "", INTRODUCTION, "", *_contents(of_topics)])}
    for topic, own in of_topics.items():
        text = [f"# {topic.title}", "", f"[What the columns mean](../{INDEX.name})", ""]
        for study in own:
            text += _section(study, results[study.name], found[study.name], results)
        pages[root / RESULTS_PAGES / f"{topic.name}.md"] = "\n".join(text)
    blocks = {"README.md": {"results": markdown(headline_table(studies, results))}}
    for paper in dict.fromkeys(study.paper for study in studies.values() if study.paper):
        of_paper = [study for study in studies.values() if study.paper == paper]
        blocks[paper.page] = {"claims": markdown(claims_table(of_paper, results, paper.page))}
    for recording in (record["output"] for record in found.get("demo", ()) if "output" in record):
        blocks["docs/guide/demo.md"] = {"recording": ["```text", *recording.splitlines(), "```"]}
    guides = [str(file.relative_to(root)) for file in sorted((root / "docs" / "guide").glob("*.md"))]
    for page in dict.fromkeys((*WITH_NUMBERS, *guides)):
        file = root / page
        written = file.read_text(encoding="utf-8") if file.exists() else ""
        for name, lines in blocks.get(page, {}).items():
            written = _filled(page, written, name, lines)
        pages[file] = fill(written, page, studies, results)
    return pages


def _read_all(folder: Path, studies: Mapping[str, Study]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of every results file by study; an error names a file that belongs to no study."""
    found = {file.stem: records for file in sorted(folder.glob("*.json")) if (records := read_records(file))}
    if not found:
        raise InputError(f"no results in {folder}: run this in the root of the repository")
    for name in found:
        if name not in studies:
            raise InputError(f"{folder / name}.json belongs to no study; add a Study named {name!r} to papers/")
    return found


def headline_table(studies: Mapping[str, Study], results: Results) -> list[list[str]]:
    """Return the rows that have a headline, with the paper's test perplexity and ours; header first."""
    lines = [["test perplexity", "paper", "here", "training tokens", "seeds", "table"]]
    for name, rows in results.items():
        link = f"[{name}]({studies[name].address('README.md')})"
        for row in main_rows(rows):
            if row.plan.headline and row.mean(TEST) is not None:
                paper = number(row.plan.paper.get(TEST), "{:.1f}") or "–"
                lines.append([row.plan.headline, paper, number(row.mean(TEST)), training(row), seeds(row), link])
    return lines


def _filled(page: str, text: str, name: str, lines: Sequence[str]) -> str:
    """Return the text of a page with `lines` between its marks <!-- name --> and <!-- /name -->."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    pattern = re.compile(f"{begin}.*{end}", flags=re.S)
    if not pattern.search(text):
        raise InputError(f"{page}: no marks {begin} and {end}, between which the {name} go")
    block = "\n".join([begin, "", *lines, "", end])
    return pattern.sub(lambda _: block, text)


def _contents(of_topics: Mapping[Topic, Sequence[Study]]) -> list[str]:
    """Return the list of all pages and their studies."""
    lines = []
    for topic, studies in of_topics.items():
        lines += [f"## [{topic.title}]({RESULTS_PAGES.name}/{topic.name}.md)", ""]
        lines += [
            f'- <a id="{study.name}"></a>[{escape(study.title)}]({study.address(str(INDEX))})' for study in studies
        ]
        lines.append("")
    return lines


def _section(study: Study, rows: Sequence[MeasuredRow], records: Sequence[Record], results: Results) -> list[str]:
    """Return the lines of a study's section."""
    parts = [[f'<a id="{study.name}"></a>'], [f"## {study.title}"]]
    for heading in dict.fromkeys(study.part_of(row.name) for row in rows):
        parts += [[f"### {heading}"]] if heading else []
        parts.append(study_table(study, [row for row in rows if study.part_of(row.name) == heading]))
    if has_figure(study, rows):
        parts.append([f"![{study.title}](../{FIGURES.name}/{study.name}.png)"])
    parts += [[line] for line in (comparison(study, rows), *remarks(rows, records)) if line]
    parts.append(["<details markdown><summary>Commands</summary>"])
    parts += [["```bash", *command_lines(study, records), "```"], ["</details>"]]
    for summary in study.summaries:
        parts += [[f"### {summary.title}"], [summary.text], markdown(summary.build(results))]
    return [line for part in parts for line in (*part, "")]
