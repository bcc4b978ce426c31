"""Studies that both papers invite and neither ran: LVD or linear factors on blocks, less text, growth by splitting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from papers.chiu2020 import BASELINES
from papers.chiu2020_structure import EIGHT
from papers.study import UNSPENT, NotRun, Study, StudyRow
from papers.variants import TEACHERS

SEEDS = (0, 1)
PORTIONS = (4, 16)
"""Parts of the training text of PTB of which one is kept; `papers.portions` writes them."""
GROWN = "2^12 to 2^15 states, each split in two after two epochs, then eight epochs"


def portion(parts: int) -> str:
    """Return the folder of a part of PTB, relative to where the runs start."""
    return f"tokens/ptb-{parts}"


def _row(name: str, recipe: str = "ptb-vl-hmm-14", **settings: Any) -> StudyRow:
    """Return a row for eight epochs, with settings given as section__name."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return StudyRow(name=f"PTB, {name}", recipe=recipe, settings={**EIGHT, **named}, seeds=SEEDS)


def _less_text(parts: int) -> Iterator[StudyRow]:
    """Yield models of a part of the text, with as many steps as on all of it; the vocabulary is that of all of it."""
    text, epochs = f"1/{parts} of the text", 8 * parts
    for states in (10, 14):
        yield _row(f"2^{states} states, {text}", model__num_states=2**states, data=portion(parts), train__epochs=epochs)
    lstm = next(row for row in BASELINES if row.name == "PTB, LSTM 2x256")
    settings = {**lstm.settings, "data": portion(parts), "train.epochs": epochs}
    yield replace(lstm, name=f"{lstm.name}, {text}", settings=settings, seeds=SEEDS, paper={})


BEYOND = Study(
    name="beyond",
    title="What both papers invite: LVD and linear factors on Brown blocks, and less text",
    rows=(
        _row("2^14 states"),
        _row(
            "2^14 states, LVD inside blocks",
            initialization__kind="lvd",
            initialization__teacher=TEACHERS["TinyLlama-1.1B"],
            initialization__labels="cached",
        ),
        _row("2^14 states, linear factors", "ptb-vl-hmm-14-linear"),
        _row("2^10 states", model__num_states=1024),
        *(row for parts in PORTIONS for row in _less_text(parts)),
        _row("2^15 states", "ptb-vl-hmm"),
        _row("2^15 states, 14 epochs", "ptb-vl-hmm", train__epochs=14),
    ),
    not_run=(NotRun(UNSPENT),),
)
GROWTH = Study(
    name="growth",
    title="The very large HMM grown from 2^12 to 2^15 states, beside the last two rows of beyond",
    made_by="python -m papers.growth",
)
