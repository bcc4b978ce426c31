"""Table 3 and Figures 3 and 4 of Chiu & Rush 2020: constraints on emissions, numbers of states and of blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from papers.chiu2020_ablations import AXIS, ptb_row
from papers.study import CHIU, CHIU_SIZES, CHIU_TABLES, TRAIN, VALID, Bars, Cell, Claim, Lines, Study, StudyRow
from papers.ticks import power_of_two

NO_DROPOUT = "no dropout"
EIGHT: dict[str, Any] = {"train.epochs": 8}
"""The length of Table 3 and the figures; the recipes have 30 epochs."""


def _without_dropout(row: StudyRow, **labels: Any) -> StudyRow:
    """Return the row without state dropout; not in the paper, where half of the states are dropped."""
    names = {"name": f"{row.name}, {NO_DROPOUT}", "bar": f"{row.bar}, {NO_DROPOUT}"}
    settings = {**row.settings, "model.dropout": 0.0}
    return replace(row, settings=settings, paper={}, group=f"PTB, {NO_DROPOUT}", **{**names, **labels})


def _constraint(states: int, blocks: int, valid: float) -> StudyRow:
    settings = {"model.num_states": states, "model.blocks": blocks, **EIGHT}
    return ptb_row(f"Brown, {states} states, {blocks} blocks", "ptb-vl-hmm", settings, valid)


def _uniform(states: int, valid: float) -> StudyRow:
    settings = {"model.num_states": states, "model.kind": "uniform", **EIGHT}
    return ptb_row(f"uniform, {states} states", "ptb-vl-hmm", settings, valid)


EIGHT_BLOCKS = "PTB, Brown, 1024 states, 8 blocks"
SMALL = (
    ptb_row("no constraint, 1024 states", "ptb-vl-hmm", {"model.num_states": 1024, "model.blocks": 0, **EIGHT}, 180),
    _constraint(1024, 4, 182),
    _constraint(1024, 8, 194),
    _constraint(8192, 64, 142),
)
TABLE3 = Study(
    name="chiu2020-table3",
    title=f"{CHIU.name}, Table 3: emission constraints",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=(
        _constraint(16384, 32, 137),
        _constraint(16384, 64, 138),
        _constraint(16384, 128, 134),
        _constraint(16384, 256, 136),
        *SMALL,
        _uniform(8192, 150),
        _uniform(16384, 146),
        *map(_without_dropout, SMALL),
    ),
    drawing=Bars(VALID, AXIS),
    claims=(
        Claim(
            "Brown blocks outperform uniform subsets of states.",
            "ascending",
            {
                "8,192 states": (
                    Cell("PTB, Brown, 8192 states, 64 blocks", "Brown", VALID),
                    Cell("PTB, uniform, 8192 states", "uniform", VALID),
                ),
                "16,384 states": (
                    Cell("PTB, Brown, 16384 states, 128 blocks", "Brown", VALID),
                    Cell("PTB, uniform, 16384 states", "uniform", VALID),
                ),
            },
        ),
        Claim(
            "With 2^10 states, 4 blocks match an unconstrained HMM (within 3%).",
            "similar",
            {
                "half of the states dropped": (
                    Cell("PTB, no constraint, 1024 states", "no constraint", VALID),
                    Cell("PTB, Brown, 1024 states, 4 blocks", "4 blocks", VALID),
                ),
                NO_DROPOUT: (
                    Cell("PTB, no constraint, 1024 states, no dropout", "no constraint", VALID),
                    Cell("PTB, Brown, 1024 states, 4 blocks, no dropout", "4 blocks", VALID),
                ),
            },
            tolerance=0.03,
        ),
        Claim(
            "With 8 blocks the model underperforms that of 4, and an unconstrained HMM.",
            "ascending",
            {
                f"{what}, {text}": (
                    Cell(f"{other}{more}", text, VALID),
                    Cell(f"{EIGHT_BLOCKS}{more}", "8 blocks", VALID),
                )
                for what, more in (("half of the states dropped", ""), (NO_DROPOUT, f", {NO_DROPOUT}"))
                for text, other in (("no constraint", SMALL[0].name), ("4 blocks", SMALL[1].name))
            },
        ),
        Claim(
            "Uniform subsets overfit: they are better than Brown blocks on train (train).",
            "ascending",
            {
                f"{states:,} states": (
                    Cell(f"PTB, uniform, {states} states", "uniform", TRAIN),
                    Cell(f"PTB, Brown, {states} states, {blocks} blocks", "Brown", TRAIN),
                )
                for states, blocks in ((8192, 64), (16384, 128))
            },
        ),
    ),
)


def _states(power: int, valid: float | None = None) -> StudyRow:
    label = f"2^{power} states"
    labels = {"x": 2.0**power, "series": "half of the states dropped"}
    return ptb_row(label, "ptb-vl-hmm", {"model.num_states": 2**power, **EIGHT}, valid, **labels)


STATES = (*map(_states, range(10, 14)), _states(14, 134), _states(15, 125), _states(16))
FIGURE3 = Study(
    name="chiu2020-figure3",
    title=f"{CHIU.name}, Figure 3: number of states",
    topic=CHIU_SIZES,
    paper=CHIU,
    rows=(*STATES, *(_without_dropout(row, series=NO_DROPOUT) for row in STATES[:-1])),
    drawing=Lines(VALID, AXIS, "states", power_of_two),
    claims=(
        Claim(
            "Perplexity improves continuously up to 2^16 states.",
            "ascending",
            {"": tuple(Cell(row.name, row.bar, VALID) for row in reversed(STATES))},
        ),
        Claim(
            "The improvement becomes smaller with every doubling.",
            "diminishing",
            {"": tuple(Cell(row.name, row.bar, VALID) for row in STATES)},
        ),
    ),
)


KINDS = {"independent": False, "factored": True}


def _blocks(blocks: int, factored: bool) -> StudyRow:
    """Return a point of Figure 4, with the value that Tables 3 and 4 print for it."""
    kind = "factored" if factored else "independent"
    printed = {(32, False): 137, (64, False): 138, (128, False): 134, (256, False): 136, (128, True): 136}
    settings = {"model.num_states": 16384, "model.blocks": blocks, "model.block_embeddings": factored, **EIGHT}
    label, valid = f"{blocks} blocks, {kind} embeddings", printed.get((blocks, factored))
    return ptb_row(label, "ptb-vl-hmm", settings, valid, x=float(blocks), series=f"{kind} embeddings")


BLOCKS = (32, 64, 128, 256)


def _embeddings(
    text: str, rule: Literal["ascending", "descending", "similar"], *blocks: int, tolerance: float = 0
) -> Claim:
    """Return a claim about independent and factored embeddings, in this order."""
    chains = {
        f"{count} blocks": tuple(Cell(_blocks(count, kind).name, name, VALID) for name, kind in KINDS.items())
        for count in blocks
    }
    return Claim(text, rule, chains, tolerance)


FIGURE4 = Study(
    name="chiu2020-figure4",
    title=f"{CHIU.name}, Figure 4: number of blocks",
    topic=CHIU_SIZES,
    paper=CHIU,
    rows=tuple(_blocks(blocks, factored) for blocks in BLOCKS for factored in (False, True)),
    drawing=Lines(VALID, AXIS, "blocks"),
    claims=(
        Claim(
            "With 2^14 states the number of blocks hardly matters (within 3%).",
            "similar",
            {"": tuple(Cell(_blocks(blocks, False).name, f"{blocks} blocks", VALID) for blocks in BLOCKS)},
            tolerance=0.03,
        ),
        _embeddings("Independent and factored embeddings are similar (within 3%).", "similar", *BLOCKS, tolerance=0.03),
        _embeddings(
            "Independent embeddings are slightly worse (A.5's sentence; Table 4 has the opposite).",
            "descending",
            *BLOCKS,
        ),
        _embeddings("Preprint: only with 64 blocks or fewer are factored embeddings better.", "descending", 32, 64),
    ),
)
