"""What recipes resolved to when their first records were made: a recipe that changes later changes what a record means.

`python -m papers publish` adds the recipes of new records; lines that exist are never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hmmlm.config.renames import present_names
from hmmlm.data.files import write_bytes
from papers.settings import PLACES, recipe_settings

FILE = Path("papers/recipes/recorded.json")


def read(root: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of every recipe that has records, under the names of when they were made."""
    return json.loads((root / FILE).read_text()) if (root / FILE).exists() else {}


def add(recipes: Iterable[str], root: Path) -> None:
    """Add recipes that are not in the file."""
    found = read(root)
    for recipe in sorted(set(recipes) - found.keys()):
        found[recipe] = {name: value for name, value in recipe_settings(recipe).items() if name not in PLACES}
    lines = [f"{json.dumps(recipe)}: {json.dumps(settings)}" for recipe, settings in found.items()]
    (root / FILE).parent.mkdir(parents=True, exist_ok=True)
    write_bytes(root / FILE, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def changes(recipe: str, root: Path) -> Iterator[str]:
    """Yield the settings of a recipe that are not what they were, and why if it is not in the file."""
    found, today = read(root), recipe_settings(recipe)
    if recipe not in found:
        yield f"is not in {FILE}: python -m papers publish adds it"
    for name, value in present_names(found.get(recipe, {})).items():
        if name not in PLACES and today.get(name) != value:
            yield f"{name} is {today.get(name)!r}, and was {value!r} when its first records were made"
