"""`hmmlm sample`: text from a model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hmmlm.cli.models import ModelArguments, open_model
from hmmlm.cli.parse import parse
from hmmlm.section import Seed

DESCRIPTION = """Print exact samples from a model, each until <eos>. The same seed gives the same text.

examples:
  hmmlm sample runs/mine
  hmmlm sample runs/mine --num 3 --prompt "The function" --temperature 0.7
  hmmlm sample runs/mine --no-unknown
  hmmlm sample runs/mine --must function --must "a list|a tuple" --never None"""


class SampleArguments(ModelArguments):
    num: Annotated[int, Field(gt=0, le=1_000_000)] = 5
    """Number of samples."""
    prompt: str = ""
    """What the samples start with."""
    max_new_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Maximum number of tokens of a sample."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Below 1: likely words become more likely; 0: always the most likely."""
    top_k: Annotated[int, Field(gt=0)] | None = None
    """Sample among the k most likely words only."""
    seed: Seed | None = None
    """Sample i uses seed + i; None: different samples every time."""
    unknown: bool = True
    """Whether <unk> may be sampled; --no-unknown samples every word given that it is known."""
    must: tuple[str, ...] = ()
    """A word or phrase that every sample contains, or several separated by |, of which it contains one; may be given
    several times. Samples then end within --max-new-tokens, <eos> counted."""
    never: tuple[str, ...] = ()
    """A word or phrase that no sample contains; may be given several times."""


def run(argv: list[str]) -> int:
    arguments = parse(SampleArguments, argv, "sample", DESCRIPTION)

    from hmmlm.report.labels import without_controls

    lm = open_model(arguments.model, arguments.device)
    texts = lm.generate(
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        unknown=arguments.unknown,
        must=[texts.split("|") for texts in arguments.must],
        never=arguments.never,
        num=arguments.num,
    )
    for text in texts:
        print(without_controls(text))
    return 0
