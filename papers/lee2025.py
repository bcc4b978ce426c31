"""Studies of Lee & Berg-Kirkpatrick 2025, *Optimizing Hidden Markov Language Models*, section 3: reparameterization."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

from hmmlm.report.plots import short
from papers.study import (
    LEE,
    LEE_FORMS,
    RATIO_COLUMNS,
    TEST,
    TRAIN,
    UNSPENT,
    Bars,
    Cell,
    Claim,
    Lines,
    NotRun,
    Study,
    StudyRow,
)
from papers.variants import LVD, SEEDS, SHORT_LVD, VARIANTS, network_settings

AXIS = "test perplexity (lower is better)"


def length(millions: int) -> dict[str, Any]:
    """Return the settings of a run of fewer tokens than the recipes' 500M: its warm-up is shorter in proportion."""
    return {"train.max_tokens": millions * 1_000_000, "schedule.warmup": millions * 50_000}


M100, M50 = length(100), length(50)
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
        Claim(
            "Perplexity is nearly the same on the training text as on test (within 3%).",
            "similar",
            {
                label: (Cell(name, "train", metric=TRAIN), Cell(name, "test"))
                for name, label in (
                    ("Ablation B (split H)", "B"),
                    ("Chiu and Rush", "networks"),
                    ("HMM, scalar", "scalar"),
                    ("Ablation A (single H)", "A"),
                )
            },
            tolerance=0.03,
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
            headline="Scalar HMM, Baum-Welch instead of AdamW, 100M tokens",
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
        NotRun(UNSPENT, seeds=SEEDS[1:]),
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


PRINTED_FORMS = {json.dumps(VARIANTS[network.recipe].settings, sort_keys=True) for network in NETWORKS}


def _form(split: bool, mono: bool, layers: int, skip: bool, relu: bool, norm: bool) -> StudyRow:
    """Return a point of the grid of Table 3 by its columns."""
    settings = network_settings(split, mono, layers, skip, relu, norm)
    parts = {"split H": split, "monolithic": mono, f"{layers} layer{'s' * (layers > 1)}": True}
    parts |= {"skip": skip, "ReLU": relu, "LayerNorm": norm}
    return row(
        ", ".join(name for name, has in parts.items() if has), "lee-table1-mlp", {**settings, **M100}, seeds=SEEDS
    )


def _is_printed(form: StudyRow) -> bool:
    own = {name: value for name, value in form.settings.items() if name.startswith("model.")}
    return json.dumps(own, sort_keys=True) in PRINTED_FORMS


GRID = tuple(
    form
    for split, mono, (layers, skip, relu), norm in product(
        (False, True),
        (False, True),
        ((1, False, False), (1, False, True), (2, False, False), (2, False, True), (2, True, True)),
        (False, True),
    )
    if not _is_printed(form := _form(split, mono, layers, skip, relu, norm))
)
"""All that the columns of Table 3 allow, but for its rows: a skip connection goes around the ReLU of a second layer."""
TABLE3_GRID = Study(
    name="lee2025-table3-grid",
    title=f"{LEE.name}, Table 3: the variants that it leaves out",
    topic=LEE_FORMS,
    paper=LEE,
    rows=GRID,
    not_run=(NotRun(UNSPENT),),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "No other variant outperforms ablation B (change from it).",
            "descending",
            {form.name: (Cell(form.name), Cell("ablation B", study=TABLE3.name)) for form in GRID},
            show="change",
        ),
    ),
)
VOCABULARY = 32_000
"""Pieces of the Llama-2 tokenizer."""


def hmm_parameters(states: int) -> float:
    """Return the logits of an HMM: start, transition, emission."""
    return float(states + states**2 + states * VOCABULARY)


def _of_states(states: int, name: str, recipe: str, settings: Mapping[str, Any] | None = None) -> StudyRow:
    """Return a point of Figure 1."""
    group, x = f"{states} states", hmm_parameters(states)
    return row(
        f"{group}, {name}",
        recipe,
        {"model.num_states": states, **M50, **(settings or {})},
        group=group,
        series=name,
        x=x,
        tick=f"{short(float(f'{x:.3g}'))}\n{states:,}",
        is_baseline=name == "scalar",
    )


STATES = [2**power for power in range(7, 13)]
WITH_LVD = ("ablation B, LVD", "Chiu and Rush, LVD")
"""Network reparameterization and LVD: the second line of Figure 1."""
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
            _of_states(states, "scalar", "lee-table1-scalar"),
            _of_states(states, "scalar, tuned", "lee-scalar-tuned"),
            _of_states(states, "ablation B", "lee-figure1"),
            _of_states(states, "ablation B, LVD", "lee-figure1", {**LVD, **SHORT_LVD}),
            _of_states(states, "Chiu and Rush, LVD", "lee-table1-mlp", {**LVD, **SHORT_LVD}),
        )
    ),
    not_run=(NotRun(UNSPENT, rows=tuple(f"{states} states, {name}" for states in STATES for name in WITH_LVD)),),
    drawing=Lines(TEST, AXIS, "parameters of the HMM, and its states"),
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
        Claim(
            "The best approach, reparameterization and LVD, gains from every doubling.",
            "ascending",
            {
                name: tuple(Cell(f"{states} states, {name}", f"{states:,}:") for states in reversed(STATES))
                for name in WITH_LVD
            },
        ),
    ),
)

RESTARTS = Study(
    name="lee2025-restarts",
    title=f"{LEE.name}, section 7: ten random restarts at 512 states",
    topic=LEE_FORMS,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=tuple(
        row(name, recipe, M100, seeds=tuple(range(42, 142, 10)), is_baseline=name == "scalar")
        for name, recipe in (
            ("scalar", "lee-table1-scalar"),
            ("scalar, tuned", "lee-scalar-tuned"),
            ("ablation B", "lee-table1-ablation-b"),
        )
    ),
    not_run=(NotRun(UNSPENT),),
    drawing=Bars(TEST, AXIS),
)
