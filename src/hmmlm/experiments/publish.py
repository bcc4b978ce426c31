"""Tables and plots of the documentation from the measured results: never by hand.

    python -m hmmlm.experiments.publish    # reads results/*.json, writes docs/results.md, docs/figures, and between the
                                           # marks in README.md and docs/lee2025.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from hmmlm.experiments.catalogue import STUDIES
from hmmlm.experiments.figures import draw
from hmmlm.experiments.networks_table import networks_table, one_rate_table
from hmmlm.experiments.plots import short
from hmmlm.experiments.records import read_records
from hmmlm.experiments.summary import Row, main_rows, order_sentences, ratio, recipe_settings, rows_of

CHIU, LEE = "Chiu & Rush 2020", "Lee & Berg-Kirkpatrick 2025"
TITLES = {
    "chiu2020-table1": f"{CHIU}, Table 1: the very large HMM",
    "chiu2020-speed": "Speed of the very large HMM, alone on the GPU",
    "chiu2020-brown": "Brown clustering of PTB's training text, beside the classic tool's clusters of it",
    "chiu2020-scalar": "Rate and decay of the scalar ablation, tried at 2^12 states",
    "chiu2020-table4": f"{CHIU}, Tables 2 and 4: ablations at 2^14 states, our settings",
    "chiu2020-table4-no-decay": f"{CHIU}, Tables 2 and 4, without weight decay",
    "chiu2020-table4-released": f"{CHIU}, Tables 2 and 4, with the released networks and settings",
    "chiu2020-table3": f"{CHIU}, Table 3: emission constraints",
    "chiu2020-figure3": f"{CHIU}, Figure 3: number of states",
    "chiu2020-figure4": f"{CHIU}, Figure 4: number of blocks",
    "chiu2020-largest": "The largest state space trained on one GPU",
    "chiu2020-cpu": "Without a GPU",
    "chiu2020-beyond": "Beyond the paper: what else was tried",
    "lee2025-table1": f"{LEE}, Table 1: linear reparameterizations",
    "lee2025-rates": f"Rate and decay of every family of {LEE}, tried on few tokens",
    "lee2025-tuned": f"{LEE}, Table 1 with every family tuned for itself, at 512 and 4,096 states",
    "lee2025-table2": f"{LEE}, Table 2: which of a, b, π is factored",
    "lee2025-table3": f"{LEE}, Table 3: variants of the network",
    "lee2025-figure1": f"{LEE}, Figure 1: number of states",
    "lee2025-figure2": f"{LEE}, Figure 2: capacity and architecture, 512 states",
    "lee2025-figure11": f"{LEE}, Figure 11: capacity and architecture, 256 states",
    "lee2025-figure12": f"{LEE}, Figure 12: capacity, 1,024 states",
    "lee2025-figure3": f"{LEE}, Figure 3: teachers of latent variable distillation (LVD)",
    "lee2025-figure8": f"{LEE}, Figure 8: how long LVD lasts",
    "lee2025-figure4": f"{LEE}, Figure 4: LVD and architectures",
    "lee2025-figure5": f"{LEE}, Figure 5: centroids and head as embeddings",
    "lee2025-figure5-cpu": f"{LEE}, Figure 5 on two CPU cores: PTB, 128 states, teacher stories15M",
    "lee2025-figure6": f"{LEE}, Figure 6: a pretrained network and the learning rate",
    "lee2025-figure7": f"{LEE}, Figure 7: the networks of pretrained transformers",
    "lee2025-table4": f"{LEE}, Table 4: pretrained networks and LVD (the paper's network is TinyLlama-1.1B)",
    "lee2025-networks": "Rates of the networks of pretrained transformers, tried on few tokens",
    "lee2025-apart": f"{LEE}, Table 4 and Figures 6 and 7 where states begin further apart, and the learning rate",
    "lee2025-table4-cpu": f"{LEE}, Table 4 on two CPU cores: PTB, 128 states, the network of stories15M",
    "lee2025-kmeans": "Speed of k-means in LVD, over embeddings that are made again in every pass",
    "lee2025-cpu-trials": "Trials with few states on two CPU cores",
    "lee2025-throughput": "Speed of training at the setting of Lee & Berg-Kirkpatrick",
    "blocked-cpu": "The blocked scan on the CPU: tiles that steps share, beside one a step",
    "steering": "A language model steered to say a word, beside the exact answer",
}
# Of settings: several rows are scalar, and none is the baseline.
TRIALS = (
    "lee2025-rates", "lee2025-networks", "lee2025-apart", "lee2025-table4-cpu", "lee2025-figure5-cpu",
    "lee2025-cpu-trials",
)
README_STUDIES = (
    "chiu2020-table1", "chiu2020-table4", "chiu2020-table4-released", "lee2025-table1", "lee2025-tuned",
    "lee2025-figure3",
)  # fmt: skip
README_COLUMNS = (
    "paper valid", "paper test", "valid", "test", "test, min / mean / max", "ratio to scalar", "paper's ratio",
    "tokens", "ms a step", "peak GB", "seeds",
)  # fmt: skip
INTRODUCTION = (
    "Made from `results/*.json` by `python -m hmmlm.experiments.publish`; the command of every run is there. “paper” "
    "is what the paper prints. Of runs with several seeds the table has the mean, of test also the least and the "
    "largest. Models and settings are chosen on valid; every run also prints its test figure, the exploratory ones "
    "too, so test was seen more often than once. Runs of fewer tokens than their recipe have "
    "a warm-up as much shorter."
)  # fmt: skip
PRINTED = {"valid": "valid_perplexity", "test": "test_perplexity", "train": "train_perplexity"}
# Settings that only runs with latent variable distillation use.
OF_LVD = ("initialization.tokens", "initialization.kmeans.tokens", "initialization.labels")
# Metrics that have a column of their own, or that nobody needs in a table.
KNOWN = {
    *PRINTED.values(), "tokens", "epochs", "step_ms", "tokens_per_second", "peak_memory_gb", "seconds",
    "train_seconds", "best_step", "skipped",
}  # fmt: skip


def main() -> None:
    root = Path.cwd()
    found = {file.stem: records for file in (root / "results").glob("*.json") if (records := read_records(file))}
    if not found:
        raise InputError(f"no results in {root / 'results'}: run this in the root of the repository")
    readme = filled(root / "README.md", {"results": readme_results(found)})
    networks = {"networks": markdown(networks_table(found)), "one rate": markdown(one_rate_table(found))}
    lee = filled(root / "docs" / "lee2025.md", networks)
    places = {name: place for place, name in enumerate(TITLES)}
    ordered = sorted(found, key=lambda name: (places.get(name, len(places)), name))
    text = ["# Results", "", INTRODUCTION, ""]
    for name in ordered:
        text += [*section(name, found[name], root / "docs" / "figures"), ""]
    write_bytes(root / "docs" / "results.md", "\n".join(text).encode())
    write_bytes(root / "README.md", readme.encode())
    write_bytes(root / "docs" / "lee2025.md", lee.encode())


def readme_results(found: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """What README.md says of the results."""
    lines: list[str] = []
    for name in README_STUDIES:
        if name in found:
            rows = main_rows(rows_of(name, found[name]))
            lines += ["", f"**{TITLES[name]}**", "", *table(name, rows, README_COLUMNS)]
    return [*lines, ""]


def filled(file: Path, parts: Mapping[str, Sequence[str]]) -> str:
    """The text of a file with the lines of every part between its marks <!-- name --> and <!-- /name -->."""
    text = file.read_text()
    for name, lines in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if not re.search(f"{begin}.*{end}", text, flags=re.S):
            raise InputError(f"{file.name}: no lines {begin} and {end}; the {name} go between them")
        made = "\n".join([begin, *lines, end])
        text = re.sub(f"{begin}.*{end}", lambda _, made=made: made, text, flags=re.S)  # type: ignore[misc]
    return text


def section(name: str, records: Sequence[dict[str, Any]], figures: Path) -> list[str]:
    """Everything the page says of a study; its figure is written to the folder `figures`."""
    rows = rows_of(name, records)
    lines = [f"## {TITLES.get(name, name)}", "", *table(name, rows), ""]
    figure = draw(name, rows)
    if figure is not None:
        figures.mkdir(parents=True, exist_ok=True)
        figure.savefig(figures / f"{name}.png", dpi=150)
        lines += [f"![{TITLES[name]}](figures/{name}.png)", ""]
    return lines + [line for line in (comparison(name, rows), *remarks(rows, records)) if line]


def table(name: str, rows: Sequence[Row], only: Sequence[str] | None = None) -> list[str]:
    """A Markdown table of a study, a line a row; columns that nothing stands in are left out."""
    columns = columns_of(name, rows)
    if only is not None:
        columns = {title: cell for title, cell in columns.items() if title in only}
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    filled = {title: column for title, column in cells.items() if any(column)}
    names = [escape(row.name + differing(row, rows)) for row in rows]
    return markdown([["", *filled], *(list(line) for line in zip(names, *filled.values(), strict=True))])


def markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """A table of cells, the header first."""
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]


def columns_of(name: str, rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Every column a study may have, by its title: what it says of a row."""
    several = any(len(row.values("test_perplexity")) > 1 for row in rows)
    lee = name.startswith("lee2025")
    columns = {f"paper {title}": printed(metric) for title, metric in PRINTED.items()}
    columns["valid"] = mean_of("valid_perplexity")
    columns["test, min / mean / max" if several else "test"] = spread
    if lee and name not in TRIALS:
        columns["ratio to scalar"] = lambda row: number(ratio(row, rows)[0], "{:.2f}")
        columns["paper's ratio"] = lambda row: number(ratio(row, rows)[1], "{:.2f}")
    columns["train"] = mean_of("train_perplexity")
    columns["tokens"] = tokens
    if lee:
        columns["tokens a second"] = mean_of("tokens_per_second", "{:,.0f}")
    columns["ms a step"] = mean_of("step_ms", "{:.2f}")
    columns |= {"peak GB": mean_of("peak_memory_gb", "{:.2f}"), "minutes": mean_of("seconds", scale=60)}
    for metric in dict.fromkeys(key for row in rows for record in row.records for key in record["metrics"]):
        if metric not in KNOWN:
            columns[escape(metric.replace("_", " "))] = plain_mean(metric)
    columns["sequences left out"] = lambda row: number(row.mean("skipped") or None, "{:.3g}")
    columns["seeds"] = seeds
    return columns


def printed(metric: str) -> Callable[[Row], str]:
    return lambda row: number(row.paper.get(metric), "{:g}")


def mean_of(metric: str, shape: str = "{:.1f}", scale: float = 1) -> Callable[[Row], str]:
    return lambda row: number(row.mean(metric), shape, scale)


def number(value: float | None, shape: str = "{:.1f}", scale: float = 1) -> str:
    return "" if value is None else shape.format(value / scale)


def plain_mean(metric: str) -> Callable[[Row], str]:
    """The mean in as many digits as it has, no powers of ten."""
    return lambda row: number(value := row.mean(metric), "{:,.0f}" if value and value >= 10_000 else "{:g}")


def spread(row: Row) -> str:
    """Test perplexity; least, mean and largest where there are several."""
    values = row.values("test_perplexity")
    shown = [min(values), row.mean("test_perplexity"), max(values)] if len(values) > 1 else values
    return " / ".join(map(number, shown))


def tokens(row: Row) -> str:
    """How much was read, how often, and of how much where the recipe asks for more: 100M of 500M, 2 passes."""
    read, passes = row.values("tokens"), row.values("epochs")
    if not read:
        return ""
    text = "–".join(dict.fromkeys(short(float(f"{count:.3g}")) for count in (min(read), max(read))))
    planned = recipe_settings(row.recipe).get("train.max_tokens")
    if planned and min(read) < 0.99 * planned:
        text += f" of {short(planned)}"
    return text + (f", {max(passes):.3g} pass{'' if max(passes) == 1 else 'es'}" if passes else "")


def seeds(row: Row) -> str:
    """How many, which if it is one, and how many of the runs failed."""
    given = [record["seed"] for record in row.records if "seed" in record]
    text = f"{len(given)} seeds" if len(given) > 1 else "".join(f"seed {seed}" for seed in given)
    return text + (f", {row.stopped} stopped" if row.stopped else "")


def shared_settings(rows: Sequence[Row]) -> dict[str, str]:
    """Settings in which all rows that use them differ, alike, from what they stand for; of a single row all of them."""
    names = dict.fromkeys(name for row in rows for name in unusual(row))
    shared = {}
    for name in names:
        values = {unusual(row).get(name) for row in rows if row.has_lvd or name not in OF_LVD}
        if len(values) == 1:
            shared[name] = str(values.pop())
    return shared


def unusual(row: Row) -> dict[str, str]:
    """Settings in which a row differs from what it stands for, less those that its tokens tell.

    A warm-up that is as much shorter as the run is one of them.
    """
    told_already = {"train.max_tokens"} if row.values("tokens") else set()
    names = ("schedule.warmup_tokens", "train.max_tokens")
    lengths = [settings.get(name) for settings in (recipe_settings(row.recipe), row.told) for name in names]
    if all(lengths):
        planned_warm_up, planned, warm_up, length = (float(str(value)) for value in lengths)
        if isclose(planned_warm_up / planned, warm_up / length, rel_tol=0.1):
            told_already.add("schedule.warmup_tokens")
    return {name: value for name, value in row.told.items() if name not in told_already}


def differing(row: Row, rows: Sequence[Row]) -> str:
    """Settings of a row alone in which it differs from what it stands for."""
    shared = shared_settings(rows)
    told = [setting(_last_part(name), value) for name, value in unusual(row).items() if name not in shared]
    return f" ({', '.join(told)})" if told else ""


def _last_part(name: str) -> str:
    """Of a setting's name, two where one does not say of what."""
    return ".".join(name.split(".")[-2 if name.endswith(".tokens") else -1 :])


def setting(name: str, value: str) -> str:
    """Large numbers as people write them: `train.max_tokens 5M`."""
    large = value.replace(".", "", 1).isdigit() and float(value) >= 100_000
    return f"{name} {short(float(value)) if large else value}"


def comparison(name: str, rows: Sequence[Row]) -> str:
    """What is like the paper: the order of rows, and how many of its rows were run."""
    if not re.search("-(table|figure)", name):
        return ""
    sentences = order_sentences(rows) or ["The paper prints no figures that would order these rows."]
    planned = {run.row for run in STUDIES.get(name, [])}
    missing = planned - {row.name for row in rows}
    if missing:
        sentences.append(f"Not run yet: {len(missing)} of {len(planned)} rows.")
    return escape(" ".join(sentences)) + "\n"


def remarks(rows: Sequence[Row], records: Sequence[dict[str, Any]]) -> list[str]:
    """Settings of all rows, notes of the records, and where, when and with what the runs were made."""
    lines = []
    if shared := shared_settings(rows):
        for whom, names in (
            ("All rows" if len(rows) > 1 else "Settings", [name for name in shared if name not in OF_LVD]),
            ("All rows with LVD" if len(rows) > 1 else "LVD", [name for name in shared if name in OF_LVD]),
        ):
            if names:
                lines.append(f"{whom}: " + escape(", ".join(setting(name, shared[name]) for name in names)) + ".\n")
    if reasons := dict.fromkeys(record["stopped"] for record in records if "stopped" in record):
        lines.append(f"Stopped, because they failed to train: {escape('; '.join(reasons))}.\n")
    notes = dict.fromkeys(part for record in records for part in record.get("note", "").rstrip(".").split("; ") if part)
    if notes:
        lines.append(f"Notes: {escape('; '.join(notes))}.\n")
    parts = []
    for before, key, length in (("", "machine", None), ("commit ", "commit", 7), ("", "date", None)):
        if values := sorted({str(record[key])[:length] for record in records if record.get(key)}):
            parts.append(before + " and ".join(values))
    return [*lines, *([f"Made on {'; '.join(parts)}."] if parts else [])]


def escape(text: str) -> str:
    """Text that Markdown shows as it is, <eos> and all."""
    return text.replace("<", "&lt;").replace("|", "\\|")


if __name__ == "__main__":
    main()
