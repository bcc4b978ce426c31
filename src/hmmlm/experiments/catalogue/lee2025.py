"""Studies of Lee & Berg-Kirkpatrick 2025, section 3: reparameterization."""

from __future__ import annotations

from typing import Any

from hmmlm.experiments.catalogue.run import Run

SEEDS = (42, 52, 62)  # as in Table 5; the first of every row comes before the second of any


def _seeded(*rows: tuple[str, str, float]) -> list[Run]:
    """Row, recipe and the paper's mean perplexity, at 512 states."""
    return [
        Run(row, recipe, seed=seed, paper={"test_perplexity": mean}) for seed in SEEDS for row, recipe, mean in rows
    ]


def _lee_states(states: int, row: str, recipe: str) -> Run:
    return Run(f"{states} states, {row}", recipe, {"model.states": states}, SEEDS[0])


def capacity(states: int, power: int, architecture: str) -> Run:
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


POWERS = range(16, 29, 2)
ARCHITECTURES = ("MLP-ψ", "MLP-ι", "TRF-ψ", "TRF-ι")
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


REPARAMETERIZATION: dict[str, list[Run]] = {
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
    "lee2025-figure2": [capacity(512, power, kind) for power in POWERS for kind in ARCHITECTURES],
    "lee2025-figure11": [capacity(256, power, kind) for power in POWERS for kind in ARCHITECTURES],
    "lee2025-figure12": [capacity(1024, power, "MLP-ψ") for power in POWERS],
}
