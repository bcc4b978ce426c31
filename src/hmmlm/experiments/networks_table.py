"""Table 4 and Figures 6 and 7 of Lee & Berg-Kirkpatrick 2025 in one table: networks, how they start, how apart states
begin."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hmmlm.experiments.catalogue.initialization import APART, INITIALIZATION
from hmmlm.experiments.catalogue.lee2025 import SEEDS
from hmmlm.experiments.summary import Record, Row, rows_of

OWN = "own decoder"
KINDS = ("random", "pretrained", "random, LVD", "pretrained, LVD")
AS_WORDS, APART_START = "as far apart as words", "further apart"
Found = Mapping[str, Sequence[Record]]
"""The records of every study."""


def networks_table(found: Found) -> list[list[str]]:
    """Lines of cells, the header first: a line a network and start, a column a kind. Test perplexity at the rate that
    is best on valid with the first seed, the mean over seeds; with that rate and the number of seeds."""
    printed = {run.row: run.paper.get("test_perplexity") for run in INITIALIZATION["lee2025-table4"]}
    paper = [f"{printed[f'TinyLlama-1.1B, {kind}']:g}" for kind in KINDS]
    lines = [["network", "states begin", *KINDS], ["TinyLlama-1.1B, the paper's figures", "", *paper]]
    rows = _gathered(found)
    for name in APART:
        for start in (AS_WORDS, APART_START):
            cells = [_cell(rows.get((name, kind, start), [])) for kind in KINDS]
            if any(cells):
                lines.append([name, start, *cells])
    return lines


def _gathered(found: Found) -> dict[tuple[str, str, str], list[Row]]:
    """The rows of every network, kind and start, a row a rate."""
    rows: dict[tuple[str, str, str], list[Row]] = {}
    studies = {"lee2025-figure6": AS_WORDS, "lee2025-table4": AS_WORDS, "lee2025-apart": APART_START}
    for study, start in studies.items():
        for row in rows_of(study, found.get(study, [])):
            name, _, kind = re.sub(", rate .*", "", row.name).partition(", ")
            if study == "lee2025-figure6":  # whose only network is ours
                name, kind = OWN, name
            rows.setdefault((name, kind, start), []).append(row)
    return rows


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    best = min(rows, key=_first_valid)
    rate = float(best.records[0]["settings"]["optimizer.rate"])
    return f"{best.mean('test_perplexity'):.1f} ({rate:g}; {len(best.records)})"


def _first_valid(row: Row) -> float:
    """Valid perplexity with the first seed, with which rates are chosen; the mean where it was not run."""
    first = [record["metrics"]["valid_perplexity"] for record in row.records if record["seed"] == SEEDS[0]]
    return first[0] if first else row.mean("valid_perplexity") or float("inf")
