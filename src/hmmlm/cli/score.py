"""`hmmlm score`: log-probabilities of the lines and tokens of a text."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from hmmlm.cli.models import ModelArguments
from hmmlm.cli.parse import parse
from hmmlm.errors import InputError

if TYPE_CHECKING:
    from hmmlm.lm.scoring import TextScore

DESCRIPTION = """Print the natural log-probability of every line of a text, <eos> included, its number of tokens,
its perplexity and its number of unknown words; with --tokens also the log-probability of every
token given those before it. Every line is scored on its own; a blank line has no tokens, as in
`hmmlm eval`.

examples:
  hmmlm score runs/mine sentences.txt
  hmmlm score runs/mine sentences.txt --tokens --format json
  echo "The function returns a list." | hmmlm score latest - --format tsv"""
LINES = 1_000  # scored together

Row = tuple[int, str, list[tuple[str, float]], "TextScore"]


class ScoreArguments(ModelArguments):
    file: Annotated[CliPositionalArg[str], Field(description="A text file, or - for standard input.")]
    format: Literal["text", "tsv", "json"] = "text"
    """text: for reading; tsv: tab-separated with a header; json: one object per line."""
    tokens: bool = False
    """Also print every token."""


def run(argv: list[str]) -> int:
    arguments = parse(ScoreArguments, argv, "score", DESCRIPTION)

    import torch

    from hmmlm.data.text import read_lines
    from hmmlm.lm.mixture import load_text_model
    from hmmlm.lm.scoring import perplexity, score_of
    from hmmlm.runs.progress import perplexity_text
    from hmmlm.terminal import printable

    lm = load_text_model(arguments.model, arguments.device)

    def rows() -> Iterator[Row]:
        lines = enumerate(_standard_input() if arguments.file == "-" else read_lines(Path(arguments.file)), 1)
        while some := list(islice(lines, LINES)):
            encoded = [lm.encode(line) if line else [] for _, line in some]
            scored = iter(lm.token_log_probs([ids for ids in encoded if ids]))
            for (number, line), ids in zip(some, encoded, strict=True):
                log_probs = next(scored) if ids else torch.zeros(0)
                names = [lm.tokenizer.token(i) for i in ids]
                yield (
                    number,
                    line,
                    list(zip(names, log_probs.tolist(), strict=True)),
                    score_of(lm.tokenizer, ids, log_probs),
                )

    def text(row: Row) -> str:
        _, line, tokens, score = row
        figures = f"{score.log_likelihood:12.4f} {score.tokens:7,} {perplexity_text(score.perplexity):>11}"
        shown = f"{figures} {score.unknown_words:8,}  {printable(line)}"
        each = [f"\n{log_prob:12.4f}   {printable(token)}" for token, log_prob in tokens]
        return shown + "".join(each if arguments.tokens else [])

    def tsv(row: Row) -> str:
        number, line, tokens, score = row
        if arguments.tokens:
            each = enumerate(tokens, 1)
            return "\n".join(f"{number}\t{i}\t{log_prob:.6f}\t{printable(token)}" for i, (token, log_prob) in each)
        figures = f"{score.log_likelihood:.6f}\t{score.tokens}\t{score.perplexity:.4f}\t{score.unknown_words}"
        return f"{number}\t{figures}\t{printable(line)}"

    def as_json(row: Row) -> str:
        number, line, tokens, score = row
        content: dict[str, Any] = {"line": number, "text": line, "log_prob": _finite(score.log_likelihood)}
        content |= {"tokens": score.tokens, "perplexity": _finite(score.perplexity), "unknown": score.unknown_words}
        if arguments.tokens:
            content["token_log_probs"] = [[token, _finite(log_prob)] for token, log_prob in tokens]
        return json.dumps(content, ensure_ascii=False, allow_nan=False)

    formats: dict[str, tuple[str, Callable[[Row], str]]] = {
        "text": (f"{'log p':>12} {'tokens':>7} {'perplexity':>11} {'unknown':>8}  text", text),
        "tsv": ("line\tlog_prob\ttokens\tperplexity\tunknown\ttext", tsv),
        "json": ("", as_json),
    }
    header, shown = formats[arguments.format]
    if arguments.format == "tsv" and arguments.tokens:
        header = "line\tposition\tlog_prob\ttoken"
    if header:
        print(header)
    total, tokens, unknown = 0.0, 0, 0
    for row in rows():
        if text_of_row := shown(row):  # a blank line has no row of tokens
            print(text_of_row)
        total, tokens = total + row[3].log_likelihood, tokens + row[3].tokens
        unknown += row[3].unknown_words
    if arguments.format == "text" and tokens:
        together = perplexity_text(perplexity(total, tokens))
        print(f"{total:12.4f} {tokens:7,} {together:>11} {unknown:8,}  all lines")
    return 0


def _standard_input() -> Iterator[str]:
    """Yield the stripped lines of standard input."""
    from hmmlm.data.text import stream_lines

    if sys.stdin is None:
        raise InputError("standard input is closed: redirect a file to it, or give the name of a file")
    return stream_lines(Path("standard input"), lambda: sys.stdin.buffer)


def _finite(value: float) -> float | None:
    """Return a number as JSON can write it."""
    return value if math.isfinite(value) else None
