"""Made-up records of studies, and what is computed from them."""

from typing import Any

from papers.catalogue import STUDIES
from papers.rows import MeasuredRow, Results, measured_rows
from papers.study import Study
from papers.tables import study_table

DRAWN: list[Study] = [study for study in STUDIES.values() if study.drawing]


def record(row: str, test: float, seed: int = 42, recipe: str | None = None, **more: Any) -> dict[str, Any]:
    """Make up a run; keywords are metrics, except for settings and what records have beside metrics."""
    beside = {key: more.pop(key) for key in ("settings", "note", "machine", "commit", "date") if key in more}
    metrics = {"test_perplexity": test, "valid_perplexity": test + 1, **more}
    named = {} if recipe is None else {"recipe": recipe}
    return {"row": row, **named, "seed": seed, "settings": {}, "metrics": metrics, **beside}


def rows_of(study: str, records: list[dict[str, Any]]) -> list[MeasuredRow]:
    return measured_rows(STUDIES[study], records)


def results_of(records: dict[str, list[dict[str, Any]]]) -> Results:
    """Return results in the order of the catalogue."""
    return {name: rows_of(name, records[name]) for name in STUDIES if name in records}


def cells(study: str, records: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the table of a study: by row, then by column."""
    table = study_table(STUDIES[study], rows_of(study, records))
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {line[0]: dict(zip(header[1:], line[1:], strict=True)) for line in body}
