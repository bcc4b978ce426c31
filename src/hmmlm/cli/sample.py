"""`hmmlm sample`: text from a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hmmlm.cli.models import ModelArguments
from hmmlm.cli.parse import parse
from hmmlm.errors import InputError
from hmmlm.section import Seed

DESCRIPTION = """Print exact samples from a model, each until <eos>. The same seed gives the same text.

examples:
  hmmlm sample runs/mine
  hmmlm sample runs/mine --num-samples 3 --prompt "The function" --temperature 0.7
  hmmlm sample runs/mine --no-allow-unk
  hmmlm sample runs/mine --must function --must "a list|a tuple" --never None
  hmmlm sample runs/mine --regex "[A-Z][a-z]+ (is|was) .*" --words 5-12
  hmmlm sample runs/mine --prompt "The function" --suffix "a list" --num-samples 3"""


class SampleArguments(ModelArguments):
    num_samples: Annotated[int, Field(gt=0, le=1_000_000)] = 5
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
    allow_unk: bool = True
    """Whether <unk> may be sampled; --no-allow-unk samples every word given that it is known."""
    must: tuple[str, ...] = ()
    """A word or phrase that every sample contains, or several separated by |, of which it contains one; may be given
    several times. Samples then end within --max-new-tokens, <eos> counted."""
    never: tuple[str, ...] = ()
    """A word or phrase that no sample contains; may be given several times."""
    match: Literal["word", "prefix", "substring"] = "word"
    """How --must and --never match: whole words, beginnings of words, or anywhere."""
    choice: tuple[str, ...] = ()
    """A text that may follow the prompt; may be given several times."""
    regex: str | None = None
    """A regular expression that what follows the prompt matches as a whole."""
    json_schema: Path | None = None
    """A file with a JSON schema of what follows the prompt (needs the package outlines-core)."""
    words: str | None = None
    """Number of words after the prompt: 5-12, 5- or -12."""
    tokens: str | None = None
    """Number of tokens after the prompt, <eos> not counted: 5-12, 5- or -12."""
    suffix: str | None = None
    """The text that samples end with."""


def run(argv: list[str]) -> int:
    arguments = parse(SampleArguments, argv, "sample", DESCRIPTION)

    from hmmlm.data.files import parse_json
    from hmmlm.lm.mixture import load_text_model
    from hmmlm.terminal import without_controls

    constraints: Any = {}
    for name in ("regex", "suffix"):
        if (value := getattr(arguments, name)) is not None:
            constraints[name] = value
    for name in ("words", "tokens"):
        if (value := getattr(arguments, name)) is not None:
            constraints[name] = read_bounds(name, value)
    if arguments.json_schema is not None:
        constraints["json"] = parse_json(arguments.json_schema)
    lm = load_text_model(arguments.model, arguments.device)
    texts = lm.generate(
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
        allow_unk=arguments.allow_unk,
        must=[texts.split("|") for texts in arguments.must],
        never=arguments.never,
        num_samples=arguments.num_samples,
        match=arguments.match,
        choice=arguments.choice,
        **constraints,
    )
    for text in texts:
        print(without_controls(text))
    return 0


def read_bounds(name: str, text: str) -> tuple[int | None, int | None]:
    """Return the bounds in "5-12", "5-", "-12" or "5"."""
    found = re.fullmatch(r"(\d{0,9})-(\d{0,9})|(\d{1,9})", text)
    if found is None or not any(found.groups()):
        raise InputError(f"--{name}: give a range of numbers such as 5-12, 5- or -12, not {text!r}")
    low, high, only = found.groups()
    return (int(only), int(only)) if only else (int(low) if low else None, int(high) if high else None)
