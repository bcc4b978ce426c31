"""Studies of Lee & Berg-Kirkpatrick 2025, *Optimizing Hidden Markov Language Models*, section 3: reparameterization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from papers.study import (
    LEE,
    LEE_FORMS,
    LEE_TRIALS,
    RATIO_COLUMNS,
    TEST,
    UNSPENT,
    Bars,
    Cell,
    Claim,
    Lines,
    NotRun,
    Study,
    StudyRow,
)
from papers.ticks import power_of_two
from papers.variants import SEEDS

AXIS = "test perplexity (lower is better)"


def _length(millions: int) -> dict[str, Any]:
    """Return the settings of a run of fewer tokens than the recipes' 500M: its warm-up is shorter in proportion."""
    return {"train.max_tokens": millions * 1_000_000, "schedule.warmup": millions * 50_000}


M100, M50 = _length(100), _length(50)
FURTHER_SEEDS = NotRun("not all of the three seeds of the paper", seeds=SEEDS[1:])


def row(name: str, recipe: str, settings: Mapping[str, Any] | None = None, **labels: Any) -> StudyRow:
    """Return a row that is run with the first of the paper's seeds."""
    return StudyRow(name=name, recipe=recipe, settings=settings or {}, **{"seeds": SEEDS[:1], **labels})


def _printed(name: str, recipe: str, test: float, **labels: Any) -> StudyRow:
    """Return a row of a table of the paper: three seeds, and the mean that it prints."""
    return row(name, recipe, **{"seeds": SEEDS, "paper": {TEST: test}, **labels})


TABLE1 = Study(
    name="lee2025-table1",
    title=f"{LEE.name}, Table 1: linear reparameterizations",
    topic=LEE_FORMS,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=(
        _printed("Ablation A (single H)", "lee-table1-ablation-a", 711),
        _printed(
            "Ablation B (split H)", "lee-table1-ablation-b", 348, headline="Linear reparameterization (ablation B)"
        ),
        _printed("HMM, scalar", "lee-table1-scalar", 540, is_baseline=True, headline="Scalar HMM, printed settings"),
        _printed("Chiu and Rush", "lee-table1-mlp", 357),
    ),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "Split linear factors (ablation B) are better than networks, networks better than the scalar HMM, and a "
            "single factor (ablation A) is worst.",
            "ascending",
            {
                "": (
                    Cell("Ablation B (split H)", "B"),
                    Cell("Chiu and Rush", "networks"),
                    Cell("HMM, scalar", "scalar"),
                    Cell("Ablation A (single H)", "A"),
                )
            },
        ),
    ),
)


def _tuned(states: int, name: str, recipe: str, **labels: Any) -> StudyRow:
    group, settings = f"{states} states", {"model.num_states": states, **(M100 if states == 512 else M50)}
    return row(f"{group}, {name}", recipe, settings, group=group, series=group, bar=name, **labels)


TUNED = Study(
    name="lee2025-tuned",
    title=f"{LEE.name}, Table 1 with every family tuned for itself, at 512 and 4,096 states",
    topic=LEE_FORMS,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=(
        _tuned(512, "scalar, tuned", "lee-scalar-tuned", is_baseline=True),
        _tuned(512, "ablation A", "lee-table1-ablation-a"),
        _tuned(512, "ablation B", "lee-table1-ablation-b"),
        _tuned(512, "Chiu and Rush", "lee-table1-mlp"),
        _tuned(
            512,
            "scalar, Baum-Welch",
            "lee-baum-welch",
            headline="Scalar HMM, Baum-Welch instead of AdamW",
            also=({"optimizer.pseudocount": 1e-5},),
        ),
        _tuned(4096, "scalar, tuned", "lee-scalar-tuned", is_baseline=True),
        _tuned(4096, "ablation A", "lee-table1-ablation-a"),
        _tuned(4096, "ablation B", "lee-table1-ablation-b"),
        _tuned(4096, "Chiu and Rush", "lee-table1-mlp", also=({"optimizer.lr": 0.001},)),
        _tuned(
            4096,
            "scalar, Baum-Welch",
            "lee-baum-welch",
            also=({"optimizer.pseudocount": 1e-5}, {"optimizer.pseudocount": 1e-5, "optimizer.step": 0.3}),
        ),
    ),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "Gradient descent outperforms mini-batch Baum-Welch (here: scalar model, both tuned).",
            "ascending",
            {
                f"{states:,} states": (
                    Cell(f"{states} states, scalar, tuned", "AdamW"),
                    Cell(f"{states} states, scalar, Baum-Welch", "Baum-Welch"),
                )
                for states in (512, 4096)
            },
        ),
        Claim(
            "Linear factors outperform the scalar HMM (here: both tuned).",
            "ascending",
            {
                f"{states:,} states": (
                    Cell(f"{states} states, ablation B", "B"),
                    Cell(f"{states} states, scalar, tuned", "scalar"),
                )
                for states in (512, 4096)
            },
        ),
    ),
)
LOWER_RATE: tuple[Mapping[str, Any], ...] = ({"optimizer.lr": 0.01},)
"""The best rate of transitions alone before the grid of lee2025-rates was widened."""
TABLE2 = Study(
    name="lee2025-table2",
    title=f"{LEE.name}, Table 2: which of a, b, π is factored",
    topic=LEE_FORMS,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=(
        _printed("nothing factored", "lee-table2-none", 607, settings=M100, is_baseline=True),
        _printed("a factored", "lee-table2-a", 814, settings=M100, also=LOWER_RATE),
        _printed("a, π factored", "lee-table2-a-start", 865, settings=M100, also=LOWER_RATE),
        _printed("b factored", "lee-table2-b", 345, settings=M100),
        _printed("a, b factored", "lee-table2-a-b", 338, settings=M100),
        _printed("a, b, π factored", "lee-table2-a-b-start", 337, settings=M100),
    ),
    not_run=(
        FURTHER_SEEDS,
        NotRun(
            "rate .1 is the best of lee2025-rates, found after the runs at .01",
            rows=("a factored", "a, π factored"),
        ),
    ),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "Factoring all three is best, factoring emissions (b) alone gives most of the gain.",
            "ascending",
            {"": (Cell("a, b, π factored", "all"), Cell("b factored", "b"), Cell("nothing factored", "none"))},
        ),
        Claim(
            "Factoring transitions (a) alone hurts.",
            "ascending",
            {"": (Cell("nothing factored", "none"), Cell("a factored", "a"))},
        ),
    ),
)
NETWORKS = (
    _printed("1 layer, ReLU", "lee-table3-relu", 329.5, settings=M100),
    _printed("split H, 1 layer, ReLU", "lee-table3-split-relu", 336.6, settings=M100),
    _printed("2 layers, skip, ReLU", "lee-table3-skip-relu", 336.7, settings=M100),
    _printed("split H, 2 layers, LayerNorm", "lee-table3-split-norm", 341.2, settings=M100),
    _printed("split H, 2 layers, skip, ReLU", "lee-table3-split-skip-relu", 342.6, settings=M100),
    _printed("split H, monolithic, 2 layers, skip, ReLU", "lee-table3-split-mono-skip-relu", 343.5, settings=M100),
    _printed("1 layer", "lee-table3-linear", 344.4, settings=M100),
)
TABLE3 = Study(
    name="lee2025-table3",
    title=f"{LEE.name}, Table 3: variants of the network",
    topic=LEE_FORMS,
    paper=LEE,
    rows=(*NETWORKS, _printed("ablation B", "lee-table1-ablation-b", 348, settings=M100)),
    not_run=(FURTHER_SEEDS,),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "These seven variants outperform ablation B (change from it).",
            "ascending",
            {network.name: (Cell(network.name), Cell("ablation B")) for network in NETWORKS},
            show="change",
        ),
    ),
)


def _of_states(states: int, name: str, recipe: str, **labels: Any) -> StudyRow:
    """Return a point of Figure 1."""
    group, settings = f"{states} states", {"model.num_states": states, **M50}
    return row(f"{group}, {name}", recipe, settings, group=group, series=name, x=float(states), **labels)


STATES = [2**power for power in range(7, 13)]
FIGURE1 = Study(
    name="lee2025-figure1",
    title=f"{LEE.name}, Figure 1: number of states",
    topic=LEE_FORMS,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=tuple(
        point
        for states in STATES
        for point in (
            _of_states(states, "scalar", "lee-table1-scalar", is_baseline=True),
            _of_states(states, "scalar, tuned", "lee-scalar-tuned"),
            _of_states(states, "ablation B", "lee-figure1"),
        )
    ),
    drawing=Lines(TEST, AXIS, "states"),
    claims=(
        Claim(
            "The scalar HMM gets worse as it grows.",
            "ascending",
            {"": (Cell("128 states, scalar", "128 states"), Cell("4096 states, scalar", "4,096 states"))},
        ),
        Claim(
            "A reparameterized HMM gains from every doubling (here: ablation B, without LVD).",
            "ascending",
            {"": tuple(Cell(f"{states} states, ablation B", f"{states:,}:") for states in reversed(STATES))},
        ),
    ),
)

SCALAR_BASELINE = Cell("512 states, scalar", study=FIGURE1.name)
POWERS = range(16, 29, 2)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "MLP-ψ": {"model.mono": False},
    "MLP-ι": {"model.mono": True},
    "TRF-ψ": {"model.mono": False, "model.kind": "transformer"},
    "TRF-ι": {"model.mono": True, "model.kind": "transformer"},
}
"""Perceptrons and transformers with one network per role (ψ) or one for all (ι)."""
LARGEST_RATES = {"MLP-ψ": 0.01, "MLP-ι": 0.01, "TRF-ψ": 0.003, "TRF-ι": 0.003}
"""Peak rates up to 2^22 parameters."""
LOWER_RATES = {("MLP-ι", 26): 0.001, ("MLP-ι", 28): 0.0005, ("TRF-ψ", 24): 0.0005, ("TRF-ψ", 26): 0.00025}
"""Peak rates of points that fail to train at half the rate for each fourfold size."""


def capacity(states: int, power: int, architecture: str) -> StudyRow:
    """Return a point of Figures 2, 11 and 12."""
    halved = LARGEST_RATES[architecture] * 0.5 ** max(0, (power - 22) // 2)
    rate = LOWER_RATES.get((architecture, power), halved)
    settings: dict[str, Any] = {"model.capacity": 2**power, "optimizer.lr": rate, **ARCHITECTURES[architecture]}
    if states != 512:
        settings["model.num_states"] = states
    labels = {"series": architecture, "x": 2.0**power, "bar": f"{architecture}, 2^{power} parameters"}
    return row(f"{states} states, {architecture}, 2^{power} parameters", "lee-figure2", settings, **labels)


TRIED_RATES = {
    (512, 26, "MLP-ι"): 0.0025,
    (512, 24, "TRF-ψ"): 0.0015,
    (512, 26, "TRF-ψ"): 0.00075,
    (256, 28, "MLP-ι"): 0.00125,
}
"""Rates that points were run with first."""


def _point(states: int, power: int, architecture: str) -> StudyRow:
    """Return a point of Figures 2, 11 and 12 at the length of these figures."""
    point, tried = capacity(states, power, architecture), TRIED_RATES.get((states, power, architecture))
    also = () if tried is None else ({"optimizer.lr": tried},)
    return replace(point, settings={**point.settings, **M50}, also=also)


def _names(states: int, power: int) -> tuple[str, ...]:
    return tuple(capacity(states, power, architecture).name for architecture in ARCHITECTURES)


def _capacities(first: int, last: int) -> dict[str, tuple[Cell, ...]]:
    """Return the comparison of two capacities for every architecture."""
    return {name: tuple(Cell(capacity(512, power, name).name) for power in (first, last)) for name in ARCHITECTURES}


CAPACITY = Lines(TEST, AXIS, "parameters of the network", power_of_two)
FIGURE2 = Study(
    name="lee2025-figure2",
    title=f"{LEE.name}, Figure 2: capacity and architecture, 512 states",
    topic=LEE_FORMS,
    paper=LEE,
    rows=tuple(_point(512, power, architecture) for power in POWERS for architecture in ARCHITECTURES),
    not_run=(
        NotRun(UNSPENT, rows=_names(512, 28)),
        NotRun("recorded at three times the rate only", rows=(capacity(512, 26, "TRF-ψ").name,)),
    ),
    drawing=CAPACITY,
    claims=(
        Claim(
            "Every architecture of 2^22 parameters outperforms the scalar HMM (change from it).",
            "ascending",
            {name: (Cell(capacity(512, 22, name).name), SCALAR_BASELINE) for name in ARCHITECTURES},
            show="change",
        ),
        Claim(
            "Capacity below 2^22 parameters costs perplexity (change from 2^22 to 2^20).",
            "descending",
            _capacities(20, 22),
            show="change",
        ),
        Claim(
            "Capacity beyond 2^22 parameters does not help (change from 2^22).",
            "descending",
            {f"{name}, 2^{power}": cells for power in (24, 26) for name, cells in _capacities(power, 22).items()},
            show="change",
        ),
    ),
)
FIGURE11 = Study(
    name="lee2025-figure11",
    title=f"{LEE.name}, Figure 11: capacity and architecture, 256 states",
    topic=LEE_FORMS,
    paper=LEE,
    rows=tuple(_point(256, power, architecture) for power in POWERS for architecture in ARCHITECTURES),
    drawing=CAPACITY,
)
FIGURE12 = Study(
    name="lee2025-figure12",
    title=f"{LEE.name}, Figure 12: capacity, 1,024 states",
    topic=LEE_FORMS,
    paper=LEE,
    rows=tuple(_point(1024, power, "MLP-ψ") for power in POWERS),
    drawing=CAPACITY,
)


# --- rates ---

FEW = _length(30)
"""Trials of settings: few tokens and a warm-up to match."""
DECAY = 0.1
Grid = tuple[tuple[float, float], ...]
"""Pairs of rate and decay."""


def _at(*rates: float) -> Grid:
    return tuple((rate, DECAY) for rate in rates)


def _family(family: str, recipe: str, grid: Grid, **settings: Any) -> list[StudyRow]:
    """Return a row per rate and decay; settings are given as section__name."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    rows = []
    for rate, decay in grid:
        options = {**FEW, **named, "optimizer.lr": rate, "optimizer.weight_decay": decay}
        rows.append(row(f"{family}, rate {rate:g}, decay {decay:g}", recipe, options))
    return rows


def _baum_welch(step: float, pseudocount: float, momentum: float = 0.0) -> StudyRow:
    options = {"step": step, "pseudocount": pseudocount, "momentum": momentum}
    settings = {**FEW, **{f"optimizer.{name}": value for name, value in options.items()}}
    name = f"Baum-Welch, step {step:g}, pseudocount {pseudocount:g}, momentum {momentum:g}"
    return row(name, "lee-baum-welch", settings)


SCALAR, ABLATION_A = "lee-table1-scalar", "lee-table1-ablation-a"
TRANSFORMER: dict[str, Any] = {"model__kind": "transformer", "model__capacity": 2**22}
TRANSFORMER_RATES = _at(0.0003, 0.001, 0.003, 0.01)
RATES = Study(
    name="lee2025-rates",
    title=f"Rate and decay of every family of {LEE.name}, tried on few tokens",
    topic=LEE_TRIALS,
    paper=LEE,
    trials=True,
    rows=(
        *_family("scalar", SCALAR, (*_at(0.04, 0.4), (0.1, 0.01), (0.1, 0.0), (0.3, 0.0), (1.0, 0.0))),
        *_family("scalar, eps 1e-6", SCALAR, ((0.3, 0.0), (1.0, 0.0)), optimizer__eps=1e-6),
        *_family("ablation A", ABLATION_A, (*_at(0.003, 0.01, 0.03), (0.01, 0.0))),
        *_family("ablation A, N(0, 1) tables", ABLATION_A, _at(0.003, 0.01), model__init="normal"),
        *_family("ablation B", "lee-table1-ablation-b", (*_at(0.003, 0.01, 0.03, 0.1), (0.01, 0.0), (0.03, 0.0))),
        *_family("Chiu and Rush", "lee-table1-mlp", (*_at(0.001, 0.003, 0.01, 0.03), (0.01, 0.0))),
        *_family("a factored", "lee-table2-a", _at(0.003, 0.01, 0.03, 0.1, 0.4)),
        *_family("b factored", "lee-table2-b", _at(0.003, 0.01, 0.03, 0.1)),
        *(point for network in NETWORKS for point in _family(network.name, network.recipe, _at(0.003, 0.01, 0.03))),
        *_family("TRF-ι", "lee-figure2", TRANSFORMER_RATES, **TRANSFORMER, model__mono=True),
        *_family("TRF-ψ", "lee-figure2", TRANSFORMER_RATES, **TRANSFORMER, model__mono=False),
        _baum_welch(0.03, 1e-5),
        _baum_welch(0.1, 1e-5),
        _baum_welch(0.1, 1e-6),
        _baum_welch(0.3, 1e-5),
        _baum_welch(0.6, 1e-5),
        _baum_welch(0.3, 1e-6),
        _baum_welch(0.6, 1e-5, 0.9),
        _baum_welch(1.0, 1e-5, 0.9),
    ),
    not_run=(
        NotRun(
            UNSPENT,
            rows=tuple(f"ablation A, N(0, 1) tables, rate {rate:g}, decay 0.1" for rate in (0.003, 0.01)),
        ),
        NotRun(
            UNSPENT,
            rows=tuple(
                f"{name}, rate 0.03, decay 0.1"
                for name in (
                    "2 layers, skip, ReLU",
                    "split H, 2 layers, skip, ReLU",
                    "split H, monolithic, 2 layers, skip, ReLU",
                )
            ),
        ),
    ),
)
