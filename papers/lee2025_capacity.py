"""Studies of Lee & Berg-Kirkpatrick 2025, section 3: capacity and architecture (Figures 2, 11 and 12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import log2
from typing import Any

from papers.lee2025 import AXIS, FIGURE1, M50, hmm_parameters, row
from papers.study import LEE, LEE_FORMS, TEST, UNSPENT, Cell, Claim, Lines, NotRun, Study, StudyRow
from papers.ticks import power_of_two

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
TRIED_RATES = {
    (512, 26, "MLP-ι"): 0.0025,
    (512, 24, "TRF-ψ"): 0.0015,
    (512, 26, "TRF-ψ"): 0.00075,
    (256, 28, "MLP-ι"): 0.00125,
}
"""Rates that points were run with first."""


def _rate(architecture: str, power: int) -> float:
    halved = LARGEST_RATES[architecture] * 0.5 ** max(0, (power - 22) // 2)
    return LOWER_RATES.get((architecture, power), halved)


def _point_name(states: int, architecture: str, power: int) -> str:
    return f"{states} states, {architecture}, 2^{power} parameters"


def capacity(states: int, power: int, architecture: str) -> StudyRow:
    """Return a point of Figures 2, 11 and 12."""
    settings = {
        "model.capacity": 2**power,
        "optimizer.lr": _rate(architecture, power),
        **ARCHITECTURES[architecture],
    }
    if states != 512:
        settings["model.num_states"] = states
    labels = {"series": architecture, "x": 2.0**power, "bar": f"{architecture}, 2^{power} parameters"}
    return row(_point_name(states, architecture, power), "lee-figure2", settings, **labels)


def _with_rates(point: StudyRow, above: float | None = None) -> StudyRow:
    """Return a point at the length of these figures, also with a third and three times its rate, or the one `above`."""
    rate = point.settings["optimizer.lr"]
    others = float(f"{0.3 * rate:.2g}"), above or float(f"{3 * rate:.2g}")
    return replace(point, settings={**point.settings, **M50}, also=tuple({"optimizer.lr": other} for other in others))


def _points(states: int, architectures: Sequence[str]) -> tuple[StudyRow, ...]:
    return tuple(
        _with_rates(capacity(states, power, architecture), TRIED_RATES.get((states, power, architecture)))
        for power, architecture in product(POWERS, architectures)
    )


def _cell(power: int, architecture: str, states: int = 512) -> Cell:
    return Cell(_point_name(states, architecture, power), architecture)


def _scalar(states: int) -> StudyRow:
    """Return the scalar HMM on the text of the other points of a figure: its star."""
    settings = {"model.num_states": states, **M50}
    return row(f"{states} states, scalar", "lee-table1-scalar", settings, x=hmm_parameters(states), drawn=False)


Chains = dict[str, tuple[Cell, ...]]


def _below_scalar(states: int, powers: Sequence[int], architectures: Sequence[str], scalar: Cell) -> Claim:
    named = ", ".join(f"2^{power}" for power in powers)
    return Claim(
        f"Reparameterization helps even if the network is much smaller than the HMM: {named} parameters, the word "
        f"table included, for an HMM of 2^{round(log2(hmm_parameters(states)))} (change from the scalar HMM, "
        f"{states:,} states).",
        "ascending",
        {f"{name}, 2^{power}": (_cell(power, name, states), scalar) for power in powers for name in architectures},
        show="change",
    )


def _about_capacity(states: int, architectures: Sequence[str]) -> tuple[Claim, Claim]:
    """Return what the paper says of capacities other than 2^22."""

    def from_best(powers: Sequence[int]) -> Chains:
        pairs = product(powers, architectures)
        return {f"{name}, 2^{at}": (_cell(at, name, states), _cell(22, name, states)) for at, name in pairs}

    where = f"(change from 2^22, {states:,} states)"
    return (
        Claim(
            f"Capacity below 2^22 parameters costs perplexity: 2^20 {where}.",
            "descending",
            from_best([20]),
            show="change",
        ),
        Claim(
            f"Capacity beyond 2^22 parameters does not help {where}.",
            "descending",
            from_best(POWERS[4:]),
            show="change",
        ),
    )


OTHERS = tuple(name for name in ARCHITECTURES if name != "MLP-ψ")
CAPACITY = "parameters of the reparameterization, word table included"
SCALAR_BASELINE = Cell("512 states, scalar", study=FIGURE1.name)
FIGURE2 = Study(
    name="lee2025-figure2",
    title=f"{LEE.name}, Figure 2: capacity and architecture, 512 states",
    topic=LEE_FORMS,
    paper=LEE,
    rows=_points(512, tuple(ARCHITECTURES)),
    not_run=(
        NotRun("recorded at three times the rate only", rows=(_point_name(512, "TRF-ψ", 26),)),
        NotRun(UNSPENT),
    ),
    drawing=Lines(TEST, AXIS, CAPACITY, power_of_two, star=SCALAR_BASELINE),
    claims=(
        _below_scalar(512, (20, 22), tuple(ARCHITECTURES), SCALAR_BASELINE),
        _below_scalar(512, (16, 18), tuple(ARCHITECTURES), SCALAR_BASELINE),
        Claim(
            "Any architecture improves on the scalar HMM: 2^24, 2^26, 2^28 parameters (change from it, 512 states).",
            "ascending",
            {f"{name}, 2^{at}": (_cell(at, name), SCALAR_BASELINE) for at in POWERS[4:] for name in ARCHITECTURES},
            show="change",
        ),
        *_about_capacity(512, tuple(ARCHITECTURES)),
        Claim(
            "MLP-ψ is mostly the best up to 2^22 parameters (change from each other architecture).",
            "ascending",
            {f"{other}, 2^{at}": (_cell(at, "MLP-ψ"), _cell(at, other)) for at in POWERS[:4] for other in OTHERS},
            show="change",
        ),
        Claim(
            "MLP-ι surpasses MLP-ψ above 2^22 parameters.",
            "ascending",
            {f"2^{power}": (_cell(power, "MLP-ι"), _cell(power, "MLP-ψ")) for power in POWERS[4:]},
        ),
        Claim(
            "TRF-ψ is the worst architecture (its change from each other).",
            "descending",
            {
                f"{other}, 2^{power}": (_cell(power, "TRF-ψ"), _cell(power, other))
                for power, other in product(POWERS, [name for name in ARCHITECTURES if name != "TRF-ψ"])
            },
            show="change",
        ),
        Claim(
            "MLP-ι and TRF-ι are similar for most sizes (within 5%).",
            "similar",
            {f"2^{power}": (_cell(power, "MLP-ι"), _cell(power, "TRF-ι")) for power in POWERS[:5]},
            tolerance=0.05,
        ),
        Claim(
            "Above 2^25 parameters MLP-ι is better than TRF-ι.",
            "ascending",
            {f"2^{power}": (_cell(power, "MLP-ι"), _cell(power, "TRF-ι")) for power in POWERS[5:]},
        ),
    ),
)
FIGURE11 = Study(
    name="lee2025-figure11",
    title=f"{LEE.name}, Figure 11: capacity and architecture, 256 states",
    topic=LEE_FORMS,
    paper=LEE,
    rows=(*_points(256, tuple(ARCHITECTURES)), _scalar(256)),
    not_run=(NotRun(UNSPENT),),
    drawing=Lines(TEST, AXIS, CAPACITY, power_of_two, star=Cell("256 states, scalar")),
    claims=(
        _below_scalar(256, POWERS[:4], tuple(ARCHITECTURES), Cell("256 states, scalar")),
        *_about_capacity(256, tuple(ARCHITECTURES)),
    ),
)
FIGURE12 = Study(
    name="lee2025-figure12",
    title=f"{LEE.name}, Figure 12: capacity, 1,024 states",
    topic=LEE_FORMS,
    paper=LEE,
    rows=(*_points(1024, ("MLP-ψ",)), _scalar(1024)),
    not_run=(NotRun(UNSPENT),),
    drawing=Lines(TEST, AXIS, CAPACITY, power_of_two, star=Cell("1024 states, scalar")),
    claims=(
        _below_scalar(1024, POWERS[:4], ("MLP-ψ",), Cell("1024 states, scalar")),
        *_about_capacity(1024, ("MLP-ψ",)),
    ),
)

NETWORK_WIDTHS = {
    "MLP-ψ": (70, 168, 376, 792, 1632, 3304, 6648),
    "MLP-ι": (74, 184, 408, 864, 1784, 3616, 7272),
    "TRF-ψ": (27, 57, 117, 240, 280, 432, 728),
    "TRF-ι": (41, 89, 184, 384, 472, 736, 1248),
}
"""Widths at which all but the word table has 2^16 to 2^28 parameters, at 512 states."""


def _network_alone(power: int, architecture: str) -> StudyRow:
    """Return a point of Figure 2 whose capacity leaves out the word table, at the rate of a four times larger one."""
    settings = {
        "model.capacity": None,
        "model.hidden": NETWORK_WIDTHS[architecture][POWERS.index(power)],
        "optimizer.lr": _rate(architecture, power + 2),
        **ARCHITECTURES[architecture],
    }
    if settings.get("model.kind") == "transformer":
        settings["model.layers"] = 2 + 2 * max(0, power - 22)
    name = f"{architecture}, 2^{power} parameters without the word table"
    return row(name, "lee-figure2", settings, series=architecture, x=2.0**power)


FIGURE2_NETWORKS = Study(
    name="lee2025-figure2-networks",
    title=f"{LEE.name}, Figure 2 with the word table left out of the capacity",
    topic=LEE_FORMS,
    paper=LEE,
    rows=tuple(_with_rates(_network_alone(power, name)) for power, name in product(POWERS, ARCHITECTURES)),
    not_run=(NotRun(UNSPENT),),
    drawing=Lines(TEST, AXIS, "parameters of networks and state embeddings", power_of_two, star=SCALAR_BASELINE),
    claims=(
        Claim(
            "Reparameterization helps even if the network is much smaller than the HMM: 2^16 to 2^22 parameters "
            "without the word table, for an HMM of 2^24 (change from the scalar HMM, 512 states).",
            "ascending",
            {
                f"{name}, 2^{power}": (Cell(_network_alone(power, name).name), SCALAR_BASELINE)
                for power, name in product(POWERS[:4], ARCHITECTURES)
            },
            show="change",
        ),
    ),
)
