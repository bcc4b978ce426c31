"""Studies of Lee & Berg-Kirkpatrick 2025, sections 4 and 5 and appendix B: initialization."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from hmmlm.experiments.catalogue.lee2025 import ARCHITECTURES, SEEDS, capacity
from hmmlm.experiments.catalogue.run import Run

TEACHERS = {
    "stories15M": "teachers/stories15M", "SmolLM2-135M": "teachers/smollm2-135m",
    "TinyLlama-1.1B": "teachers/tinyllama-1.1b",
}
"""Folders, where the runs are started, that the studies of initialization read, weakest teacher first. Of the GGUF
files that the last two come as, `hmmlm teacher --convert` makes them."""
NETWORKS = {"random": "random", "pretrained": "pretrained", "pretrained body": "body"}
"""How a transformer of the teacher's shape starts; with a pretrained body, word vectors are random."""
TABLE4 = {"random": 365.0, "pretrained": 333.0, "random, LVD": 317.0, "pretrained, LVD": 313.0}
"""Its kinds of networks and what the paper prints for them."""
NETWORK_RATES = {
    "stories15M": {"random": (0.001, 0.003), "pretrained": (0.0003, 0.003), "pretrained body": (0.001, 0.003)},
    "SmolLM2-135M": {"random": (0.0003, 0.0003), "pretrained": (0.0001, 0.0003), "pretrained body": (0.0003, 0.0003)},
    "TinyLlama-1.1B": {"random": (0.0002, 0.0001), "pretrained": (1e-5, 0.0001), "pretrained body": (0.0001, 0.0001)},
}
"""Peak rates of these, without and with LVD, where states begin as far apart as words: the best on valid of those tried
(lee2025-networks)."""
APART: dict[str, dict[str, tuple[float, ...]]] = {
    "own decoder": dict.fromkeys(("random", "pretrained"), (0.0003, 0.001, 0.003, 0.01)),
    "stories15M": dict.fromkeys(TABLE4, (0.001, 0.003, 0.01)),
    "SmolLM2-135M": dict.fromkeys(TABLE4, (0.0003, 0.001, 0.003)),
    "TinyLlama-1.1B": {"random": (0.0002, 0.0004, 0.0008), "pretrained": (0.0002, 0.0004, 0.0008),
                       "random, LVD": (0.0001, 0.0004, 0.0008), "pretrained, LVD": (0.0001, 0.0004, 0.0008)},
}  # fmt: skip
"""Peak rates of these where states begin further apart, which are other ones."""
OWN_TEACHER = "teachers/own"
"""A run of `hmmlm teacher` on the training text."""
NO_LVD = {"initialization.kind": "none", "initialization.teacher": None}


def _teachers() -> list[Run]:
    """Figure 3."""
    rows: dict[str, dict[str, Any]] = {
        "no LVD": NO_LVD, "random TinyLlama-1.1B": {
            "initialization.random_teacher": True, "initialization.kmeans.seed": None},  # another teacher for each seed
        **{name: {"initialization.teacher": path} for name, path in TEACHERS.items()},
    }
    return [Run(row, "lee-lvd-scalar", settings, seed) for seed in SEEDS for row, settings in rows.items()]


def _lvd_architectures() -> list[Run]:
    """Figure 4, and what did best here without LVD; networks have 2^22 parameters."""
    lvd = {"initialization.kind": "lvd", "initialization.teacher": TEACHERS["TinyLlama-1.1B"],
           "initialization.tokens": 10_000_000, "initialization.shared": "runs/shared",
           "initialization.kmeans.tokens": 10_000_000, "initialization.kmeans.seed": SEEDS[0],
           "initialization.kmeans.memory_gb": 48.0}  # fmt: skip
    rows = [Run("scalar", "lee-table1-scalar"), Run("scalar, tuned", "lee-scalar-tuned"),
            Run("scalar, Baum-Welch", "lee-baum-welch"), Run("ablation B", "lee-table1-ablation-b"),
            Run("1 layer", "lee-table3-linear"), *(capacity(512, 22, kind) for kind in ARCHITECTURES)]
    return [
        Run(f"{run.row}, {name}", run.recipe, {**run.settings, **settings}, seed)
        for seed in SEEDS for run in rows for name, settings in (("no LVD", {}), ("LVD", lvd))
    ]


def _embedding_rows(frozen: int) -> dict[str, dict[str, Any]]:
    """Figure 5's rows: what embeddings start from, then that with these held for so many tokens."""
    centroids, head = {"initialization.centroids": True}, {"initialization.head": True}
    rows: dict[str, dict[str, Any]] = {"random embeddings": {}}
    for name, settings in {"centroids": centroids, "head": head, "centroids and head": {**centroids, **head}}.items():
        rows[name] = dict(settings)
        rows[f"{name}, frozen for {frozen / 1e6:g}M tokens"] = {**settings, "initialization.frozen_tokens": frozen}
    return rows


def _embeddings() -> list[Run]:
    """Figure 5, appendix B; all as wide as the teacher."""
    wide = {"model.hidden": 2048, "optimizer.rate": 0.0025}  # see `capacity`
    rows = _embedding_rows(20_000_000)
    return [Run(f"LVD, {row}", "lee-lvd-mlp", {**wide, **settings}, seed)
            for seed in SEEDS for row, settings in rows.items()]  # fmt: skip


def _network(
    row: str, network: str, lvd: bool, seed: int, paper: float | None = None, apart: bool = False, **settings: Any
) -> Run:
    """A transformer of the teacher's shape, started as one of `NETWORKS`; unless `apart`, states begin as far apart as
    words, which is all that the paper may be taken to say."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    kind = {"initialization.network": NETWORKS[network], "initialization.kind": "lvd" if lvd else "none"}
    start = {} if apart else {"initialization.alike": 1.0}
    printed = {} if paper is None else {"test_perplexity": paper}
    return Run(row, "lee-lvd-transformer", {**kind, **start, **named}, seed, printed)


def _networks(kinds: Mapping[str, float | None]) -> list[Run]:
    """Kinds of rows, and what Table 4 prints for them with TinyLlama, with every network."""
    runs = []
    for seed, (name, path), (kind, paper) in product(SEEDS, TEACHERS.items(), kinds.items()):
        network, lvd = kind.removesuffix(", LVD"), kind.endswith(", LVD")
        runs.append(_network(
            f"{name}, {kind}", network, lvd, seed, paper,
            initialization__teacher=path, optimizer__rate=NETWORK_RATES[name][network][lvd],
        ))  # fmt: skip
    return runs


def _network_rates() -> list[Run]:
    """Rates of the networks, tried with few tokens."""
    plan: list[tuple[str, int, tuple[float, ...], tuple[bool, ...], tuple[str, ...]]] = [
        ("stories15M", 50, (0.0003,), (False,), ("random",)),
        ("stories15M", 50, (0.0001,), (False,), ("pretrained",)),
        ("stories15M", 50, (0.001, 0.003), (False, True), ("random", "pretrained body")),
        ("stories15M", 50, (0.0003, 0.001, 0.003), (False, True), ("pretrained",)),
        ("SmolLM2-135M", 10, (0.0003, 0.001, 0.003), (False,), ("random", "pretrained body")),
        ("SmolLM2-135M", 50, (0.0001, 0.0003), (False, True), tuple(NETWORKS)),
        ("TinyLlama-1.1B", 10, (0.0001,), (False,), ("random", "pretrained")),
        ("TinyLlama-1.1B", 50, (0.00003, 0.0001), (False,), ("random", "pretrained")),
        ("TinyLlama-1.1B", 50, (0.0002,), (False,), ("random",)),
        ("TinyLlama-1.1B", 50, (0.00001, 0.00005), (False,), ("pretrained",)),
    ]
    return [
        _network(
            f"{name}, {network}{', LVD' if lvd else ''}, rate {rate:g}, {millions}M tokens", network, lvd, SEEDS[0],
            optimizer__rate=rate, initialization__teacher=TEACHERS[name], train__max_tokens=millions * 1_000_000,
            schedule__warmup_tokens=millions * 50_000,
        )
        for name, millions, rates, lvds, networks in plan
        for lvd, rate, network in product(lvds, rates, networks)
    ]


def _apart() -> list[Run]:
    """Table 4 and Figures 6 and 7 where states begin further apart."""
    folders = {"own decoder": OWN_TEACHER, **TEACHERS}
    rows = [(name, kind, rate) for name, kinds in APART.items() for kind, rates in kinds.items() for rate in rates]
    return [
        _network(f"{name}, {kind}, rate {rate:g}", kind.removesuffix(", LVD"), kind.endswith(", LVD"), seed,
                 apart=True, initialization__teacher=folders[name], optimizer__rate=rate)
        for seed in SEEDS for name, kind, rate in rows
    ]  # fmt: skip


LAPTOP: dict[str, Any] = {
    "model.states": 128, "train.max_tokens": 2_000_000, "schedule.warmup_tokens": 100_000, "batches.batch_size": 32,
    "train.precision": "32-true", "train.log_every": 50, "initialization.teacher": TEACHERS["stories15M"],
}  # fmt: skip
"""What two cores do in minutes: PTB's words and the smallest network."""
LAPTOP_LVD: dict[str, Any] = {"initialization.tokens": 200_000, "initialization.kmeans.tokens": 200_000}


def _table4_on_a_laptop() -> list[Run]:
    """Table 4 on two cores; every rate for every kind."""
    return [
        _network(f"stories15M, {kind}, rate {rate:g}", kind.removesuffix(", LVD"), kind.endswith(", LVD"), seed,
                 apart=True, optimizer__rate=rate, **LAPTOP, **(LAPTOP_LVD if kind.endswith(", LVD") else {}))
        for seed in SEEDS[:2] for rate in (0.0003, 0.001, 0.003, 0.006) for kind in TABLE4
    ]  # fmt: skip


def _figure5_on_a_laptop() -> list[Run]:
    """Figure 5 on two cores, as wide as the teacher; every rate for every row."""
    wide = {**LAPTOP, **LAPTOP_LVD, "model.hidden": 288}
    return [Run(f"{row}, rate {rate:g}", "lee-lvd-mlp", {**wide, "optimizer.rate": rate, **settings}, seed)
            for seed in SEEDS for rate in (0.003, 0.01, 0.03)
            for row, settings in _embedding_rows(800_000).items()]  # fmt: skip


INITIALIZATION: dict[str, list[Run]] = {
    "lee2025-figure3": _teachers(),
    "lee2025-figure4": _lvd_architectures(),
    "lee2025-figure5": _embeddings(),
    "lee2025-figure6": [
        _network(f"{network}, rate {rate:g}", network, False, seed, optimizer__rate=rate,
                 initialization__teacher=OWN_TEACHER)
        for seed in SEEDS for rate in (0.0001, 0.0003, 0.001, 0.003, 0.01) for network in NETWORKS
    ],
    "lee2025-figure7": _networks(dict.fromkeys(NETWORKS)),
    "lee2025-figure8": [
        Run("no LVD", "lee-lvd-scalar", NO_LVD, SEEDS[0]),
        *(Run(f"LVD for {tokens / 1e6:g}M tokens", "lee-lvd-scalar",
              {"initialization.tokens": tokens, "initialization.teacher": TEACHERS["stories15M"]}, SEEDS[0])
          for tokens in (100_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000)),
        # the smallest teacher, because this one reads everything; and once, where the run reads it more often
        Run("LVD to the end", "lee-lvd-scalar", {"initialization.tokens": 500_000_000, "initialization.labels":
            "cached", "initialization.teacher": TEACHERS["stories15M"]}, SEEDS[0]),
    ],
    "lee2025-table4": _networks({**TABLE4, "pretrained body": None, "pretrained body, LVD": None}),
    "lee2025-networks": _network_rates(),
    "lee2025-apart": _apart(),
    "lee2025-table4-cpu": _table4_on_a_laptop(),
    "lee2025-figure5-cpu": _figure5_on_a_laptop(),
}
