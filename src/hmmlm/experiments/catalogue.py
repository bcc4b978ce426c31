"""The studies: which runs make up each table and figure of the papers, and what the papers report for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

BASELINE = "baseline"
"""In place of a recipe: a run of `hmmlm baseline`."""


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    row: str
    """The paper's row or point, with the data set."""
    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from the recipe."""
    seed: int = 0
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's metrics for it, where it prints them."""


def _ablation(row: str, recipe: str, train: float, valid: float) -> Run:
    return Run(f"PTB, {row}", recipe, paper={"train_perplexity": train, "valid_perplexity": valid})


def _without_decay(run: Run) -> Run:
    """As in the paper, where dropout of states is the only regularisation; networks then like a larger rate."""
    rate = {} if run.recipe == "ptb-vl-hmm-14-scalar" else {"optimizer.rate": 0.005}
    return replace(run, settings={"optimizer.weight_decay": 0.0, **rate})


def _as_released(run: Run) -> Run:
    """With the released networks and settings, and the paper's schedule: no decay, divided on plateaus."""
    form = {} if run.recipe == "ptb-vl-hmm-14-scalar" else {"model.form": "code"}
    return replace(run, settings={
        **form, "optimizer.rate": 0.01, "optimizer.weight_decay": 0.0, "schedule.kind": "plateau",
        "train.checks_per_epoch": 4,
    })  # fmt: skip


def _baseline(data: str, kind: str, valid: float, test: float) -> Run:
    """A neural baseline of Table 1, as printed but for the schedule, a cosine over fewer epochs."""
    name = {"ptb": "PTB", "wikitext-2": "WikiText-2"}[data]
    settings: dict[str, Any] = {
        "data": data, "tokenizer.split": "whitespace", "model.kind": kind, "train.epochs": 30,
        "train.precision": "bf16-mixed",
    }  # fmt: skip
    if data == "wikitext-2":
        settings["tokenizer.vocab_size"] = 33_278
    row = "LSTM 2x256"
    if kind == "feedforward":
        row = "FF 5-gram 256"
        settings |= {"batch_size": 128, "length": 64}
    return Run(f"{name}, {row}", BASELINE, settings, paper={"valid_perplexity": valid, "test_perplexity": test})


def _valid(value: float) -> dict[str, float]:
    return {"valid_perplexity": value}


def _states(power: int, paper: dict[str, float]) -> Run:
    return Run(f"PTB, 2^{power} states", "ptb-vl-hmm", {"model.states": 2**power}, paper=paper)


def _without_dropout(run: Run) -> Run:
    """Not in the paper: half of the states dropped is too much for a small model."""
    return replace(run, row=f"{run.row}, no dropout", settings={**run.settings, "model.dropout": 0.0})


def _constraint(states: int, blocks: int, paper: float) -> Run:
    settings: dict[str, Any] = {"model.states": states, "model.blocks": blocks}
    return Run(f"PTB, Brown, {states} states, {blocks} blocks", "ptb-vl-hmm", settings, paper=_valid(paper))


def _uniform(states: int, paper: float) -> Run:
    settings: dict[str, Any] = {"model.states": states, "model.structure": "uniform"}
    return Run(f"PTB, uniform, {states} states", "ptb-vl-hmm", settings, paper=_valid(paper))


def _blocks(blocks: int, factored: bool) -> Run:
    """Figure 4; what Tables 3 and 4 print of it."""
    kind = "factored" if factored else "independent"
    printed = {(32, False): 137, (64, False): 138, (128, False): 134, (256, False): 136, (128, True): 136}
    settings = {"model.states": 16384, "model.blocks": blocks, "model.factored": factored}
    paper = _valid(printed[blocks, factored]) if (blocks, factored) in printed else {}
    return Run(f"PTB, {blocks} blocks, {kind} embeddings", "ptb-vl-hmm", settings, paper=paper)


def _beyond(form: str, rate: float, decay: float, what: str = "", **settings: Any) -> Run:
    """The 2^14-state model under other settings, eight epochs, to see what helps."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    common = {"model.form": form, "optimizer.rate": rate, "optimizer.weight_decay": decay, "train.epochs": 8}
    networks = "printed" if form == "paper" else "released"
    row = f"PTB, 2^14, {networks} networks, rate {rate}, decay {decay}" + (f", {what}" if what else "")
    return Run(row, "ptb-vl-hmm-14", {**common, **named})


def _less_dropout(dropout: float, decay: float) -> Run:
    row = f"PTB, 2^15, dropout {dropout}, decay {decay}, 10 epochs"
    return Run(row, "ptb-vl-hmm", {"model.dropout": dropout, "optimizer.weight_decay": decay, "train.epochs": 10})


SEEDS = (42, 52, 62)  # of Lee & Berg-Kirkpatrick, Table 5; the first of every row comes before the second of any


def _seeded(*rows: tuple[str, str, float]) -> list[Run]:
    """Row, recipe and the paper's mean perplexity, at 512 states."""
    return [
        Run(row, recipe, seed=seed, paper={"test_perplexity": mean}) for seed in SEEDS for row, recipe, mean in rows
    ]


def _lee_states(states: int, row: str, recipe: str) -> Run:
    return Run(f"{states} states, {row}", recipe, {"model.states": states}, SEEDS[0])


def _capacity(states: int, power: int, architecture: str) -> Run:
    """A point of Figures 2, 11 and 12; beyond 2^22 rates are halved for each fourfold size, or lower where needed."""
    kind, template = architecture.split("-")
    settings: dict[str, Any] = {"model.capacity": 2**power, "model.mono": template == "ι"}
    rate = (0.003 if kind == "TRF" else 0.01) * 0.5 ** max(0, (power - 22) // 2)
    smaller = {("MLP-ι", 26): 0.001, ("TRF-ψ", 24): 0.0005, ("TRF-ψ", 26): 0.00025}
    settings["optimizer.rate"] = smaller.get((architecture, power), rate)
    if kind == "TRF":
        settings["model.parameterization"] = "transformer"
    recipe = {512: "lee-figure2", 256: "lee-figure11", 1024: "lee-figure12"}[states]
    return Run(f"{states} states, {architecture}, 2^{power} parameters", recipe, settings, SEEDS[0])


TABLE3 = _seeded(
    ("1 layer, ReLU", "lee-table3-relu", 329.5), ("split H, 1 layer, ReLU", "lee-table3-split-relu", 336.6),
    ("2 layers, skip, ReLU", "lee-table3-skip-relu", 336.7),
    ("split H, 2 layers, LayerNorm", "lee-table3-split-norm", 341.2),
    ("split H, 2 layers, skip, ReLU", "lee-table3-split-skip-relu", 342.6),
    ("split H, monolithic, 2 layers, skip, ReLU", "lee-table3-split-mono-skip-relu", 343.5),
    ("1 layer", "lee-table3-linear", 344.4),
)


def _rates() -> list[Run]:
    """Rate and decay of every family, tried on valid before anything else: few tokens, and a warm-up to match."""
    few = {"train.max_tokens": 30_000_000, "schedule.warmup_tokens": 1_500_000}
    transformer = {"model.parameterization": "transformer", "model.capacity": 2**22}
    grid: list[tuple[str, str, dict[str, Any], tuple[tuple[float, float], ...]]] = [
        ("scalar", "lee-table1-scalar", {},
         ((0.04, 0.1), (0.4, 0.1), (0.1, 0.01), (0.1, 0.0), (0.3, 0.0), (1.0, 0.0))),
        ("scalar, eps 1e-6", "lee-table1-scalar", {"optimizer.eps": 1e-6}, ((0.3, 0.0), (1.0, 0.0))),
        ("ablation A", "lee-table1-ablation-a", {}, ((0.003, 0.1), (0.01, 0.1), (0.03, 0.1), (0.01, 0.0))),
        ("ablation A, N(0, 1) tables", "lee-table1-ablation-a", {"model.init": "normal"}, ((0.003, 0.1), (0.01, 0.1))),
        ("ablation B", "lee-table1-ablation-b", {},
         ((0.003, 0.1), (0.01, 0.1), (0.03, 0.1), (0.1, 0.1), (0.01, 0.0), (0.03, 0.0))),
        ("Chiu and Rush", "lee-table1-mlp", {},
         ((0.001, 0.1), (0.003, 0.1), (0.01, 0.1), (0.03, 0.1), (0.01, 0.0))),
        ("a factored", "lee-table2-a", {}, ((0.003, 0.1), (0.01, 0.1), (0.03, 0.1), (0.1, 0.1), (0.4, 0.1))),
        ("b factored", "lee-table2-b", {}, ((0.003, 0.1), (0.01, 0.1), (0.03, 0.1), (0.1, 0.1))),
        *((run.row, run.recipe, {}, ((0.003, 0.1), (0.01, 0.1), (0.03, 0.1)))
          for run in TABLE3 if run.seed == SEEDS[0]),
        *((f"TRF-{'ι' if mono else 'ψ'}", "lee-figure2", {**transformer, "model.mono": mono},
           ((0.0003, 0.1), (0.001, 0.1), (0.003, 0.1), (0.01, 0.1))) for mono in (True, False)),
    ]
    runs = [
        Run(f"{family}, rate {rate:g}, decay {decay:g}", recipe,
            {**few, **settings, "optimizer.rate": rate, "optimizer.weight_decay": decay}, SEEDS[0])
        for family, recipe, settings, pairs in grid for rate, decay in pairs
    ]  # fmt: skip
    return runs + [
        Run(f"Baum-Welch, step {step:g}, pseudocount {count:g}, momentum {momentum:g}", "lee-baum-welch",
            {**few, "optimizer.baum_welch.step": step, "optimizer.baum_welch.pseudocount": count,
             "optimizer.baum_welch.momentum": momentum}, SEEDS[0])
        for step, count, momentum in (
            (0.03, 1e-5, 0.0), (0.1, 1e-5, 0.0), (0.1, 1e-6, 0.0), (0.3, 1e-5, 0.0), (0.6, 1e-5, 0.0), (0.3, 1e-6, 0.0),
            (0.6, 1e-5, 0.9), (1.0, 1e-5, 0.9),
        )
    ]  # fmt: skip


TEACHERS = {
    "stories15M": "teachers/stories15M", "SmolLM2-135M": "teachers/smollm2-135m",
    "TinyLlama-1.1B": "teachers/tinyllama-1.1b",
}
"""Folders, where the runs are started, that the studies of initialization read, weakest teacher first. Of the GGUF
files that the last two come as, `hmmlm teacher --convert` makes them."""
NETWORKS = {"random": "random", "pretrained": "pretrained", "pretrained body": "body"}
"""How a transformer of the teacher's shape starts; with a pretrained body, word vectors are random."""
NETWORK_RATES = {
    "stories15M": {"random": (0.001, 0.003), "pretrained": (0.0003, 0.003), "pretrained body": (0.001, 0.003)},
    "SmolLM2-135M": {"random": (0.0003, 0.0003), "pretrained": (0.0001, 0.0003), "pretrained body": (0.0003, 0.0003)},
    "TinyLlama-1.1B": {"random": (0.0002, 0.0001), "pretrained": (1e-5, 0.0001), "pretrained body": (0.0001, 0.0001)},
}
"""Peak rates of these, without and with LVD: the best on valid of those tried (lee2025-networks)."""
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
            Run("1 layer", "lee-table3-linear"), *(_capacity(512, 22, kind) for kind in ARCHITECTURES)]
    return [
        Run(f"{run.row}, {name}", run.recipe, {**run.settings, **settings}, seed)
        for seed in SEEDS for run in rows for name, settings in (("no LVD", {}), ("LVD", lvd))
    ]


def _embeddings() -> list[Run]:
    """Figure 5, appendix B; all as wide as the teacher."""
    what = {"": {}, "centroids": {"initialization.centroids": True}, "head": {"initialization.head": True},
            "centroids and head": {"initialization.centroids": True, "initialization.head": True}}  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    for name, settings in what.items():
        wide = {"model.hidden": 2048, "optimizer.rate": 0.0025, **settings}  # see `_capacity`
        rows[name or "random embeddings"] = wide
        if name:
            rows[f"{name}, frozen for 20M tokens"] = {**wide, "initialization.frozen_tokens": 20_000_000}
    return [Run(f"LVD, {row}", "lee-lvd-mlp", settings, seed) for seed in SEEDS for row, settings in rows.items()]


def _network(row: str, network: str, lvd: bool, seed: int, paper: float | None = None, **settings: Any) -> Run:
    """A transformer of the teacher's shape, started as one of `NETWORKS`."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    kind = {"initialization.network": NETWORKS[network], "initialization.kind": "lvd" if lvd else "none"}
    return Run(row, "lee-lvd-transformer", {**kind, **named}, seed, {} if paper is None else {"test_perplexity": paper})


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


TABLE4 = [
    _ablation("VL-HMM (2^14)", "ptb-vl-hmm-14", 115, 134),
    _ablation("- neural param", "ptb-vl-hmm-14-scalar", 119, 169),
    _ablation("- state dropout", "ptb-vl-hmm-14-no-dropout", 88, 157),
    _ablation("+ block emb", "ptb-vl-hmm-14-factored", 122, 136),
]
SMALL = [  # of Table 3
    Run("PTB, no constraint, 1024 states", "ptb-vl-hmm",
        {"model.states": 1024, "model.structure": "none"}, paper=_valid(180)),
    _constraint(1024, 4, 182), _constraint(1024, 8, 194), _constraint(8192, 64, 142),
]  # fmt: skip
POWERS = range(16, 29, 2)
ARCHITECTURES = ("MLP-ψ", "MLP-ι", "TRF-ψ", "TRF-ι")

STUDIES: dict[str, list[Run]] = {
    "chiu2020-table1": [
        Run("PTB, VL-HMM 2^15", "ptb-vl-hmm", paper={"valid_perplexity": 125.0, "test_perplexity": 116.0}),
        Run(
            "WikiText-2, VL-HMM 2^15", "wikitext2-vl-hmm",
            paper={"valid_perplexity": 166.6, "test_perplexity": 158.2},
        ),
        _baseline("ptb", "feedforward", 159.9, 152.0), _baseline("ptb", "lstm", 93.6, 88.8),
        _baseline("wikitext-2", "feedforward", 210.9, 195.0), _baseline("wikitext-2", "lstm", 124.5, 117.5),
    ],
    "chiu2020-table3": [
        _constraint(16384, 32, 137), _constraint(16384, 64, 138), _constraint(16384, 128, 134),
        _constraint(16384, 256, 136), *SMALL, _uniform(8192, 150), _uniform(16384, 146), *map(_without_dropout, SMALL),
    ],
    "chiu2020-table4": TABLE4,
    "chiu2020-table4-no-decay": [_without_decay(run) for run in TABLE4],
    "chiu2020-table4-released": [_as_released(run) for run in TABLE4],
    "chiu2020-figure3": [
        *(_states(power, {}) for power in range(10, 14)), _states(14, _valid(134)), _states(15, _valid(125)),
        _states(16, {}), *(_without_dropout(_states(power, {})) for power in range(10, 16)),
    ],
    "chiu2020-figure4": [_blocks(blocks, factored) for blocks in (32, 64, 128, 256) for factored in (False, True)],
    "chiu2020-beyond": [
        _beyond("code", 0.01, 0.0), _beyond("code", 0.01, 0.03), _beyond("paper", 0.01, 0.0),
        _beyond("paper", 0.01, 0.03), _beyond("paper", 0.005, 0.0), _beyond("paper", 0.005, 0.03),
        _beyond("paper", 0.005, 0.1), _beyond("paper", 0.003, 0.1), _beyond("paper", 0.002, 0.03),
        _beyond("paper", 0.01, 0.0, "clusters refined by exchange", model__exchange_passes=10),
        _beyond("paper", 0.01, 0.0, "state carried through <eos>, text in order", batches__shuffle=False,
                batches__reset_at_eos=False, batches__eval_reset_at_eos=False),
        _beyond("paper", 0.01, 0.0, "network dropout 0.1", model__network_dropout=0.1),
        Run("PTB, 2^14, no networks: ablation B of 2025 on blocks", "ptb-vl-hmm-14-linear", {"train.epochs": 8}),
        _less_dropout(0.0, 0.1), _less_dropout(0.0, 0.3), _less_dropout(0.25, 0.3),
    ],
    "chiu2020-cpu": [Run("PTB, 2^12 states, two CPU cores", "ptb-vl-hmm-12-cpu")],
    "chiu2020-largest": [Run("PTB, 2^18 states, one epoch", "ptb-vl-hmm-18")],
    "lee2025-table1": _seeded(
        ("Ablation A (single H)", "lee-table1-ablation-a", 711), ("Ablation B (split H)", "lee-table1-ablation-b", 348),
        ("HMM, scalar", "lee-table1-scalar", 540), ("Chiu and Rush", "lee-table1-mlp", 357),
    ),
    "lee2025-rates": _rates(),
    "lee2025-tuned": [
        _lee_states(states, *row) for states in (512, 4096) for row in (
            ("scalar, tuned", "lee-scalar-tuned"), ("ablation A", "lee-table1-ablation-a"),
            ("ablation B", "lee-table1-ablation-b"), ("Chiu and Rush", "lee-table1-mlp"),
            ("scalar, Baum-Welch", "lee-baum-welch"),
        )
    ],
    "lee2025-table2": _seeded(
        ("nothing factored", "lee-table2-none", 607), ("a factored", "lee-table2-a", 814),
        ("a, π factored", "lee-table2-a-start", 865), ("b factored", "lee-table2-b", 345),
        ("a, b factored", "lee-table2-a-b", 338), ("a, b, π factored", "lee-table2-a-b-start", 337),
    ),
    "lee2025-table3": TABLE3,
    "lee2025-figure1": [
        _lee_states(2**power, *row) for power in range(7, 13) for row in (
            ("scalar", "lee-table1-scalar"), ("scalar, tuned", "lee-scalar-tuned"), ("ablation B", "lee-figure1"),
        )
    ],
    "lee2025-figure2": [_capacity(512, power, kind) for power in POWERS for kind in ARCHITECTURES],
    "lee2025-figure11": [_capacity(256, power, kind) for power in POWERS for kind in ARCHITECTURES],
    "lee2025-figure12": [_capacity(1024, power, "MLP-ψ") for power in POWERS],
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
    "lee2025-table4": _networks({"random": 365, "random, LVD": 317, "pretrained": 333, "pretrained, LVD": 313,
                                 "pretrained body": None, "pretrained body, LVD": None}),
    "lee2025-networks": _network_rates(),
}
