"""Generate the tables of docs/benchmarks.md from the CSV alone."""

import csv
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers import SYSTEMS
from benchmarks.problem import OPERATIONS

TITLES = {
    "forward": "Log-likelihood",
    "gradient": "Log-likelihood and its gradient",
    "viterbi": "Viterbi",
    "em": "EM step (dynamax: E step alone)",
}
OFFICIAL, DOCUMENT = Path("results/cpu-benchmark.csv"), Path("docs/benchmarks.md")
Row = dict[str, str]
Times = dict[tuple[str, str, int], Row]  # by operation, system, states


class Target(NamedTuple):
    """A required speed relative to other systems."""

    what: str
    operation: str
    states: int | None  # None: the worst of all sizes
    systems: tuple[str, ...]  # the fastest of these
    at_least: float  # their time over ours


HMMLEARN, DYNAMAX = ("hmmlearn", "hmmlearn, scaling"), ("dynamax", "dynamax, functions")
TARGETS = [
    Target("bare products at 1,024 states, gradient", "gradient", 1024, ("bare products",), 1 / 2),
    Target("hmmlearn (defaults) at 256 states, EM step", "em", 256, HMMLEARN[:1], 30),
    Target("dynamax's E step at 256 states (faster way), EM step", "em", 256, DYNAMAX, 4),
    Target("fastest of hmmlearn and dynamax at the worst size, EM step", "em", None, HMMLEARN + DYNAMAX, 1),
    Target("the same, log-likelihood", "forward", None, HMMLEARN + DYNAMAX, 1),
    Target("the same, gradient", "gradient", None, HMMLEARN + DYNAMAX, 1),
    Target("the same, Viterbi", "viterbi", None, HMMLEARN + DYNAMAX, 1),
]


def read(path: Path) -> list[Row]:
    """Return the rows of the CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def index(rows: list[Row]) -> Times:
    return {(row["operation"], row["system"], int(row["states"])): row for row in rows}


def seconds(value: float) -> str:
    """Format a time with its unit."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def table(rows: list[Row], operation: str) -> str:
    """Return the Markdown table of one operation, one row per system."""
    times = index(rows)
    sizes = sorted({states for _, _, states in times})
    lines = [f"| {TITLES[operation]} | " + " | ".join(f"Z = {size:,}" for size in sizes) + " |"]
    lines.append("|---" * (len(sizes) + 1) + "|")
    for system in SYSTEMS:
        rows_here = [times.get((operation, system, size)) for size in sizes]
        if any(row and row["status"] != "not offered" for row in rows_here):
            ours = [times.get((operation, "hmmlm", size)) for size in sizes]
            shown = [cell(row, own) for row, own in zip(rows_here, ours, strict=True)]
            name = f"**{system}**" if system == "hmmlm" else system
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def cell(row: Row | None, ours: Row | None) -> str:
    """Return the median time and its ratio to that of hmmlm."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return row["status"].split(":")[0]
    median = float(row["median_s"])
    if row["system"] == "hmmlm":
        return f"**{seconds(median)}**"
    if not ours or ours["status"] != "ok":
        return seconds(median)
    times = median / float(ours["median_s"])
    return f"{seconds(median)} ({times:,.0f}×)" if times >= 100 else f"{seconds(median)} ({times:.2g}×)"


def ratio(times: Times, target: Target, column: str) -> tuple[float, int] | None:
    """Return the fastest other system's time over ours and the size: the target's, or the one with the least ratio."""
    found = []
    for size in sorted({states for _, _, states in times}) if target.states is None else [target.states]:
        ours = times.get((target.operation, "hmmlm", size))
        others = [times.get((target.operation, system, size)) for system in target.systems]
        measured = [float(row[column]) for row in others if row and row["status"] == "ok"]
        if ours and ours["status"] == "ok" and measured:
            found.append((min(measured) / float(ours[column]), size))
    return min(found, default=None)


def targets(rows: list[Row]) -> str:
    """Return the Markdown table of targets and whether they are reached."""
    times = index(rows)
    lines = ["| their time / ours | target | medians | minima | |", "|---|---|---|---|---|"]
    for target in TARGETS:
        medians, minima = ratio(times, target, "median_s"), ratio(times, target, "min_s")
        if medians and minima:
            at = f" (Z = {medians[1]:,})" if target.states is None else ""
            reached = "reached" if medians[0] >= target.at_least else "missed"
            ratios = f"{medians[0]:.2f} | {minima[0]:.2f}"
            lines.append(f"| {target.what}{at} | ≥ {target.at_least:g} | {ratios} | {reached} |")
    return "\n".join(lines)


def setting(rows: list[Row]) -> str:
    """Return a paragraph that describes the machine, the versions and the problem."""
    first = rows[0]
    versions = {row["system"].split(",")[0]: row["version"] for row in rows if row["version"]}
    worst = max((float(row["error"]) for row in rows if row["error"]), default=0.0)
    return (
        f"{first['date']}: {first['cpu']}, {first['threads']} threads of {first['cores']} cores, "
        f"{first['memory_gib']} GiB; load before the run {first['system_load']}; Python {first['python']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". {first['sequences']} sequences × {first['length']} tokens, vocabulary {int(first['vocabulary']):,}. "
        f"Largest relative error of any answer: {worst:.1g}."
    )


def update(rows: list[Row]) -> None:
    """Replace the text between the markers of the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    parts = [setting(rows), targets(rows)]
    parts += [table(rows, operation) for operation in OPERATIONS if any(row["operation"] == operation for row in rows)]
    begin, end = "<!-- begin: written by benchmarks.run -->", "<!-- end -->"
    before, rest = text.split(begin)
    after = rest.split(end, 1)[1]
    DOCUMENT.write_text(before + begin + "\n" + "\n\n".join(parts) + "\n" + end + after, encoding="utf-8")
