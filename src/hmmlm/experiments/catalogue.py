"""The studies: which runs make up each table and figure of the papers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    row: str
    """The paper's row or point, with the data set."""
    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from the recipe."""
    seed: int = 0


def _states(power: int, **settings: Any) -> Run:
    return Run(f"PTB, 2^{power} states", "ptb-vl-hmm", {"model.states": 2**power, **settings})


STUDIES: dict[str, list[Run]] = {
    "chiu2020-table1": [
        Run("PTB, VL-HMM 2^15", "ptb-vl-hmm"),
        Run("WikiText-2, VL-HMM 2^15", "wikitext2-vl-hmm"),
    ],
    "chiu2020-table4": [
        Run("PTB, VL-HMM (2^14)", "ptb-vl-hmm-14"),
        Run("PTB, - state dropout", "ptb-vl-hmm-14-no-dropout"),
        Run("PTB, + block emb", "ptb-vl-hmm-14-factored"),
        Run("PTB, - neural param", "ptb-vl-hmm-14-scalar"),
    ],
    "chiu2020-figure3": [_states(power) for power in range(10, 17)],
}
