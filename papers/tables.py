"""Tables of the studies in Markdown, and the remarks below them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import isclose, isnan

from hmmlm.report.plots import short
from papers.rows import MeasuredRow, main_rows, ratios
from papers.settings import recipe_settings
from papers.study import FORWARD, PARAMETERS, TEST, TRAIN, VALID, Record, Study

LVD_SETTINGS = ("initialization.tokens", "initialization.kmeans.tokens", "initialization.labels")
"""Settings that only runs with latent variable distillation use."""
LISTED_PAIRS = 5
"""Pairs of rows in reversed order that are named; the table shows the others."""


def number(value: float | None, shape: str = "{:.1f}", scale: float = 1) -> str:
    return "" if value is None else shape.format(value / scale)


def _printed(metric: str) -> Callable[[MeasuredRow, Sequence[MeasuredRow]], str]:
    return lambda row, _: number(row.plan.paper.get(metric), "{:g}")


def count(value: float | None) -> str:
    """Return a number of parameters with four digits: 11.35M."""
    return "" if value is None else short(float(f"{value:.4g}"))


def _mean(metric: str, shape: str = "{:.1f}", scale: float = 1) -> Callable[[MeasuredRow, Sequence[MeasuredRow]], str]:
    return lambda row, _: number(row.mean(metric), shape, scale)


def _test(row: MeasuredRow, _: Sequence[MeasuredRow] = ()) -> str:
    """Return test perplexity; min, mean and max if there are several seeds."""
    values = row.values(TEST)
    shown = [min(values), row.mean(TEST), max(values)] if len(values) > 1 else values
    return " / ".join(map(number, shown))


def training(row: MeasuredRow, _: Sequence[MeasuredRow] = ()) -> str:
    """Return the training tokens and the passes, and those of the recipe if it has more: 100M of 500M, 2 passes."""
    read, passes = row.values("tokens"), row.values("epochs")
    if not any(read):  # a combination of models that were trained before
        return ""
    text = "–".join(dict.fromkeys(short(float(f"{count:.3g}")) for count in (min(read), max(read))))
    recipe = recipe_settings(row.recipe)
    most, epochs = recipe.get("train.max_tokens"), recipe.get("train.epochs")
    if most and min(read) < 0.99 * most:
        text += f" of {short(most)}"
    if not passes:
        return text
    text += f", {max(passes):.3g}"
    if epochs and not most and max(passes) < 0.99 * epochs:
        text += f" of {epochs}"
    return f"{text} pass{'' if text.endswith(', 1') else 'es'}"


def seeds(row: MeasuredRow, _: Sequence[MeasuredRow] = ()) -> str:
    """Return the number of seeds, or the seed if it is one, and how many of the runs failed."""
    given = [record["seed"] for record in row.records if "seed" in record]
    text = f"{len(given)} seeds" if len(given) > 1 else "".join(f"seed {seed}" for seed in given)
    return text + (f", {row.stopped} stopped" if row.stopped else "")


COLUMNS: dict[str, Callable[[MeasuredRow, Sequence[MeasuredRow]], str]] = {
    "paper parameters": lambda row, _: count(row.plan.paper.get(PARAMETERS)),
    "parameters": lambda row, _: count(row.mean(PARAMETERS)),
    "paper ms": _printed(FORWARD),
    "forward ms": _mean(FORWARD, "{:.3g}"),
    "paper seconds per epoch": _printed("epoch_seconds"),
    "paper valid": _printed(VALID),
    "paper test": _printed(TEST),
    "paper train": _printed(TRAIN),
    "valid": _mean(VALID),
    "test": _test,
    "ratio to scalar": lambda row, rows: number(ratios(row, rows)[0], "{:.2f}"),
    "paper's ratio": lambda row, rows: number(ratios(row, rows)[1], "{:.2f}"),
    "train": _mean(TRAIN),
    "tokens": training,
    "tokens per second": _mean("tokens_per_second", "{:,.0f}"),
    "ms per step": _mean("step_ms", "{:.2f}"),
    "peak GB": _mean("peak_memory_gb", "{:.3g}"),
    "minutes": _mean("seconds", scale=60),
    "sequences left out": lambda row, _: number(row.mean("skipped") or None, "{:.3g}"),
    "seeds": seeds,
}
"""Columns by header: the cell of a row, given all rows of the study."""
METRICS_WITH_COLUMNS = {
    VALID,
    TEST,
    TRAIN,
    "tokens",
    "epochs",
    "tokens_per_second",
    "step_ms",
    "peak_memory_gb",
    "seconds",
    "train_seconds",
    "best_step",
    "skipped",
    FORWARD,
}


def study_table(study: Study, rows: Sequence[MeasuredRow]) -> list[str]:
    """Return the lines of a study's table; columns without any value are left out."""
    columns = {name: COLUMNS[name] for name in study.columns}
    metrics = dict.fromkeys(metric for row in rows for record in row.records for metric in record["metrics"])
    for metric in metrics:
        if metric not in METRICS_WITH_COLUMNS:
            columns[study.headers.get(metric, metric.replace("_", " "))] = _plain_mean(metric)
    columns |= {name: COLUMNS[name] for name in ("sequences left out", "seeds")}
    cells = {name: [cell(row, rows) for row in rows] for name, cell in columns.items()}
    filled = {name: column for name, column in cells.items() if any(column)}
    several = any(len(row.values(TEST)) > 1 for row in rows)
    header = ["test, min / mean / max" if name == "test" and several else escape(name) for name in filled]
    names = [escape(row.name + own_overrides(row, rows)) for row in rows]
    return markdown([["", *header], *(list(line) for line in zip(names, *filled.values(), strict=True))])


def _plain_mean(metric: str) -> Callable[[MeasuredRow, Sequence[MeasuredRow]], str]:
    return lambda row, _: number(value := row.mean(metric), "{:,.0f}" if value and value >= 10_000 else "{:g}")


def markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table from rows of cells, header first."""
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    return [texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]


def escape(text: str) -> str:
    """Escape what Markdown would not show as it is."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text).replace("<", "&lt;")


# --- settings that differ from the plan ---


def _shown_overrides(row: MeasuredRow) -> dict[str, str]:
    """Return the overrides of a row, without those that its number of tokens implies."""
    implied = {"train.max_tokens"} if row.values("tokens") else set()
    planned, own = (_warmup_fraction(settings) for settings in (recipe_settings(row.recipe), row.overrides))
    if planned and own and isclose(planned, own, rel_tol=0.1):
        implied.add("schedule.warmup")
    return {name: value for name, value in row.overrides.items() if name not in implied}


def _warmup_fraction(settings: Mapping[str, object]) -> float | None:
    """Return the warm-up as a fraction of all training tokens; None if it is not known."""
    warmup, length = settings.get("schedule.warmup"), settings.get("train.max_tokens")
    if not warmup or not length:
        return None
    return float(str(warmup)) / (1 if float(str(warmup)) < 1 else float(str(length)))


def _shared_overrides(rows: Sequence[MeasuredRow]) -> dict[str, str]:
    """Return the overrides that all rows have to which they apply."""
    shared = {}
    for name in dict.fromkeys(name for row in rows for name in _shown_overrides(row)):
        values = {_shown_overrides(row).get(name) for row in rows if row.has_lvd or name not in LVD_SETTINGS}
        if len(values) == 1:
            shared[name] = str(values.pop())
    return shared


def own_overrides(row: MeasuredRow, rows: Sequence[MeasuredRow]) -> str:
    """Return the overrides of a row that others do not share, to follow its name."""
    shared = _shared_overrides(rows)
    own = [_setting(_last_part(name), value) for name, value in _shown_overrides(row).items() if name not in shared]
    return f" ({', '.join(own)})" if own else ""


def _last_part(name: str) -> str:
    """Return the last part of a dotted name, two if one would be ambiguous."""
    return ".".join(name.split(".")[-2 if name.endswith((".tokens", ".teacher", ".kind")) else -1 :])


def _setting(name: str, value: str) -> str:
    """Return a setting with large numbers abbreviated: `train.max_tokens 5M`."""
    large = value.replace(".", "", 1).isdigit() and float(value) >= 100_000
    return f"{name} {short(float(value)) if large else value}"


# --- text below a table ---


def comparison(study: Study, rows: Sequence[MeasuredRow]) -> str:
    """Return how the order of rows compares with the paper's, and which rows have no record."""
    sentences = order_sentences(rows)
    planned = [row.name for row in study.rows]
    missing = [name for name in planned if name not in {row.name for row in rows}]
    if missing:
        sentences.append(f"No record for {len(missing)} of {len(planned)} rows: {'; '.join(missing)}.")
    return escape(" ".join(sentences))


def order_sentences(rows: Sequence[MeasuredRow]) -> list[str]:
    """Return how many pairs of rows are in the paper's order, by each perplexity that it prints."""
    sentences = []
    for split, metric in (("validation", VALID), ("test", TEST)):
        known = [
            (row, row.plan.paper[metric], mean)
            for row in main_rows(rows)
            if metric in row.plan.paper and (mean := row.mean(metric)) is not None and not isnan(mean)
        ]
        pairs = [
            (a, b) if a[1] < b[1] else (b, a)
            for a, b in combinations(known, 2)
            if a[0].plan.group == b[0].plan.group and a[1] != b[1]
        ]
        if not pairs:
            continue
        reversed_pairs = [(a, b) for a, b in pairs if a[2] > b[2]]
        agree = f"{len(pairs) - len(reversed_pairs)} of {len(pairs)} pair{'s' * (len(pairs) > 1)}"
        sentence = f"Order by {split} perplexity: as in the paper for {agree} of rows"
        if reversed_pairs:
            named = [_reversed_pair(a, b) for a, b in reversed_pairs[:LISTED_PAIRS]]
            more = len(reversed_pairs) - len(named)
            sentence += f"; reversed for {', '.join(named)}" + (f", and {more} more" if more else "")
        sentences.append(sentence + ".")
    return sentences


def _reversed_pair(better: tuple[MeasuredRow, float, float], worse: tuple[MeasuredRow, float, float]) -> str:
    """Return the text of a pair of rows, each with the paper's number and ours."""
    (a, paper_a, ours_a), (b, paper_b, ours_b) = better, worse
    return f"“{a.name}” and “{b.name}” (paper {paper_a:g} and {paper_b:g}, here {ours_a:.1f} and {ours_b:.1f})"


def remarks(rows: Sequence[MeasuredRow], records: Sequence[Record]) -> list[str]:
    """Return shared settings, reasons of failure, notes, and where, when and with what the runs were made."""
    lines = []
    shared = _shared_overrides(rows)
    several = len(rows) > 1
    for scope, names in (
        ("All rows" if several else "Settings", [name for name in shared if name not in LVD_SETTINGS]),
        ("All rows with LVD" if several else "LVD", [name for name in shared if name in LVD_SETTINGS]),
    ):
        if names:
            lines.append(f"{scope}: " + escape(", ".join(_setting(name, shared[name]) for name in names)) + ".")
    if reasons := dict.fromkeys(record["stopped"] for record in records if "stopped" in record):
        lines.append(f"Stopped because training failed: {escape('; '.join(reasons))}.")
    notes = dict.fromkeys(part for record in records for part in record.get("note", "").rstrip(".").split("; ") if part)
    if notes:
        lines.append(f"Notes: {escape('; '.join(notes))}.")
    return [*lines, *_provenance(records)]


def _provenance(records: Sequence[Mapping[str, object]]) -> list[str]:
    parts = []
    for before, key, length in (("", "machine", None), ("commit ", "commit", 7), ("", "date", None)):
        if values := sorted({str(record[key])[:length] for record in records if record.get(key)}):
            parts.append(before + " and ".join(values))
    return [f"Made on {'; '.join(parts)}."] if parts else []
