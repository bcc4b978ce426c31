"""Rates and decays of the studies of Lee & Berg-Kirkpatrick 2025, section 3, chosen on few tokens."""

from __future__ import annotations

from typing import Any

from papers.lee2025 import NETWORKS, length, row
from papers.study import LEE, LEE_TRIALS, UNSPENT, NotRun, Study, StudyRow

FEW = length(30)
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
