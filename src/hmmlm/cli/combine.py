"""What the commands share that make one model of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_settings import CliPositionalArg

from hmmlm.cli.parse import Arguments
from hmmlm.errors import InputError
from hmmlm.runs.folders import find_run, refuse_used
from hmmlm.terminal import counted, print_table

Weight = Annotated[float, Field(ge=0, le=1)]
ModelPaths = Annotated[
    CliPositionalArg[tuple[Annotated[Path, AfterValidator(find_run)], ...]],
    Field(description="Saved models, or folders of training runs (their best models); at least two components."),
]


class CombineArguments(Arguments):
    """Models, their weights, and the folder of the result."""

    models: ModelPaths
    out: Path
    """Folder of the new model."""
    weights: tuple[Weight, ...] = ()
    """Weights of the models in this order, separated by commas, that sum to one; none: by EM."""
    data: Path | None = None
    """Folder of a run, or made by `hmmlm data`, whose text is counted and fitted; None: that of the first run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""

    @field_validator("weights", mode="before")
    @classmethod
    def _split_at_commas(cls, values: list[str]) -> list[str]:
        return [number for value in values for number in value.split(",")]

    def check(self, count: int, what: str) -> None:
        """Raise an InputError if the folder is in use, or if the weights are not those of `count` components."""
        refuse_used(self.out)
        if self.weights and len(self.weights) != count:
            raise InputError(
                f"--weights has {counted(len(self.weights), 'number')} for {count} {what}: give one for each"
            )
        if self.weights and abs(sum(self.weights) - 1) > 1e-6:
            raise InputError(f"--weights sum to {sum(self.weights):g}, not to one")


def print_weights(
    names: Sequence[str], weights: Sequence[str], perplexities: Sequence[float] | None, caption: str = ""
) -> None:
    """Print the components and their combination, with the weights of the former and all perplexities, if known."""
    from hmmlm.runs.progress import perplexity_text

    values = [math.nan] * len(names) if perplexities is None else perplexities
    shown = [perplexity_text(value, 2) for value in values]
    if math.inf in values:
        caption += f"{'; ' if caption else ''}∞: alone, it gives a token of the text probability zero"
    print_table(("model", "weight", "valid perplexity"), zip(names, [*weights, ""], shown, strict=True), caption)
