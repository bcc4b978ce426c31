"""`hmmlm sample`: text from a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from hmmlm.cli.parse import ModelPath, parse
from hmmlm.errors import InputError

DESCRIPTION = """Exact samples from a model, each until <eos>. The same seed gives the same text.

examples:
  hmmlm sample runs/mine
  hmmlm sample runs/mine --num 3 --prompt "The function" --temperature 0.7
  hmmlm sample runs/mine --no-unknown
  hmmlm sample runs/mine --must function --must "a list|a tuple" --never None"""


Phrases = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True)
class Arguments:
    model: ModelPath
    num: int = 5
    """Number of samples."""
    prompt: str = ""
    """What the samples begin with."""
    max_new_tokens: int = 100
    """Most tokens of a sample."""
    temperature: float = 1.0
    """Below 1: likelier words become likelier still; 0: always the likeliest."""
    top_k: int | None = None
    """Only among the k likeliest words."""
    seed: int | None = None
    """Sample i uses seed + i; None: other samples every time."""
    unknown: bool = True
    """Whether <unk> may be drawn; --no-unknown draws every word given that it is a known one."""
    must: Phrases = ()
    """A word or phrase that every sample has, or several with | between them, of which it has one; may be given
    several times. Samples then end within --max-new-tokens, <eos> counted."""
    never: Phrases = ()
    """A word or phrase that no sample has; likewise."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "sample", DESCRIPTION)
    if arguments.num < 1:
        raise InputError(f"--num must be 1 or more, not {arguments.num}")
    if arguments.seed is not None and arguments.seed < 0:
        raise InputError(f"--seed must be 0 or more, not {arguments.seed}")

    from hmmlm.lm import load

    lm = load(arguments.model)
    must = [texts.split("|") for texts in arguments.must]
    for i in range(arguments.num):
        text = lm.generate(
            arguments.prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            seed=None if arguments.seed is None else arguments.seed + i,
            unknown=arguments.unknown,
            must=must,
            never=arguments.never,
        )
        print(text)
    return 0
