"""Rows of a study from its records: seeds gathered, what the paper prints, ratios to the scalar row, order of rows.

A record is one run, as `studies.perform` writes it; seed, recipe, settings and any metric may be missing.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import isnan
from pathlib import Path
from typing import Any

from hmmlm.errors import InputError
from hmmlm.experiments.catalogue import STUDIES
from hmmlm.experiments.catalogue.initialization import TEACHERS
from hmmlm.learning.config import config_to_dict, load_recipe

Record = Mapping[str, Any]
# Baselines beside the runs of a study: they have no run in the catalogue.
PRINTED_BASELINES: dict[str, dict[str, float]] = {
    "PTB, KN 5-gram": {"test_perplexity": 141.2},
    "WikiText-2, KN 5-gram": {"valid_perplexity": 248.7, "test_perplexity": 234.3},
    "ablation B": {"test_perplexity": 348},  # beside the variants of Table 3
}
GROUP = re.compile(rf"(PTB|WikiText-2|\d+ states|{'|'.join(map(re.escape, TEACHERS))}), ")
SCALAR = re.compile(r"HMM, scalar|scalar|no LVD|nothing factored")


@dataclass(frozen=True)
class Row:
    """The runs of a row that differ by nothing but their seed."""

    name: str
    records: tuple[Record, ...]
    paper: Mapping[str, float]
    """The metrics that the paper prints for it."""
    told: Mapping[str, str]
    """Settings in which the runs differ from what the row stands for."""

    @property
    def group(self) -> str:
        """The text, the number of states or the network, 512 states where it has none; and whether dropout is left
        out. Rows of a group are compared."""
        match = GROUP.match(self.name)
        return (match[1] if match else "512 states") + ", no dropout" * self.name.endswith(", no dropout")

    @property
    def recipe(self) -> str:
        return str(self.records[0].get("recipe", ""))

    @property
    def has_lvd(self) -> bool:
        settings = {**recipe_settings(self.recipe), **self.records[0].get("settings", {})}
        return settings.get("initialization.kind") == "lvd"

    def values(self, metric: str) -> list[float]:
        """The metric of every run that has it."""
        found = [record["metrics"].get(metric) for record in self.records]
        return [float(value) for value in found if value is not None]

    @property
    def stopped(self) -> int:
        """How many runs failed to train and were stopped."""
        return sum("stopped" in record for record in self.records)

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return statistics.fmean(values) if values else None


def rows_of(study: str, records: Sequence[Record]) -> list[Row]:
    """The rows of a study in the catalogue's order, unknown ones last, runs as planned before others."""
    runs = {run.row: run for run in reversed(STUDIES.get(study, []))}
    order = {row: number for number, row in enumerate(reversed(runs))}
    gathered: dict[tuple[str, tuple[tuple[str, str], ...]], list[Record]] = {}
    for record in records:
        run = runs.get(record["row"])
        told = differences(record, run.settings if run else {})
        gathered.setdefault((record["row"], tuple(sorted(told.items()))), []).append(record)
    rows = []
    for (name, told_items), same in gathered.items():
        paper = runs[name].paper if name in runs else PRINTED_BASELINES.get(name, {})
        seeds = sorted(same, key=lambda record: record.get("seed", 0))
        rows.append(Row(name, tuple(seeds), paper, dict(told_items)))
    return sorted(rows, key=lambda row: (order.get(row.name, len(order)), len(row.told)))


def differences(record: Record, planned: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a run that are neither its recipe's nor those planned for its row."""
    plan = {**recipe_settings(record.get("recipe", "")), **planned}
    given = {name: _plain(value) for name, value in record.get("settings", {}).items()}
    return {name: value for name, value in given.items() if name not in plan or value != _plain(plan[name])}


@cache
def recipe_settings(recipe: str) -> dict[str, Any]:
    """The settings of a recipe by their dotted names; none of a recipe that is not there any more."""
    try:
        values = config_to_dict(load_recipe(recipe)) if recipe else {}
    except InputError:
        return {}
    return dict(_flat(values))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return pairs


def _plain(value: Any) -> str:
    """A setting as text: the command line gives strings, and where a file lies is nobody's business."""
    if isinstance(value, bool) or value is None:
        return str(value)
    try:
        return f"{float(value):.12g}"
    except (TypeError, ValueError):
        return Path(value).name if "/" in str(value) else str(value)


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """One row a name: the runs nearest to what was planned."""
    return list({row.name: row for row in reversed(rows)}.values())[::-1]


def scalar_row(row: Row, rows: Sequence[Row]) -> Row | None:
    """What `row` is a ratio of: the study's scalar row, with as many states and about as many tokens."""
    candidates = [
        other for other in rows
        if other.group == row.group and other.mean("test_perplexity") and _as_long(row, other)
        and (other.recipe == "lee-table1-scalar" or SCALAR.match(other.name.removeprefix(f"{other.group}, ")))
        and not other.name.endswith(", LVD") and "Baum-Welch" not in other.name
    ]  # fmt: skip
    candidates.sort(key=lambda other: (other.told != row.told, other.recipe != "lee-table1-scalar"))
    return candidates[0] if candidates else None


def _as_long(a: Row, b: Row) -> bool:
    ours, other = a.mean("tokens"), b.mean("tokens")
    return ours is None or other is None or 0.95 * max(ours, other) <= min(ours, other)


def ratio(row: Row, rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Mean test perplexity over the scalar row's: ours and, where it prints both, the paper's."""
    scalar, metric = scalar_row(row, rows), "test_perplexity"
    if scalar is None:
        return None, None
    pairs = (row.mean(metric), scalar.mean(metric)), (row.paper.get(metric), scalar.paper.get(metric))
    ours, paper = (above / below if above and below else None for above, below in pairs)
    return ours, paper


def order_sentences(rows: Sequence[Row]) -> list[str]:
    """Whether rows stand in the paper's order, by each perplexity that it prints; pairs that do not, by name."""
    sentences = []
    for split in ("valid", "test"):
        metric = f"{split}_perplexity"
        known = [
            (row, row.paper[metric], mean) for row in main_rows(rows)
            if metric in row.paper and (mean := row.mean(metric)) is not None and not isnan(mean)
        ]  # fmt: skip
        # where the paper has one figure for both there is no order to keep
        pairs = [(a, b) for a, b in combinations(known, 2) if a[0].group == b[0].group and a[1] != b[1]]
        turned = [(a, b) for a, b in pairs if (a[1] - b[1]) * (a[2] - b[2]) < 0]
        if not pairs:
            continue
        agree = f"{len(pairs) - len(turned)} of {len(pairs)} pair{'s' * (len(pairs) > 1)}"
        sentence = f"Order by {split} perplexity: as in the paper for {agree} of rows"
        if turned:
            told = (_turned(*sorted(pair, key=lambda known: known[1])) for pair in turned)
            sentence += f"; not for {', '.join(told)}"
        sentences.append(sentence + ".")
    return sentences


def _turned(better: tuple[Row, float, float], worse: tuple[Row, float, float]) -> str:
    """A pair that stands the other way round here; each is a row with the paper's figure and ours."""
    (a, paper_a, ours_a), (b, paper_b, ours_b) = better, worse
    return f"“{a.name}” and “{b.name}” (paper {paper_a:g} and {paper_b:g}, here {ours_a:.1f} and {ours_b:.1f})"
