"""Studies of Lee & Berg-Kirkpatrick 2025, section 4, Figure 4 and appendix B: latent variable distillation (LVD)."""

from __future__ import annotations

from typing import Any, Literal

from hmmlm.report.plots import short
from papers.lee2025 import AXIS, FURTHER_SEEDS, M50, M100, row
from papers.lee2025_capacity import ARCHITECTURES, capacity
from papers.study import (
    LEE,
    LEE_CPU,
    LEE_LVD,
    RATIO_COLUMNS,
    SPEED,
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
from papers.ticks import plain_number
from papers.variants import LVD, SEEDS, SHORT_LVD, TEACHERS

NO_LVD = {"initialization.kind": "none"}
RANDOM_TEACHER = {"initialization.random_teacher": True, "initialization.kmeans.seed": None}
"""Another teacher, and so another clustering, for each seed."""


def _taught(name: str, **labels: Any) -> StudyRow:
    settings = {"initialization.teacher": TEACHERS[name], **SHORT_LVD, **M100}
    return row(name, "lee-lvd-scalar", settings, seeds=SEEDS, **labels)


PRINTED_TEACHERS = {
    "TinyLlama-1.1B, 500B tokens": "teachers/tinyllama-1.1b-500b",
    "TinyLlama-1.1B, 3T tokens": "teachers/tinyllama-1.1b-3t",
    "Llama-2-7B": "teachers/llama-2-7b",
}
"""Teachers of the paper and their folders."""
NO_WEIGHTS = "planned; the weights were not at hand"


def _printed_teacher(name: str) -> StudyRow:
    settings = {"initialization.teacher": PRINTED_TEACHERS[name], **SHORT_LVD, **M100}
    return row(name, "lee-lvd-scalar", settings, seeds=SEEDS)


FIGURE3 = Study(
    name="lee2025-figure3",
    title=f"{LEE.name}, Figure 3: teachers of latent variable distillation (LVD)",
    topic=LEE_LVD,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=(
        row("no LVD", "lee-lvd-scalar", {**NO_LVD, **M100}, seeds=SEEDS, is_baseline=True),
        row("random TinyLlama-1.1B", "lee-lvd-scalar", {**RANDOM_TEACHER, **SHORT_LVD, **M100}, seeds=SEEDS),
        _taught("stories15M"),
        _taught("SmolLM2-135M"),
        _taught("TinyLlama-1.1B", headline="Scalar HMM, printed settings, after LVD from TinyLlama, 100M tokens"),
        *map(_printed_teacher, PRINTED_TEACHERS),
    ),
    not_run=(NotRun(NO_WEIGHTS, rows=tuple(PRINTED_TEACHERS)),),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "Every teacher helps, a random one less.",
            "ascending",
            {
                teacher: (Cell(teacher), Cell("random TinyLlama-1.1B", "random teacher"), Cell("no LVD", "no LVD"))
                for teacher in TEACHERS
            },
        ),
        Claim(
            "The strength of the teacher hardly matters (within 3%).",
            "similar",
            {"": tuple(Cell(teacher, teacher) for teacher in TEACHERS)},
            tolerance=0.03,
        ),
        Claim(
            "More pretraining of the teacher does not help (within 3%).",
            "similar",
            {"": tuple(Cell(teacher, teacher) for teacher in PRINTED_TEACHERS)},
            tolerance=0.03,
        ),
    ),
)

_PCA_SETTINGS: dict[str, Any] = {"initialization.teacher": TEACHERS["TinyLlama-1.1B"], **SHORT_LVD, **M100}
PCA = Study(
    name="lee2025-pca",
    title=f"{LEE.name}, Table 6: PCA of the teacher's embeddings before they are clustered",
    topic=LEE_LVD,
    paper=LEE,
    rows=tuple(
        row(
            f"TinyLlama-1.1B, {count} components",
            "lee-lvd-scalar",
            {**_PCA_SETTINGS, "initialization.kmeans.pca": count},
        )
        for count in (128, 256, 512, 1024, 2048)
    ),
    not_run=(NotRun(UNSPENT),),
    drawing=Bars(TEST, AXIS),
)


def _distilled(tokens: int) -> StudyRow:
    settings = {**SHORT_LVD, "initialization.tokens": tokens, "initialization.teacher": TEACHERS["stories15M"], **M100}
    return row(f"LVD for {tokens / 1e6:g}M tokens", "lee-lvd-scalar", settings, x=float(tokens))


TO_THE_END: dict[str, Any] = {
    **SHORT_LVD,
    "initialization.tokens": 100_000_000,
    "initialization.labels": "fly",
    "initialization.teacher": TEACHERS["stories15M"],  # the smallest, because it reads everything
    **M100,
}
FIGURE8 = Study(
    name="lee2025-figure8",
    title=f"{LEE.name}, Figure 8: length of LVD",
    topic=LEE_LVD,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=(
        row("no LVD", "lee-lvd-scalar", {**NO_LVD, **M100}, is_baseline=True, x=2e4, tick="0"),
        *map(_distilled, (100_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000)),
        row("LVD to the end", "lee-lvd-scalar", TO_THE_END, x=5e8, tick="all"),
    ),
    drawing=Lines(TEST, AXIS, "tokens of latent variable distillation", short),
    claims=(
        Claim(
            "LVD has no benefit with fewer than 1M tokens (within 2% of none).",
            "similar",
            {"": (Cell("LVD for 0.1M tokens", "0.1M:"), Cell("no LVD", "no LVD"))},
            tolerance=0.02,
        ),
        Claim(
            "LVD has a benefit with 1M tokens, and more with 5M.",
            "ascending",
            {"": (Cell("LVD for 5M tokens", "5M:"), Cell("LVD for 1M tokens", "1M:"), Cell("no LVD", "no LVD"))},
        ),
        Claim(
            "LVD reaches its full effect with 5M tokens (within 1% of longer LVD).",
            "similar",
            {"": tuple(Cell(f"LVD for {millions}M tokens", f"{millions}M:") for millions in (5, 10, 50))},
            tolerance=0.01,
        ),
        Claim(
            "LVD throughout training is worse than none.",
            "ascending",
            {"": (Cell("no LVD", "no LVD"), Cell("LVD to the end", "LVD to the end"))},
        ),
    ),
)

_FAMILIES = (
    row("scalar", "lee-table1-scalar", is_baseline=True),
    row("scalar, tuned", "lee-scalar-tuned"),
    row("scalar, Baum-Welch", "lee-baum-welch", {"optimizer.pseudocount": 1e-5}),
    row("ablation B", "lee-table1-ablation-b"),
    row("1 layer", "lee-table3-linear"),
    *(capacity(512, 22, architecture) for architecture in ARCHITECTURES),
)


REPARAMETERIZED = _FAMILIES[3:]


def _bar(family: StudyRow) -> str:
    return family.bar or family.name


def _beside_scalar_lvd(scalar: int) -> dict[str, tuple[Cell, ...]]:
    """Return the comparison of every reparameterization with a scalar HMM, all after LVD."""
    other = Cell(f"{_FAMILIES[scalar].name}, LVD")
    return {_bar(family): (Cell(f"{family.name}, LVD"), other) for family in REPARAMETERIZED}


def _with_and_without(family: StudyRow) -> tuple[StudyRow, StudyRow]:
    """Return the rows of a family in Figure 4."""
    bar = _bar(family)
    settings, seeds = {**family.settings, **M100}, SEEDS
    return (
        row(
            f"{family.name}, no LVD",
            family.recipe,
            settings,
            seeds=seeds,
            bar=bar,
            series="no LVD",
            is_baseline=family.is_baseline,
        ),
        row(f"{family.name}, LVD", family.recipe, {**settings, **LVD, **SHORT_LVD}, seeds=seeds, bar=bar, series="LVD"),
    )


def _by_lvd(statistic: Literal["mean", "range"]) -> dict[str, tuple[Cell, ...]]:
    """Return the comparison of every family with and without LVD."""
    return {
        _bar(family): tuple(Cell(f"{family.name}, {which}", statistic=statistic) for which in ("LVD", "no LVD"))
        for family in _FAMILIES
    }


FIGURE4 = Study(
    name="lee2025-figure4",
    title=f"{LEE.name}, Figure 4: LVD and architectures",
    topic=LEE_LVD,
    paper=LEE,
    columns=RATIO_COLUMNS,
    rows=tuple(one for family in _FAMILIES for one in _with_and_without(family)),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim("LVD improves every model (change by LVD).", "ascending", _by_lvd("mean"), show="change"),
        Claim(
            "LVD reduces the variance over random restarts (change of the range over seeds).",
            "ascending",
            _by_lvd("range"),
            show="change",
        ),
        Claim(
            "Reparameterization alone does not reduce that variance (change of the range from the scalar HMM).",
            "descending",
            {
                _bar(family): tuple(
                    Cell(f"{name}, no LVD", statistic="range") for name in (family.name, _FAMILIES[0].name)
                )
                for family in REPARAMETERIZED
            },
            show="change",
        ),
        Claim(
            "LVD and reparameterization are complementary: both are better than LVD alone (change from the scalar HMM "
            "with LVD at the printed settings).",
            "ascending",
            _beside_scalar_lvd(0),
            show="change",
        ),
        Claim(
            "The same beside the scalar HMM with LVD at its own settings.",
            "ascending",
            _beside_scalar_lvd(1),
            show="change",
        ),
        Claim(
            "A linear reparameterization (ablation B) does as well as networks of 2^22 parameters (change from each).",
            "ascending",
            {
                _bar(family): (Cell("ablation B, no LVD"), Cell(f"{family.name}, no LVD"))
                for family in REPARAMETERIZED[2:]
            },
            show="change",
        ),
    ),
)

RANDOM_EMBEDDINGS = "random embeddings"
CENTROIDS, HEAD = {"initialization.centroids": True}, {"initialization.head": True}
GIVEN = {"centroids": CENTROIDS, "head": HEAD, "centroids and head": {**CENTROIDS, **HEAD}}
"""What state embeddings and word vectors of Figure 5 start from."""


def _embeddings(frozen: int) -> dict[str, dict[str, Any]]:
    """Return the rows of Figure 5 and their settings: each start, and the same frozen for a number of tokens."""
    rows: dict[str, dict[str, Any]] = {RANDOM_EMBEDDINGS: {}}
    for name, settings in GIVEN.items():
        rows[name] = dict(settings)
        rows[f"{name}, frozen for {frozen / 1e6:g}M tokens"] = {**settings, "initialization.frozen_tokens": frozen}
    return rows


AS_WIDE_AS_TINYLLAMA = {"model.hidden": 2048, "optimizer.lr": 0.0025, **SHORT_LVD, **M50}
FIGURE5 = Study(
    name="lee2025-figure5",
    title=f"{LEE.name}, Figure 5: centroids and head as embeddings",
    topic=LEE_LVD,
    paper=LEE,
    rows=tuple(
        row(f"LVD, {name}", "lee-lvd-mlp", {**AS_WIDE_AS_TINYLLAMA, **settings}, seeds=SEEDS, bar=name)
        for name, settings in _embeddings(20_000_000).items()
    ),
    not_run=(FURTHER_SEEDS,),
    drawing=Bars(TEST, AXIS),
    claims=(
        Claim(
            "Centroids as state embeddings and the head as word vectors degrade perplexity, frozen or not (512 states, "
            "change from random embeddings).",
            "descending",
            {
                name: (Cell(f"LVD, {name}"), Cell(f"LVD, {RANDOM_EMBEDDINGS}"))
                for name in _embeddings(20_000_000)
                if name != RANDOM_EMBEDDINGS
            },
            show="change",
        ),
    ),
)
TWO_CORES: dict[str, Any] = {
    "model.num_states": 128,
    "train.max_tokens": 2_000_000,
    "schedule.warmup": 100_000,
    "batches.batch_size": 32,
    "train.precision": "32-true",
    "train.log_every": 50,
}
"""What two cores train in minutes, on the words of PTB."""
PTB_TOKENS = "TOKENS of `hmmlm data ptb --out TOKENS --tokenizer.split whitespace` (--set data=TOKENS)"
TWO_CORES_LVD: dict[str, Any] = {
    "initialization.teacher": TEACHERS["stories15M"],
    "initialization.tokens": 200_000,
    "initialization.kmeans.tokens": 200_000,
}
FIGURE5_CPU_RATES = (0.003, 0.01, 0.03)
FIGURE5_CPU = Study(
    name="lee2025-figure5-cpu",
    title=f"{LEE.name}, Figure 5 on two CPU cores: PTB, 128 states, teacher stories15M",
    topic=LEE_LVD,
    paper=LEE,
    trials=True,
    device="CPU",
    data=PTB_TOKENS,
    rows=tuple(
        row(
            f"{name}, rate {rate:g}",
            "lee-lvd-mlp",
            {**TWO_CORES, **TWO_CORES_LVD, "model.hidden": 288, "optimizer.lr": rate, **settings},
            seeds=SEEDS,
            series=name,
            x=rate,
        )
        for rate in FIGURE5_CPU_RATES
        for name, settings in _embeddings(800_000).items()
    ),
    not_run=(FURTHER_SEEDS,),
    drawing=Lines(TEST, AXIS, "peak learning rate", plain_number),
    claims=(
        Claim(
            "The same on two CPU cores (PTB, 128 states), at every rate tried.",
            "descending",
            {
                f"rate {rate:g}, {name}": (Cell(f"{name}, rate {rate:g}"), Cell(f"{RANDOM_EMBEDDINGS}, rate {rate:g}"))
                for rate in FIGURE5_CPU_RATES
                for name in _embeddings(800_000)
                if name != RANDOM_EMBEDDINGS
            },
            show="change",
        ),
    ),
)
KMEANS = Study(
    name="lee2025-kmeans",
    title="Speed of k-means in LVD, over embeddings that are recomputed in every pass",
    topic=LEE_LVD,
    paper=LEE,
    made_by="python -m benchmarks.kmeans",
    headers={
        "seconds_in_all": "seconds",
        "seconds_a_pass": "seconds per pass",
        "all_points_gb": "GB of all points",
        "distance_share": "squared distance / planted",
    },
)
THROUGHPUT = Study(
    name="lee2025-throughput",
    title=f"Speed of training at the setting of {LEE.name}",
    topic=SPEED,
    paper=LEE,
    made_by="python -m benchmarks.dense_step and python -m benchmarks.pyjuice_step",
    rows=(StudyRow(name="scalar, 512 states"), StudyRow(name="scalar, Baum-Welch, 512 states")),
    columns=("tokens per second", "ms per step"),
    claims=(
        Claim(
            "Gradient descent trains faster than Baum-Welch (ms per step on one GPU, 512 states).",
            "ascending",
            {
                "": (
                    Cell("scalar, 512 states", "AdamW", metric="step_ms"),
                    Cell("scalar, Baum-Welch, 512 states", "Baum-Welch", metric="step_ms"),
                )
            },
        ),
    ),
    headers={
        "ours_tokens_per_second": "our tokens per second",
        "ours_EM_tokens_per_second": "our tokens per second, Baum-Welch",
        "EM_times_as_fast": "times as fast, Baum-Welch",
    },
)
CPU_TRIALS = Study(
    name="lee2025-cpu-trials",
    title="Trials with few states on two CPU cores",
    topic=LEE_CPU,
    paper=LEE,
    trials=True,
    device="CPU",
    as_recorded=True,
)
