"""`hmmlm sample`: text from a model."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from hmmlm.cli.parse import Arguments, ModelPath, parse

DESCRIPTION = """Print exact samples from a model, each until <eos>. The same seed gives the same text.

examples:
  hmmlm sample runs/mine
  hmmlm sample runs/mine --num 3 --prompt "The function" --temperature 0.7
  hmmlm sample runs/mine --no-unknown
  hmmlm sample runs/mine --must function --must "a list|a tuple" --never None"""


class SampleArguments(Arguments):
    model: ModelPath
    num: PositiveInt = 5
    """Number of samples."""
    prompt: str = ""
    """What the samples start with."""
    max_new_tokens: int = 100
    """Maximum number of tokens of a sample."""
    temperature: float = 1.0
    """Below 1: likely words become more likely; 0: always the most likely."""
    top_k: int | None = None
    """Sample among the k most likely words only."""
    seed: NonNegativeInt | None = None
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

    from hmmlm.text.lm import load

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
