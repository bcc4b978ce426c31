"""What a step of the models of Chiu & Rush 2020 costs: column Time of Tables 2 and 4, and seconds per epoch."""

from __future__ import annotations

from typing import Any

from papers.chiu2020 import TABLE1, TABLE1_RELEASED
from papers.chiu2020_ablations import FACTORED, FULL, SCALAR, TABLE4_RELEASED, UNDROPPED
from papers.study import CHIU, CHIU_SIZES, FORWARD, STEP, TIMES, Cell, Claim, Study, StudyRow

EPOCH = "epoch_seconds"
TOKENS, SENTENCES = 929_589, 42_068
"""Of PTB's training text, with and of `<eos>`."""
NO_DROPOUT: dict[str, Any] = {"model.dropout": 0.0}
ABLATIONS = {row.name: row for row in TABLE4_RELEASED.rows}
FULL_ROW, SCALAR_ROW, FACTORED_ROW = (ABLATIONS[f"PTB, {name}"] for name in (FULL, SCALAR, FACTORED))
LARGE, FEED_FORWARD, LSTM = "PTB, VL-HMM 2^15", "PTB, FF 5-gram 256", "PTB, LSTM 2x256"


def _timed(row: StudyRow, **paper: float) -> StudyRow:
    """Return a row whose steps are measured without training it; `paper` is added to what is printed for it."""
    printed = {name: value for name, value in row.paper.items() if name == FORWARD}
    return StudyRow(name=row.name, recipe=row.recipe, settings=row.settings, paper={**printed, **paper})


def _undropped(row: StudyRow) -> StudyRow:
    name, settings = f"{row.name}, {UNDROPPED}", {**row.settings, **NO_DROPOUT}
    return StudyRow(name=name, recipe=row.recipe, settings=settings)


def _faster(metric: str, fast: str, slow: str) -> tuple[Cell, Cell]:
    return Cell(f"PTB, {fast}", fast, metric), Cell(f"PTB, {slow}", slow, metric)


TIME = Study(
    name=TIMES,
    title=f"{CHIU.name}, column Time of Tables 2 and 4, and seconds per epoch",
    topic=CHIU_SIZES,
    paper=CHIU,
    made_by="python -m benchmarks.chiu2020_time",
    rows=(
        *map(_timed, TABLE4_RELEASED.rows),
        _undropped(SCALAR_ROW),
        _undropped(FACTORED_ROW),
        _timed(TABLE1_RELEASED.rows[0], epoch_seconds=433),
        *(
            _timed(row, epoch_seconds={FEED_FORWARD: 3, LSTM: 23}[row.name])
            for row in TABLE1.rows
            if row.name in (FEED_FORWARD, LSTM)
        ),
    ),
    columns=("paper ms", "forward ms", "ms per step", "peak GB", "paper seconds per epoch"),
    headers={"evaluation_ms": "evaluation ms", EPOCH: "seconds per epoch"},
    claims=(
        Claim(
            "State dropout of a half makes computing parameters and inference 4 times as fast (within 10%), ms.",
            "ascending",
            {
                f"{kind}, {what}": _faster(metric, dropped, undropped)
                for kind, dropped, undropped in (
                    ("networks", FULL, UNDROPPED),
                    ("scalar", SCALAR, f"{SCALAR}, {UNDROPPED}"),
                )
                for what, metric in (("forward pass", FORWARD), ("training step", STEP))
            },
            tolerance=0.1,
            factor=4,
        ),
        Claim(
            "A forward pass of the scalar model is 3 times as fast (within 10%), ms.",
            "ascending",
            {"": _faster(FORWARD, SCALAR, FULL)},
            tolerance=0.1,
            factor=3,
        ),
        Claim(
            "State dropout of a half halves the time of a training step (within 10%), ms.",
            "ascending",
            {"": _faster(STEP, FULL, UNDROPPED)},
            tolerance=0.1,
            factor=2,
        ),
        Claim(
            "Factored embeddings make a forward pass slower, ms.", "ascending", {"": _faster(FORWARD, FULL, FACTORED)}
        ),
        Claim(
            "An epoch of PTB takes least time with the FF, then the LSTM, then the VL-HMM, s.",
            "ascending",
            {"": tuple(Cell(name, name.removeprefix("PTB, "), EPOCH) for name in (FEED_FORWARD, LSTM, LARGE))},
        ),
    ),
)
