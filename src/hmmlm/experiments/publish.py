"""Tables and plots of the documentation from the measured results: never by hand.

    python -m hmmlm.experiments.publish        # reads results/*.json, writes docs/results.md, docs/figures, README.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hmmlm.errors import InputError
from hmmlm.experiments.catalogue import STUDIES

TITLES = {
    "chiu2020-table1": "Chiu & Rush 2020, Table 1: the very large HMM",
    "chiu2020-table3": "Chiu & Rush 2020, Table 3: emission constraints",
    "chiu2020-table4": "Chiu & Rush 2020, Tables 2 and 4: ablations at 2^14 states",
    "chiu2020-figure3": "Chiu & Rush 2020, Figure 3: number of states",
    "chiu2020-figure4": "Chiu & Rush 2020, Figure 4: number of blocks",
    "chiu2020-largest": "The largest state space trained on one GPU",
    "chiu2020-cpu": "Without a GPU",
    "chiu2020-beyond": "Beyond the paper: what else was tried",
}
# Baselines beside the runs of a study; their figures come from results/ as well.
PRINTED_BASELINES = {
    "PTB, KN 5-gram": {"test_perplexity": 141.2},
    "WikiText-2, KN 5-gram": {"valid_perplexity": 248.7, "test_perplexity": 234.3},
}
README_STUDIES = ("chiu2020-table1", "chiu2020-table4")
COLUMNS = (
    ("valid", "valid_perplexity", "{:.1f}"), ("test", "test_perplexity", "{:.1f}"),
    ("train", "train_perplexity", "{:.1f}"), ("epochs", "epochs", "{:g}"), ("ms a step", "step_ms", "{:.2f}"),
    ("peak GB", "peak_memory_gb", "{:.2f}"), ("minutes", "seconds", "{:.1f}"),
)


def main() -> None:
    root = Path.cwd()
    found = {file.stem: json.loads(file.read_text()) for file in sorted((root / "results").glob("*.json"))}
    if not found:
        raise InputError(f"no results in {root / 'results'}: run this in the root of the repository")
    sections = [
        "# Results", "", "Made from `results/*.json` by `python -m hmmlm.experiments.publish`; commands, commits and "
        "dates are there. \"paper\" is what the paper prints. Models and settings are chosen on valid; every run "
        "also prints its test figure, the exploratory ones too, so test was seen more often than once.", "",
    ]
    for name, records in found.items():
        sections += [f"## {TITLES.get(name, name)}", "", *table(name, records), ""]
        if name in ("chiu2020-figure3", "chiu2020-figure4"):
            sections += [f"![{TITLES[name]}](figures/{plot(name, records, root / 'docs' / 'figures').name})", ""]
        machines = sorted({record["machine"] for record in records})
        sections += [f"Machine: {'; '.join(machines)}.", ""]
    (root / "docs" / "results.md").write_text("\n".join(sections))
    summary: list[str] = []
    for name in README_STUDIES:
        if name in found:
            shown = ("valid", "test", "ms a step", "peak GB")
            summary += ["", f"**{TITLES[name]}**", "", *table(name, found[name], shown)]
    readme = (root / "README.md").read_text()
    block = "<!-- results -->\n" + "\n".join(summary) + "\n\n<!-- /results -->"
    (root / "README.md").write_text(re.sub(r"<!-- results -->.*<!-- /results -->", lambda _: block, readme, flags=re.S))


def table(name: str, records: Iterable[dict[str, Any]], only: tuple[str, ...] | None = None) -> list[str]:
    """A Markdown table of a study: the paper's figures beside ours, row by row, every seed."""
    runs = {run.row: run for run in STUDIES.get(name, [])}
    papers = {**PRINTED_BASELINES, **{row: run.paper for row, run in runs.items()}}
    order = {row: number for number, row in enumerate(runs)}
    records = sorted(records, key=lambda record: (order.get(record["row"], 99), record["seed"]))
    columns = [column for column in COLUMNS if only is None or column[0] in only]
    compared = [c for c in columns if any(c[1] in papers.get(record["row"], {}) for record in records)]
    header = ["", *(f"paper {title}" for title, _, _ in compared), *(title for title, _, _ in columns), "seed"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for record in records:
        paper, metrics = papers.get(record["row"], {}), dict(record["metrics"])
        if "seconds" in metrics:
            metrics["seconds"] /= 60
        cells = [record["row"] + note(record, runs[record["row"]].settings if record["row"] in runs else {})]
        cells += [f"{paper[key]:g}" if key in paper else "" for _, key, _ in compared]
        cells += [shape.format(metrics[key]) if key in metrics else "" for _, key, shape in columns]
        lines.append("| " + " | ".join([*cells, str(record["seed"])]) + " |")
    return lines


def note(record: dict[str, Any], planned: dict[str, Any]) -> str:
    """Settings in which a run differs from what its row stands for."""
    told = {name: value for name, value in record["settings"].items() if planned.get(name) != value}
    return " (" + ", ".join(f"{name.split('.')[-1]} {value}" for name, value in told.items()) + ")" if told else ""


def plot(name: str, records: list[dict[str, Any]], folder: Path) -> Path:
    """Validation perplexity against the number of states or blocks, ours and what the paper prints."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axis = "model.states" if name == "chiu2020-figure3" else "model.blocks"
    papers = {run.row: (run.settings[axis], run.paper.get("valid_perplexity")) for run in STUDIES[name]}
    figure, axes = pyplot.subplots(figsize=(6, 3.8))
    for factored, label in ((False, "ours"), (True, "ours, factored embeddings")):
        chosen = [r for r in records if str(r["settings"].get("model.factored", False)) == str(factored)]
        points = sorted((int(r["settings"][axis]), r["metrics"]["valid_perplexity"]) for r in chosen)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label if name.endswith("4") else "ours")
    printed = [(x, y) for x, y in papers.values() if y is not None]
    if printed:
        axes.scatter(*zip(*printed, strict=True), marker="x", color="black", zorder=3, label="printed in the paper")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("states" if axis == "model.states" else "blocks")
    axes.set_ylabel("validation perplexity, PTB")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main()
