"""Studies of Lee & Berg-Kirkpatrick 2025, section 5: pretrained networks (Table 4, Figures 6 and 7)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from papers.lee2025 import AXIS, FURTHER_SEEDS, M50, row
from papers.lee2025_capacity import capacity
from papers.lee2025_initialization import NO_WEIGHTS, PRINTED_TEACHERS, PTB_TOKENS, TWO_CORES, TWO_CORES_LVD
from papers.networks import KINDS, LIKE_WORDS, SPREAD_OUT, UNSCALED, Kind, best_rate_table, one_rate_table
from papers.study import (
    LEE,
    LEE_NETWORKS,
    LEE_TRIALS,
    TEST,
    UNSPENT,
    Bars,
    Cell,
    Claim,
    Lines,
    NetworkStart,
    NotRun,
    Study,
    StudyRow,
    Summary,
)
from papers.ticks import plain_number, power_of_ten
from papers.variants import SEEDS, SHORT_LVD, TEACHERS

OWN, PAPERS_NETWORK = "own decoder", "TinyLlama-1.1B"
FOLDERS = {OWN: "teachers/own", **TEACHERS, **PRINTED_TEACHERS}
"""Networks by name; the first is a run of `hmmlm teacher` on the training text."""
ON_TWO_CORES = "stories15M, PTB, 128 states"
BODY, BODY_LVD = "pretrained body", "pretrained body, LVD"
ALL_KINDS = {**KINDS, BODY: Kind("body", False), BODY_LVD: Kind("body", True)}
"""With a pretrained body only the blocks are pretrained, and word vectors are random."""
NO_LVD_KINDS = ("random", "pretrained", BODY)


def _network(name: str, kind: str, start: NetworkStart | None, settings: dict[str, Any], **labels: Any) -> StudyRow:
    """Return a row of a transformer of the teacher's shape that starts as `kind`."""
    weights, lvd, _ = ALL_KINDS[kind]
    options = {"model.weights": weights, "initialization.kind": "lvd" if lvd else "none"}
    options |= {**SHORT_LVD, "initialization.teacher": settings["model.teacher"]} if lvd else {}
    options |= {**M50, **settings}
    return row(name, "lee-lvd-transformer", options, start=start, **labels)


def _like_words(name: str, network: str, kind: str, rate: float, *, compared: bool = True, **labels: Any) -> StudyRow:
    """Return a row whose states start as far apart as words, the plainest reading of the paper."""
    settings = {"model.max_initial_similarity": 1.0, "model.teacher": FOLDERS[network], "optimizer.lr": rate}
    start = NetworkStart(network, kind, (LIKE_WORDS,), rate) if compared and kind in KINDS else None
    return _network(name, kind, start, {**settings, **labels.pop("settings", {})}, **labels)


RATES: dict[str, dict[str, float]] = {
    "stories15M": {
        "random": 0.001,
        "pretrained": 0.0003,
        BODY: 0.001,
        "random, LVD": 0.003,
        "pretrained, LVD": 0.003,
        BODY_LVD: 0.003,
    },
    "SmolLM2-135M": {**dict.fromkeys(ALL_KINDS, 0.0003), "pretrained": 0.0001},
    "TinyLlama-1.1B": {**dict.fromkeys(ALL_KINDS, 0.0001), "random": 0.0002, "pretrained": 1e-5},
}
"""Peak rates where states start like words: the best on valid of those tried in lee2025-networks."""


def _table4(network: str, kind: str, **labels: Any) -> StudyRow:
    rate = RATES[network][kind]
    return _like_words(f"{network}, {kind}", network, kind, rate, seeds=SEEDS, group=network, **labels)


def _table4_row(network: str, kind: str) -> StudyRow:
    printed = ALL_KINDS[kind].paper if network == PAPERS_NETWORK else None
    return _table4(network, kind, paper={} if printed is None else {TEST: printed})


NO_TINYLLAMA_BODY = NotRun(
    UNSPENT,
    rows=tuple(f"TinyLlama-1.1B, {kind}" for kind in (BODY, BODY_LVD)),
)
FIGURE6_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01)


def _by_rate(rates: Sequence[float], better: str, worse: str) -> dict[str, tuple[Cell, ...]]:
    """Return the comparison of two kinds of Figure 6 at several rates."""
    return {f"rate {rate:g}": tuple(Cell(f"{kind}, rate {rate:g}", kind) for kind in (better, worse)) for rate in rates}


APART_BEST = {
    "stories15M": {"random": 0.003, "pretrained": 0.003, "random, LVD": 0.003, "pretrained, LVD": 0.003},
    "SmolLM2-135M": {"random": 0.001, "pretrained": 0.003, "random, LVD": 0.001, "pretrained, LVD": 0.003},
    "TinyLlama-1.1B": {"random": 0.0004, "pretrained": 0.0004, "random, LVD": 0.0001, "pretrained, LVD": 0.0004},
}
"""The best rate on valid in lee2025-apart, with the first seed, of those with a test result."""
LVD_KINDS = ("pretrained, LVD", "random, LVD")


def _apart_cell(network: str, kind: str) -> Cell:
    return Cell(f"{network}, {kind}, rate {APART_BEST[network][kind]:g}", kind, study="lee2025-apart")


def _best_to_worst(network: str) -> tuple[Cell, ...]:
    """Return the cells of Table 4 in the order of the paper."""
    return tuple(Cell(f"{network}, {kind}", kind) for kind in reversed(KINDS))


FIGURE6 = Study(
    name="lee2025-figure6",
    title=f"{LEE.name}, Figure 6: a pretrained network and the learning rate",
    topic=LEE_NETWORKS,
    paper=LEE,
    rows=tuple(
        _like_words(f"{kind}, rate {rate:g}", OWN, kind, rate, seeds=SEEDS, series=kind, x=rate)
        for rate in FIGURE6_RATES
        for kind in NO_LVD_KINDS
    ),
    not_run=(FURTHER_SEEDS,),
    drawing=Lines(TEST, AXIS, "peak learning rate", plain_number),
    claims=(
        Claim(
            "A pretrained network outperforms a random one at low learning rates.",
            "ascending",
            _by_rate(FIGURE6_RATES[:2], "pretrained", "random"),
        ),
        Claim(
            "High learning rates cancel the benefit: a random network is better.",
            "ascending",
            _by_rate(FIGURE6_RATES[2:], "random", "pretrained"),
        ),
        Claim(
            "Transfer is beneficial if the rate is properly tuned (the best rate of each on valid; states like words, "
            "as in the paper, or spread out).",
            "ascending",
            {
                LIKE_WORDS: (
                    Cell("pretrained, rate 0.001", "pretrained"),
                    Cell("random, rate 0.003", "random"),
                ),
                SPREAD_OUT: (
                    Cell(f"{OWN}, pretrained, rate 0.003", "pretrained", study="lee2025-apart"),
                    Cell(f"{OWN}, random, rate 0.003", "random", study="lee2025-apart"),
                ),
            },
        ),
    ),
)
CHECKPOINTS = ("TinyLlama-1.1B, 500B tokens", "TinyLlama-1.1B, 3T tokens")
"""Networks of the paper by what they were pretrained on."""


def _checkpoint(name: str) -> StudyRow:
    rate = RATES[PAPERS_NETWORK]["pretrained"]
    labels = {"seeds": SEEDS, "bar": name, "series": "pretrained"}
    return _like_words(f"{name}, pretrained", name, "pretrained", rate, compared=False, **labels)


FIGURE7 = Study(
    name="lee2025-figure7",
    title=f"{LEE.name}, Figure 7: the networks of pretrained transformers",
    topic=LEE_NETWORKS,
    paper=LEE,
    rows=(
        *(_table4(network, kind, bar=network, series=kind) for network in TEACHERS for kind in NO_LVD_KINDS),
        *map(_checkpoint, CHECKPOINTS),
    ),
    not_run=(
        NotRun(NO_WEIGHTS, rows=tuple(f"{name}, pretrained" for name in CHECKPOINTS)),
        FURTHER_SEEDS,
        NO_TINYLLAMA_BODY,
    ),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "A pretrained network outperforms a random one, at the best rate of each.",
            "ascending",
            {
                network: tuple(Cell(f"{network}, {kind}", kind) for kind in ("pretrained", "random"))
                for network in TEACHERS
            },
        ),
        Claim(
            "The same with states spread out and a rate for each kind.",
            "ascending",
            {network: tuple(_apart_cell(network, kind) for kind in ("pretrained", "random")) for network in TEACHERS},
        ),
        Claim(
            "More pretraining of the network does not help (within 3%).",
            "similar",
            {"": tuple(Cell(f"{name}, pretrained", name.partition(", ")[2]) for name in CHECKPOINTS)},
            tolerance=0.03,
        ),
        Claim(
            "Much smaller networks with random weights do as well as TinyLlama, or better.",
            "ascending",
            {
                f"TinyLlama {kind}": (
                    Cell(small, small.removeprefix("512 states, "), study="lee2025-figure2"),
                    Cell(f"TinyLlama-1.1B, {kind}", f"TinyLlama {kind}"),
                )
                for kind in ("pretrained", "random")
                for small in [capacity(512, 22, "TRF-ι").name]
            },
        ),
    ),
)
TABLE4 = Study(
    name="lee2025-table4",
    title=f"{LEE.name}, Table 4: pretrained networks and LVD (the paper's network is TinyLlama-1.1B)",
    topic=LEE_NETWORKS,
    paper=LEE,
    rows=tuple(_table4_row(network, kind) for network in TEACHERS for kind in ALL_KINDS),
    not_run=(FURTHER_SEEDS, NO_TINYLLAMA_BODY),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            f"Best to worst: pretrained with LVD, random with LVD, pretrained, random (the paper's network, "
            f"{PAPERS_NETWORK}).",
            "ascending",
            {"": _best_to_worst(PAPERS_NETWORK)},
        ),
        Claim(
            "The same with smaller networks, which the paper does not have.",
            "ascending",
            {network: _best_to_worst(network) for network in TEACHERS if network != PAPERS_NETWORK},
        ),
        Claim(
            "Transfer adds nothing significant to LVD (within 2%).",
            "similar",
            {network: tuple(Cell(f"{network}, {kind}", kind) for kind in LVD_KINDS) for network in TEACHERS},
            tolerance=0.02,
        ),
        Claim(
            "The same with states spread out and a rate for each kind.",
            "similar",
            {network: tuple(_apart_cell(network, kind) for kind in LVD_KINDS) for network in TEACHERS},
            tolerance=0.02,
        ),
    ),
    summaries=(
        Summary(
            "Pretrained networks at the best rate of each kind",
            "Test perplexity after 50M tokens (2M on PTB), mean over seeds (peak rate; number of seeds). The rate is "
            "the best on valid with seed 42, of those with a test result. Column “states”: *like words*, state "
            "embeddings are drawn with the spread of word vectors (`model.max_initial_similarity = 1`), the plainest "
            "reading of the paper; *spread out*, they are scaled up until at most a fifth of the network's output is "
            "common to all states (`0.2`, the default); *unscaled*, before commit 616d6b9 scaled the outputs and word "
            "vectors of pretrained networks to one size. Random networks have that size from the start, so they count "
            "for both.",
            best_rate_table,
        ),
        Summary(
            "Pretrained networks at one rate for all kinds",
            "Test perplexity with seed 42 wherever all four kinds were run at the same peak rate, and how many of the "
            "six pairs of kinds are in the order of Table 4. This table was made after the runs, which were meant for "
            "the table above.",
            one_rate_table,
        ),
    ),
)


TWICE = {"TinyLlama-1.1B, pretrained, rate 3e-05, 50M tokens"}
"""Trials with two seeds."""


def _trial(network: str, kind: str, rate: float, millions: int) -> StudyRow:
    name = f"{network}, {kind}, rate {rate:g}, {millions}M tokens"
    short_run = {"train.max_tokens": millions * 1_000_000, "schedule.warmup": millions * 50_000}
    seeds = SEEDS[: 2 if name in TWICE else 1]
    return _like_words(name, network, kind, rate, compared=millions == 50, settings=short_run, seeds=seeds)


_TRIALS: tuple[tuple[str, int, tuple[float, ...], tuple[str, ...]], ...] = (
    ("stories15M", 50, (0.0003,), ("random",)),
    ("stories15M", 50, (0.0001,), ("pretrained",)),
    ("stories15M", 50, (0.001, 0.003), ("random", BODY)),
    ("stories15M", 50, (0.001, 0.003), ("random, LVD", BODY_LVD)),
    ("stories15M", 50, (0.0003, 0.001, 0.003), ("pretrained",)),
    ("stories15M", 50, (0.0003, 0.001, 0.003), ("pretrained, LVD",)),
    ("SmolLM2-135M", 10, (0.0003, 0.001, 0.003), ("random", BODY)),
    ("SmolLM2-135M", 50, (0.0001, 0.0003), NO_LVD_KINDS),
    ("SmolLM2-135M", 50, (0.0001, 0.0003), ("random, LVD", "pretrained, LVD", BODY_LVD)),
    ("TinyLlama-1.1B", 10, (0.0001,), ("random", "pretrained")),
    ("TinyLlama-1.1B", 50, (0.00003, 0.0001), ("random", "pretrained")),
    ("TinyLlama-1.1B", 50, (0.0002,), ("random",)),
    ("TinyLlama-1.1B", 50, (0.00001, 0.00005), ("pretrained",)),
    ("TinyLlama-1.1B", 50, (0.0001,), ("pretrained, LVD", "random, LVD")),
)
NETWORK_RATES = Study(
    name="lee2025-networks",
    title="Rates of the networks of pretrained transformers, tried on few tokens",
    topic=LEE_TRIALS,
    paper=LEE,
    trials=True,
    rows=tuple(
        _trial(network, kind, rate, millions)
        for network, millions, rates, kinds in _TRIALS
        for rate, kind in product(rates, kinds)
    ),
    not_run=(
        NotRun(
            UNSPENT,
            rows=(
                "stories15M, pretrained, rate 0.003, 50M tokens",
                "stories15M, pretrained, LVD, rate 0.0003, 50M tokens",
                "SmolLM2-135M, pretrained, LVD, rate 0.0001, 50M tokens",
            ),
        ),
    ),
)


def _apart(network: str, kind: str, rate: float) -> StudyRow:
    """Return a row whose states are spread out; random networks need no scaling, so they count for both choices."""
    spreads = (SPREAD_OUT, UNSCALED) if ALL_KINDS[kind].weights == "random" else (SPREAD_OUT,)
    start = NetworkStart(network, kind, spreads, rate)
    settings = {"model.teacher": FOLDERS[network], "optimizer.lr": rate}
    labels = {"seeds": SEEDS, "series": network, "style": kind, "x": rate, "drawn": not ALL_KINDS[kind].lvd}
    return _network(f"{network}, {kind}, rate {rate:g}", kind, start, settings, **labels)


def _unscaled(network: str, kind: str, name: str, rate: float) -> StudyRow:
    """Return a row of earlier code, which did not scale pretrained networks; it can no longer be run."""
    return StudyRow(
        name=f"{network}, {name}, rate {rate:g}",
        start=NetworkStart(network, kind, (UNSCALED,), rate),
        series=network,
        style="pretrained, unscaled",
        x=rate,
        drawn=not ALL_KINDS[kind].lvd,
    )


APART_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    OWN: dict.fromkeys(("random", "pretrained"), (0.0003, 0.001, 0.003, 0.01)),
    "stories15M": dict.fromkeys(KINDS, (0.001, 0.003, 0.01)),
    "SmolLM2-135M": dict.fromkeys(KINDS, (0.0003, 0.001, 0.003)),
    "TinyLlama-1.1B": {
        "random": (0.0002, 0.0004, 0.0008),
        "pretrained": (0.0002, 0.0004, 0.0008),
        "random, LVD": (0.0001, 0.0004, 0.0008),
        "pretrained, LVD": (0.0001, 0.0004, 0.0008),
    },
}
UNSCALED_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    OWN: {"pretrained": (0.0003, 0.001, 0.003, 0.01)},
    "stories15M": {"pretrained": (0.0001, 0.0003, 0.001, 0.002, 0.003), "pretrained, LVD": (0.001, 0.003)},
    "SmolLM2-135M": {"pretrained": (0.0001, 0.0003, 0.001, 0.003), "pretrained, LVD": (0.0003, 0.001)},
    "TinyLlama-1.1B": {"pretrained": (1e-5, 3e-5, 0.0001, 0.0004, 0.001), "pretrained, LVD": (0.0001, 0.0004)},
}
UNSCALED_NAMES = {"pretrained": "pretrained as it comes", "pretrained, LVD": "pretrained as it comes, LVD"}
APART = Study(
    name="lee2025-apart",
    title=f"{LEE.name}, Table 4 and Figures 6 and 7 with states spread out, and the learning rate",
    topic=LEE_NETWORKS,
    paper=LEE,
    trials=True,
    rows=(
        *(
            _apart(network, kind, rate)
            for network, kinds in APART_RATES.items()
            for kind, rates in kinds.items()
            for rate in rates
        ),
        *(
            _unscaled(network, kind, UNSCALED_NAMES[kind], rate)
            for network, kinds in UNSCALED_RATES.items()
            for kind, rates in kinds.items()
            for rate in rates
        ),
    ),
    not_run=(
        FURTHER_SEEDS,
        NotRun(
            UNSPENT,
            rows=tuple(f"TinyLlama-1.1B, {kind}, rate 0.0008" for kind in ("random", "random, LVD", "pretrained, LVD")),
        ),
    ),
    drawing=Lines(TEST, AXIS, "peak learning rate", power_of_ten, top=340),
)


def _on_two_cores(kind: str, rate: float) -> StudyRow:
    settings = {"model.teacher": TEACHERS["stories15M"], "optimizer.lr": rate, **TWO_CORES}
    settings |= TWO_CORES_LVD if KINDS[kind].lvd else {}
    start = NetworkStart(ON_TWO_CORES, kind, (SPREAD_OUT,), rate)
    labels = {"seeds": SEEDS[:2], "series": kind, "x": rate}
    return _network(f"stories15M, {kind}, rate {rate:g}", kind, start, settings, **labels)


TABLE4_CPU = Study(
    name="lee2025-table4-cpu",
    title=f"{LEE.name}, Table 4 on two CPU cores: PTB, 128 states, the network of stories15M",
    topic=LEE_NETWORKS,
    paper=LEE,
    trials=True,
    device="CPU",
    data=PTB_TOKENS,
    rows=tuple(_on_two_cores(kind, rate) for rate in (0.0003, 0.001, 0.003, 0.006) for kind in KINDS),
    not_run=(FURTHER_SEEDS,),
    drawing=Lines(TEST, AXIS, "peak learning rate", plain_number, top=330),
)
