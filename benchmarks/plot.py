"""Plot the CSV: `python -m benchmarks.plot [CSV]` redraws the figure and rewrites the tables without measuring."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks import tables
from benchmarks.peers import SYSTEMS
from benchmarks.problem import OPERATIONS

STYLES = {  # color, marker, line
    "hmmlm": ("#c1121f", "o", "-"),
    "bare products": ("#222222", "", (0, (1, 1.5))),
    "autograd loop": ("#2a9d8f", "v", "-"),
    "dynamax": ("#1d5fa8", "s", "-"),
    "dynamax, functions": ("#1d5fa8", "s", (0, (4, 2))),
    "pomegranate": ("#8e5ea2", "D", "-"),
    "hmmlearn": ("#d98e04", "^", "-"),
    "hmmlearn, scaling": ("#d98e04", "^", (0, (4, 2))),
}


def draw(rows: list[tables.Row], path: Path) -> None:
    """Plot median time against states, log-log, one panel per operation; arrows mark runs stopped at the limit."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 8.2), sharex=True, layout="constrained")
    for axes, operation in zip(grid.flat, OPERATIONS, strict=True):
        panel(axes, [row for row in rows if row["operation"] == operation])
        axes.xaxis.set_major_locator(FixedLocator(sorted({int(row["states"]) for row in rows})))
        axes.set_title(tables.TITLES[operation], loc="left", fontsize=11, fontweight="bold")
    for axes in grid[1]:
        axes.set_xlabel("states")
    legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid.flat]
    handles = {label: handle for legend in legends for handle, label in legend}
    order = [system for system in SYSTEMS if system in handles]
    figure.legend([handles[s] for s in order], order, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    first = rows[0]
    figure.suptitle(
        f"Median time of one run: {first['sequences']} sequences × {first['length']} tokens, "
        f"vocabulary {int(first['vocabulary']):,}, {first['threads']} CPU threads",
        fontsize=12,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def panel(axes: Axes, rows: list[tables.Row]) -> None:
    """Draw the panel of one operation."""
    for system, (color, marker, line) in STYLES.items():
        mine = [row for row in rows if row["system"] == system]
        done = [(int(row["states"]), float(row["median_s"])) for row in mine if row["status"] == "ok"]
        ours = system == "hmmlm"
        if done:
            axes.plot(
                *zip(*done, strict=True),
                color=color,
                marker=marker,
                linestyle=line,
                label=system,
                linewidth=3 if ours else 1.6,
                markersize=8 if ours else 5,
                zorder=3 if ours else 2,
            )
        for row in mine:
            if row["status"].startswith("over"):
                axes.plot(
                    int(row["states"]),
                    float(row["status"].split()[1]),
                    marker=r"$\uparrow$",
                    color=color,
                    markersize=11,
                    linestyle="none",
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tables.seconds(value)))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def report(csv_path: Path) -> str:
    """Draw the plot next to the CSV, update the documentation if the CSV is OFFICIAL, and return the targets."""
    rows = tables.read(csv_path)
    draw(rows, csv_path.with_suffix(".png"))
    if csv_path == tables.OFFICIAL:
        tables.update(rows)
    return tables.targets(rows)


if __name__ == "__main__":
    print(report(Path(sys.argv[1]) if len(sys.argv) > 1 else tables.OFFICIAL))
