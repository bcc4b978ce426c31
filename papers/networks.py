"""Table 4 and Figures 6 and 7 of Lee & Berg-Kirkpatrick 2025 in one table: networks, how their states start, kinds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from papers.rows import Results, main_rows
from papers.study import TEST, VALID, Record
from papers.variants import SEEDS


class Kind(NamedTuple):
    """Weights that a network starts from, and whether LVD comes first."""

    weights: str
    """As in `model.weights`."""
    lvd: bool
    paper: float | None = None
    """Test perplexity in Table 4."""


KINDS = {
    "random": Kind("random", False, 365.0),
    "pretrained": Kind("all", False, 333.0),
    "random, LVD": Kind("random", True, 317.0),
    "pretrained, LVD": Kind("all", True, 313.0),
}
"""Rows of Table 4."""
NETWORK = "TinyLlama-1.1B"
"""The network of Table 4."""
LIKE_WORDS, SPREAD_OUT, UNSCALED = "like words", "spread out", "spread out, unscaled"
Key = tuple[str, str, str]
"""Network, spread of its states, kind."""
Runs = dict[float, dict[int, Record]]
"""Records by peak rate and seed."""


def best_rate_table(results: Results) -> list[list[str]]:
    """Return one line per network and spread, one column per kind: mean test perplexity (rate; number of seeds).

    The rate is the best on valid with the first seed, of those with a test result.
    """
    runs = _gathered(results)
    lines = [
        ["network", "states", *KINDS],
        [f"{NETWORK}, paper", "", *(f"{kind.paper:g}" for kind in KINDS.values())],
    ]
    for network, spread in dict.fromkeys((network, spread) for network, spread, _ in runs):
        lines.append([network, spread, *(_best(runs.get((network, spread, kind), {})) for kind in KINDS)])
    return lines


def one_rate_table(results: Results) -> list[list[str]]:
    """Return one line per network, spread and rate at which all kinds were run: test perplexity with the first seed,
    and for the paper's network how many of the six pairs of kinds are in its order."""
    runs = _gathered(results)
    lines = [["network", "states", "rate", *KINDS, "pairs in the paper's order"]]
    for network, spread in dict.fromkeys((network, spread) for network, spread, _ in runs):
        of_kinds = [runs.get((network, spread, kind), {}) for kind in KINDS]
        for rate in sorted(set[float]().union(*of_kinds)):
            tests = [_metric(kind.get(rate, {}), TEST) for kind in of_kinds]
            known = [test for test in tests if test is not None]
            if len(known) == len(KINDS):
                ordered = f"{sum(earlier > later for earlier, later in combinations(known, 2))} of 6"
                count = ordered if network == NETWORK else ""
                lines.append([network, spread, f"{rate:g}", *(f"{test:.1f}" for test in known), count])
    return lines


def _gathered(results: Results) -> dict[Key, Runs]:
    """Return the records of every network, spread and kind, sorted by network and spread; runs that several studies
    share are counted once."""
    runs: dict[Key, Runs] = {}
    networks: list[str] = []
    for rows in results.values():
        for row in main_rows(rows):
            if (start := row.plan.start) is None:
                continue
            networks.append(start.network)
            for spread in start.spreads:
                seeds = runs.setdefault((start.network, spread, start.kind), {}).setdefault(start.rate, {})
                for record in row.records:
                    seeds.setdefault(record["seed"], record)
    spreads = (LIKE_WORDS, UNSCALED, SPREAD_OUT)
    return dict(sorted(runs.items(), key=lambda item: (networks.index(item[0][0]), spreads.index(item[0][1]))))


def _best(runs: Runs) -> str:
    """Return the cell of a kind."""
    if not runs:
        return ""
    tested = {rate: seeds for rate, seeds in runs.items() if _tests(seeds)}
    rate, seeds = min((tested or runs).items(), key=lambda item: _first_valid(item[1]))
    tests = _tests(seeds)
    return f"{fmean(tests):.1f} ({rate:g}; {len(tests)})" if tests else f"stopped ({rate:g}; {len(seeds)})"


def _tests(seeds: Mapping[int, Record]) -> list[float]:
    return [value for record in seeds.values() if (value := record["metrics"].get(TEST)) is not None]


def _metric(seeds: Mapping[int, Record], metric: str) -> float | None:
    """Return the metric of the run with the first seed."""
    return seeds[SEEDS[0]]["metrics"].get(metric) if SEEDS[0] in seeds else None


def _first_valid(seeds: Mapping[int, Record]) -> float:
    """Return valid perplexity with the first seed, the mean if it was not run; infinity if any run failed to train."""
    if any("stopped" in record for record in seeds.values()):
        return float("inf")
    return _metric(seeds, VALID) or fmean(record["metrics"][VALID] for record in seeds.values())
