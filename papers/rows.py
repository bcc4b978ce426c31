"""Measured rows: the records of a study gathered over seeds, beside what was planned for them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from papers.parameters import count_parameters
from papers.settings import differences, planned_settings, recorded_run
from papers.study import FORWARD, PARAMETERS, TEST, TIMES, Record, Study, StudyRow

Results = Mapping[str, Sequence["MeasuredRow"]]
"""Measured rows by study name."""


@dataclass(frozen=True)
class MeasuredRow:
    """Records of one row that differ in nothing but their seed."""

    plan: StudyRow
    """The row's entry in the study; only its name if it has none."""
    records: tuple[Record, ...]
    overrides: Mapping[str, str]
    """Settings in which the records differ from the plan and the recipe."""
    timed: MeasuredRow | None = None
    """The row of this name in the study of times."""

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def recipe(self) -> str:
        return str(self.records[0].get("recipe", self.plan.recipe))

    @cached_property
    def has_lvd(self) -> bool:
        settings = planned_settings(self.recipe, {**self.plan.settings, **self.overrides})
        return settings.get("initialization.kind") == "lvd"

    @cached_property
    def _parameters(self) -> list[float]:
        """The number of parameters, of the first run."""
        run = recorded_run(self.records[0])
        count = None if run is None else count_parameters(run)
        return [] if count is None else [float(count)]

    @property
    def stopped(self) -> int:
        """Number of runs that failed to train and were stopped."""
        return sum("stopped" in record for record in self.records)

    def values(self, metric: str) -> list[float]:
        """Return the metric of every run that has it."""
        if metric == PARAMETERS:
            return self._parameters
        if metric == FORWARD and self.timed is not None:
            return self.timed.values(metric)
        found = [record["metrics"].get(metric) for record in self.records]
        return [float(value) for value in found if value is not None]

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return statistics.fmean(values) if values else None


def measured_rows(study: Study, records: Sequence[Record]) -> list[MeasuredRow]:
    """Return the rows of a study in its order, undeclared ones last, and runs as planned before others."""
    plans = {row.name: row for row in study.rows}
    order = {name: place for place, name in enumerate(plans)}
    gathered: dict[tuple[str, tuple[tuple[str, str], ...]], list[Record]] = {}
    for record in records:
        overrides = differences(record, plans.get(record["row"], StudyRow(name=record["row"])))
        gathered.setdefault((record["row"], tuple(sorted(overrides.items()))), []).append(record)
    rows = [
        MeasuredRow(
            plans.get(name, StudyRow(name=name)),
            tuple(sorted(same, key=lambda record: record.get("seed", 0))),
            dict(overrides),
        )
        for (name, overrides), same in gathered.items()
    ]
    return sorted(rows, key=lambda row: (order.get(row.name, len(order)), len(row.overrides)))


def with_times(results: Results) -> Results:
    """Return the results with the times of rows that another study measures."""
    times = {row.name: row for row in results.get(TIMES, ())}
    return {
        name: rows if name == TIMES else [replace(row, timed=times.get(row.name)) for row in rows]
        for name, rows in results.items()
    }


def main_rows(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Return one row per name, the one nearest to its plan."""
    return list({row.name: row for row in reversed(rows)}.values())[::-1]


def ratios(row: MeasuredRow, rows: Sequence[MeasuredRow]) -> tuple[float | None, float | None]:
    """Return test perplexity over that of the group's baseline: here, and in the paper where it prints both."""
    baselines = [
        other
        for other in rows
        if other.plan.is_baseline and other.plan.group == row.plan.group and other.mean(TEST) and _as_long(row, other)
    ]
    if not baselines:
        return None, None
    baseline = min(baselines, key=lambda other: other.overrides != row.overrides)
    here = _over(row.mean(TEST), baseline.mean(TEST))
    return here, _over(row.plan.paper.get(TEST), baseline.plan.paper.get(TEST))


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _as_long(a: MeasuredRow, b: MeasuredRow) -> bool:
    """Return whether two rows were trained on about as many tokens, as far as is known."""
    ours, other = a.mean("tokens"), b.mean("tokens")
    return ours is None or other is None or 0.95 * max(ours, other) <= min(ours, other)
