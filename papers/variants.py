"""Named variants of recipes: settings over a recipe file that several rows share.

Records in results/ hold these names in `recipe`, so a name keeps its meaning: add a variant, do not change one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SEEDS = (42, 52, 62)
"""Seeds of Lee & Berg-Kirkpatrick 2025 (Table 5)."""
TEACHERS = {
    "stories15M": "teachers/stories15M",
    "SmolLM2-135M": "teachers/smollm2-135m",
    "TinyLlama-1.1B": "teachers/tinyllama-1.1b",
}
"""Folders of the teachers, relative to where the runs start, weakest first. The last two come as GGUF files;
`hmmlm teacher --convert` turns them into folders."""
LVD: dict[str, Any] = {
    "initialization.kind": "lvd",
    "initialization.teacher": TEACHERS["TinyLlama-1.1B"],
    "initialization.tokens": 10_000_000,
    # One clustering and one labelling serve every run with the same teacher and text, whatever its seed.
    "initialization.cache": "runs/shared",
    "initialization.kmeans.tokens": 10_000_000,
    "initialization.kmeans.seed": SEEDS[0],
    # 10M embeddings of 2,048 dimensions take 41 GB; lower this or kmeans.tokens on a smaller GPU.
    "initialization.kmeans.memory_gb": 48.0,
}
"""Latent variable distillation: 10M tokens of log P(O, S), then log P(O). The paper prints neither how many embeddings
are clustered nor how many k-means passes are made."""
SHORT_LVD: dict[str, Any] = {"initialization.tokens": 5_000_000, "initialization.kmeans.tokens": 5_000_000}
"""What is clustered, and read by LVD, in runs of fewer tokens than the paper's: half of it."""
SCALAR_TUNED = {"optimizer.lr": 0.3, "optimizer.weight_decay": 0.0}
"""The best of the settings tried for the scalar model in lee2025-rates."""


class Variant(NamedTuple):
    recipe: str
    settings: Mapping[str, Any]


def _factored(transition: bool, emission: bool, start: bool, rate: float = 0.03) -> Variant:
    """Return a row of Table 2 of Lee & Berg-Kirkpatrick 2025."""
    factors = {"transition": transition, "emission": emission, "start": start}
    settings = {f"model.factor_{name}": value for name, value in factors.items()}
    return Variant("lee-table1-ablation-b", {**settings, "optimizer.lr": rate})


def network_settings(split: bool, mono: bool, layers: int, skip: bool, relu: bool, norm: bool) -> dict[str, Any]:
    """Return the settings of a variant of Table 3 of Lee & Berg-Kirkpatrick 2025, by its columns."""
    settings: dict[str, Any] = {"split": split, "mono": mono, "layers": layers, "relu": relu, "norm": norm}
    settings["skip"] = "activation" if skip else "none"
    return {f"model.{name}": value for name, value in settings.items()}


def _network(split: bool, mono: bool, layers: int, skip: bool, relu: bool, norm: bool) -> Variant:
    """Return a row of Table 3."""
    return Variant("lee-table1-mlp", network_settings(split, mono, layers, skip, relu, norm))


VARIANTS: dict[str, Variant] = {
    "ptb-vl-hmm-14-factored": Variant("ptb-vl-hmm-14", {"model.block_embeddings": True}),
    "ptb-vl-hmm-14-no-dropout": Variant("ptb-vl-hmm-14", {"model.dropout": 0.0}),
    "lee-scalar-tuned": Variant("lee-table1-scalar", SCALAR_TUNED),
    "lee-figure1": Variant("lee-table1-ablation-b", {}),
    "lee-lvd-scalar": Variant("lee-table1-scalar", LVD),
    "lee-lvd-scalar-tuned": Variant("lee-table1-scalar", {**SCALAR_TUNED, **LVD}),
    "lee-lvd-mlp": Variant("lee-table1-mlp", LVD),
    "lee-lvd-transformer": Variant("lee-transformer", LVD),
    "lee-table2-none": _factored(False, False, False, rate=0.4),
    # .1 is the best rate of lee2025-rates; results/lee2025-table2.json is of .01, the best before the grid was widened.
    "lee-table2-a": _factored(True, False, False, rate=0.1),
    "lee-table2-a-start": _factored(True, False, True, rate=0.1),
    "lee-table2-b": _factored(False, True, False),
    "lee-table2-a-b": _factored(True, True, False),
    "lee-table2-a-b-start": _factored(True, True, True),
    "lee-table3-relu": _network(False, False, 1, skip=False, relu=True, norm=False),
    "lee-table3-split-relu": _network(True, False, 1, skip=False, relu=True, norm=False),
    "lee-table3-skip-relu": _network(False, False, 2, skip=True, relu=True, norm=False),
    "lee-table3-split-norm": _network(True, False, 2, skip=False, relu=False, norm=True),
    "lee-table3-split-skip-relu": _network(True, False, 2, skip=True, relu=True, norm=False),
    "lee-table3-split-mono-skip-relu": _network(True, True, 2, skip=True, relu=True, norm=False),
    "lee-table3-linear": _network(False, False, 1, skip=False, relu=False, norm=False),
}
