"""Tables 2 and 4 of Chiu & Rush 2020: 2^14 states without networks or state dropout, and with block embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from papers.chiu2020 import SCALAR_RECIPE, printed
from papers.study import (
    CHIU,
    CHIU_TABLES,
    FORWARD,
    PARAMETERS,
    PERPLEXITY_COLUMNS,
    TRAIN,
    UNSPENT,
    VALID,
    Bars,
    Cell,
    Claim,
    NotRun,
    Study,
    StudyRow,
)

AXIS = "validation perplexity, PTB (lower is better)"
RELEASED: dict[str, Any] = {
    "model.form": "released",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.0,
    "schedule.kind": "plateau",
    "train.checks_per_epoch": 4,
}
"""The released networks and the paper's schedule, as in the recipe ptb-vl-hmm-released."""
ABLATION_COLUMNS = ("paper parameters", "parameters", "paper ms", "forward ms", *PERPLEXITY_COLUMNS)


def ptb_row(
    label: str, recipe: str, settings: Mapping[str, Any], valid: float | None = None, **labels: Any
) -> StudyRow:
    """Return a row on PTB with seed 0, and its printed validation perplexity."""
    paper = {} if valid is None else {VALID: valid}
    labels = {"name": f"PTB, {label}", "bar": label, "group": "PTB", "seeds": (0,), "paper": paper, **labels}
    return StudyRow(recipe=recipe, settings=settings, **labels)


def _ablation(label: str, recipe: str, millions: float, train: float, valid: float, milliseconds: float) -> StudyRow:
    """Return a line of Tables 2 and 4."""
    return ptb_row(label, recipe, {}, paper={**printed(millions, valid), TRAIN: train, FORWARD: milliseconds})


def _for_epochs(rows: Sequence[StudyRow], *epochs: int) -> tuple[StudyRow, ...]:
    """Return rows with the number of epochs of each."""
    pairs = zip(rows, epochs, strict=True)
    return tuple(replace(row, settings={**row.settings, "train.epochs": count}) for row, count in pairs)


FULL, SCALAR, UNDROPPED, FACTORED = "VL-HMM (2^14)", "- neural param", "- state dropout", "+ block emb"
ABLATIONS = (
    _ablation(FULL, "ptb-vl-hmm-14", 7.2, 115, 134, 40),
    _ablation(SCALAR, SCALAR_RECIPE, 423, 119, 169, 14),
    _ablation(UNDROPPED, "ptb-vl-hmm-14-no-dropout", 7.2, 88, 157, 100),
    _ablation(FACTORED, "ptb-vl-hmm-14-factored", 5.6, 122, 136, 48),
)


def _released(row: StudyRow, epochs: int, *others: int) -> StudyRow:
    """Return the row with the released networks and settings; the scalar model has no networks.

    `epochs` are those of its longest run; it is run for `others` too.
    """
    settings = {name: value for name, value in RELEASED.items() if name != "model.form" or row.recipe != SCALAR_RECIPE}
    also = tuple({"train.epochs": count} for count in others)
    return replace(row, settings={**settings, "train.epochs": epochs}, also=also)


def _without_decay(row: StudyRow) -> StudyRow:
    """Return the row without weight decay, as in the paper; networks then prefer a larger rate."""
    rate = {} if row.recipe == SCALAR_RECIPE else {"optimizer.lr": 0.005}
    return replace(row, settings={"optimizer.weight_decay": 0.0, **rate})


def _ablation_claim(text: str, *rows: str, metric: str = VALID, factor: float = 1.0) -> Claim:
    """Return the claim that the metric ascends over rows of Tables 2 and 4."""
    chain = tuple(Cell(f"PTB, {row}", row, metric) for row in rows)
    return Claim(text, "ascending", {"": chain}, factor=factor, tolerance=0.1 if factor > 1 else 0.0)


def _similar_on_train(settings: str) -> Claim:
    """Return the claim that both parameterizations fit the training text alike; printed perplexities differ by 3.5%."""
    chain = tuple(Cell(f"PTB, {row}", row, TRAIN) for row in (FULL, SCALAR))
    text = f"Networks and scalar parameters reach similar train perplexity ({settings}; within 5%)."
    return Claim(text, "similar", {"": chain}, tolerance=0.05)


TABLE2 = Study(
    name="chiu2020-table2",
    title=f"{CHIU.name}, Table 2: ablations at 2^14 states, our settings",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=_for_epochs(ABLATIONS[:3], 16, 8, 12),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
    claims=(
        _similar_on_train("our settings"),
        _ablation_claim("Networks generalize better than scalar parameters (our settings).", FULL, SCALAR),
    ),
)
TABLE4_RELEASED = Study(
    name="chiu2020-table4-released",
    title=f"{CHIU.name}, Tables 2 and 4, with the released networks and settings",
    topic=CHIU_TABLES,
    paper=CHIU,
    not_run=(NotRun(UNSPENT),),
    rows=tuple(
        _released(row, *epochs)
        for row, epochs in zip(ABLATIONS, ((40, 30, 50), (9, 50), (37, 12, 50), (34, 30, 50)), strict=True)
    ),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
    claims=(
        _similar_on_train("released settings"),
        _ablation_claim("The neural parameterization generalizes better than the scalar one.", FULL, SCALAR),
        _ablation_claim(
            "It has almost 100 times fewer parameters (within 10%).", FULL, SCALAR, metric=PARAMETERS, factor=100
        ),
        _ablation_claim("State dropout improves perplexity (released settings).", FULL, UNDROPPED),
        _ablation_claim("Factored state embeddings are slightly worse (Table 4).", FULL, FACTORED),
        _ablation_claim(
            "Parameters grow as block embeddings, then networks are removed.",
            FACTORED,
            FULL,
            SCALAR,
            metric=PARAMETERS,
        ),
    ),
)
TABLE4 = Study(
    name="chiu2020-table4",
    title=f"{CHIU.name}, Tables 2 and 4: ablations at 2^14 states, our settings",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=_for_epochs(ABLATIONS, 16, 8, 12, 16),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
    claims=(_ablation_claim("State dropout improves perplexity (our settings: weight decay).", FULL, UNDROPPED),),
)
TABLE4_NO_DECAY = Study(
    name="chiu2020-table4-no-decay",
    title=f"{CHIU.name}, Tables 2 and 4, without weight decay",
    topic=CHIU_TABLES,
    paper=CHIU,
    rows=_for_epochs([_without_decay(row) for row in ABLATIONS], 8, 8, 8, 8),
    not_run=(NotRun("its recipe has no decay: the row of chiu2020-table4", rows=(f"PTB, {SCALAR}",)),),
    claims=(_ablation_claim("State dropout improves perplexity (our schedule, no decay).", FULL, UNDROPPED),),
    columns=ABLATION_COLUMNS,
    drawing=Bars(VALID, AXIS),
)
