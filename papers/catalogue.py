"""Every study, in the order in which it is published. Each file of results/ belongs to one of them."""

from __future__ import annotations

from papers import (
    chiu2020,
    chiu2020_ablations,
    chiu2020_structure,
    chiu2020_time,
    chiu2020_trials,
    lee2025,
    lee2025_initialization,
    lee2025_networks,
    other,
    record,
)
from papers.study import Study

STUDIES: dict[str, Study] = {
    value.name: value
    for module in (
        record,
        chiu2020,
        chiu2020_ablations,
        chiu2020_structure,
        chiu2020_time,
        chiu2020_trials,
        lee2025,
        lee2025_initialization,
        lee2025_networks,
        other,
    )
    for member in vars(module).values()
    for value in (member if isinstance(member, tuple) else (member,))
    if isinstance(value, Study)
}
"""By name. A study defined in one of these modules, alone or in a tuple, is in it."""
