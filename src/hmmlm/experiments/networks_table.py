"""Table 4 and Figures 6 and 7 of Lee & Berg-Kirkpatrick 2025 in one table: networks, how they start, how apart states
begin; and Table 4 at one rate for all kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from hmmlm.experiments.catalogue.initialization import APART, TABLE4
from hmmlm.experiments.catalogue.lee2025 import SEEDS
from hmmlm.experiments.summary import Record, Row, rows_of

OWN, LAPTOP = "own decoder", "stories15M, PTB, 128 states"
AS_WORDS, APART_START = "as far apart as words", "further apart"
LOUD = " as it comes"
"""Of kinds in results from before networks and words began at sizes that one rate suits."""
LOUD_START = APART_START + ", sizes as they come"
RANDOM = ("random", "random, LVD")
STARTS = {"lee2025-figure6": AS_WORDS, "lee2025-table4": AS_WORDS, "lee2025-apart": APART_START,
          "lee2025-table4-cpu": APART_START}  # fmt: skip
"""How states begin in the studies of networks."""
Found = Mapping[str, Sequence[Record]]
"""The records of every study."""


def networks_table(found: Found) -> list[list[str]]:
    """Lines of cells, the header first: a line a network and start, a column a kind. Test perplexity at the rate that
    is best on valid with the first seed, of those with a test figure; the mean over seeds; with that rate and their
    number."""
    paper = [f"{printed:g}" for printed in TABLE4.values()]
    lines = [["network", "states begin", *TABLE4], ["TinyLlama-1.1B, the paper's figures", "", *paper]]
    rows = _gathered(found)
    for name in (*APART, LAPTOP):
        for start in (AS_WORDS, LOUD_START, APART_START):
            kinds = [kind for kind in TABLE4 if (name, kind, start) in rows]
            if start == LOUD_START and kinds:  # random networks come at the size that others are brought to
                rows.update({(name, kind, start): rows.get((name, kind, APART_START), []) for kind in RANDOM})
            if kinds:
                lines.append([name, start, *(_cell(rows.get((name, kind, start), [])) for kind in TABLE4)])
    return lines


def one_rate_table(found: Found) -> list[list[str]]:
    """Lines of cells, the header first: a line a network, start and rate with which all four kinds were run, first seed
    and test perplexity; with how many of the six pairs of kinds are in the paper's order."""
    trials = [record for record in found.get("lee2025-networks", []) if record["row"].endswith(", 50M tokens")]
    rows = _gathered({**found, "lee2025-networks": trials}, {**STARTS, "lee2025-networks": AS_WORDS})
    tests: dict[tuple[str, str, float], dict[str, float]] = {}
    for (name, kind, start), same in rows.items():
        for record in (record for row in same for record in row.records if record["seed"] == SEEDS[0]):
            if test := record["metrics"].get("test_perplexity"):
                tests.setdefault((name, start, float(record["settings"]["optimizer.rate"])), {})[kind] = test
    names = (*APART, LAPTOP)
    lines = [["network", "states begin", "rate", *TABLE4, "pairs as printed"]]
    for name, start, rate in sorted(tests, key=lambda key: (names.index(key[0]), *key[1:])):
        four = [tests[name, start, rate].get(kind) for kind in TABLE4]
        known = [test for test in four if test is not None]
        if len(known) == len(four):
            ordered = sum(earlier > later for earlier, later in combinations(known, 2))
            lines.append([name, start, f"{rate:g}", *(f"{test:.1f}" for test in known), f"{ordered} of 6"])
    return lines


def _gathered(found: Found, starts: Mapping[str, str] = STARTS) -> dict[tuple[str, str, str], list[Row]]:
    """The rows of every network, kind and start, a row a rate, in studies with these starts."""
    rows: dict[tuple[str, str, str], list[Row]] = {}
    for study, start in starts.items():
        for row in rows_of(study, found.get(study, [])):
            name, _, kind = re.sub(", rate .*", "", row.name).partition(", ")
            if study == "lee2025-figure6":  # whose only network is ours
                name, kind = OWN, name
            elif study == "lee2025-table4-cpu":
                name = LAPTOP
            loud = LOUD in kind
            rows.setdefault((name, kind.replace(LOUD, ""), LOUD_START if loud else start), []).append(row)
    return rows


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    best = min([row for row in rows if row.values("test_perplexity")] or rows, key=_first_valid)
    rate, tested = float(best.records[0]["settings"]["optimizer.rate"]), best.values("test_perplexity")
    return f"{fmean(tested):.1f} ({rate:g}; {len(tested)})" if tested else f"stopped ({rate:g}; {len(best.records)})"


def _first_valid(row: Row) -> float:
    """Valid perplexity with the first seed, with which rates are chosen; the mean where it was not run. The last to be
    chosen is one that failed to train with any seed."""
    if row.stopped:
        return float("inf")
    first = [record["metrics"]["valid_perplexity"] for record in row.records if record["seed"] == SEEDS[0]]
    return first[0] if first else row.mean("valid_perplexity") or float("inf")
