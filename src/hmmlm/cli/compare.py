"""`hmmlm compare`: two models on the same text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from hmmlm.cli.models import read_texts, tokens_of_text, warn_unknown
from hmmlm.cli.parse import Arguments, ModelPath, parse
from hmmlm.errors import InputError
from hmmlm.terminal import counted

if TYPE_CHECKING:
    import numpy as np

    from hmmlm.lm.scoring import TextScore
    from hmmlm.lm.textmodel import TextModel

DESCRIPTION = """Score the same text with two models and print both results; the difference in bits per byte (per
token, for token files) with its 95% interval; the share of lines, or documents, to which the first
model assigns the higher probability; and, for one vocabulary, the ratio of the perplexities.

The interval is a paired bootstrap over lines: it says whether the difference would survive another
text of this kind, not whether it would survive another training seed.

examples:
  hmmlm compare runs/mine runs/other
  hmmlm compare runs/mine latest --data another.txt --json"""


class CompareArguments(Arguments):
    first: ModelPath
    second: ModelPath
    data: str | None = None
    """A text file, a folder with train, valid and test files, a folder made by `hmmlm data`, or a corpus by name; None:
    the data the first model was trained on."""
    data_folder: Path | None = None
    """Folder of named corpora."""
    split: Literal["train", "valid", "test"] = "test"
    """Split of a corpus."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    json_output: bool = Field(default=False, alias="json")
    """Print JSON."""


class Scored(NamedTuple):
    """A model's log-likelihoods of the texts [N], and its score of all of them."""

    log_likelihood: np.ndarray
    total: TextScore


class Texts(NamedTuple):
    """The tokens of the texts for either model, and the unit in which the models are compared."""

    first: list[list[int]]
    second: list[list[int]]
    unit: str
    sizes: np.ndarray
    """[N] units per text."""
    text_bytes: int | None


def run(argv: list[str]) -> int:
    arguments = parse(CompareArguments, argv, "compare", DESCRIPTION)

    import numpy as np

    from hmmlm.lm.mixture import load_text_model
    from hmmlm.report.comparison import paired_difference

    paths = (arguments.first, arguments.second)
    models = [load_text_model(path, arguments.device) for path in paths]
    texts = _token_texts(arguments, *models) or _read(arguments, *models)
    scored = [_score(lm, t, texts.text_bytes) for lm, t in zip(models, (texts.first, texts.second), strict=True)]
    for path, found in zip(paths, scored, strict=True):
        impossible = int(np.isinf(found.log_likelihood).sum())
        if impossible:
            raise InputError(
                f"{impossible:,} of {counted(len(texts.sizes), 'text')} have probability zero under {path}"
            )
    first, second = (found.log_likelihood for found in scored)
    bits = paired_difference(-first / math.log(2), -second / math.log(2), texts.sizes)
    result: dict[str, Any] = {
        "texts": len(texts.sizes),
        "models": [{"model": str(path), **s.total.figures()} for path, s in zip(paths, scored, strict=True)],
        f"bits_per_{texts.unit}_difference": bits._asdict(),
        "first_better_share": float((first > second).mean()),
    }
    if models[0].tokenizer.fingerprint() == models[1].tokenizer.fingerprint():
        loss = paired_difference(-first, -second, np.array([len(tokens) for tokens in texts.first]))
        result["perplexity_ratio"] = {name: math.exp(value) for name, value in loss._asdict().items()}
    if arguments.json_output:
        print(json.dumps(result, indent=1))
    else:
        _print(result, texts.unit)
    shares = {f"the text for {path}": s.total.unknown_share for path, s in zip(paths, scored, strict=True)}
    warn_unknown(shares, arguments.data or str(models[0].config.get("data", "")))
    return 0


def _token_texts(arguments: CompareArguments, first: TextModel, second: TextModel) -> Texts | None:
    """Return the texts of the first model's run, or of a folder of token files, if both models have its vocabulary."""
    import numpy as np

    from hmmlm.training.prepare import reopen

    folder = tokens_of_text(first, arguments.first, arguments.data)
    if folder is None:
        return None
    data = reopen(folder)
    if len({t.fingerprint() for t in (data.tokenizer, first.tokenizer, second.tokenizer)}) > 1:
        if arguments.data is None:  # the text itself may still be there
            return None
        raise InputError(f"the models do not have the vocabulary of the token files in {folder}: give the text itself")
    file = data.tokens[arguments.split]
    texts = [part.tolist() for part in np.split(np.asarray(file.tokens), file.documents[1:-1]) if len(part)]
    return Texts(texts, texts, "token", np.array([len(text) for text in texts]), file.text_bytes)


def _read(arguments: CompareArguments, first: TextModel, second: TextModel) -> Texts:
    """Read a text, and encode it for either model."""
    import numpy as np

    from hmmlm.data.corpora import document_tokens

    documents = read_texts(first, arguments.data, arguments.data_folder, (arguments.split,))
    texts = [document for found in documents.values() for document in found]
    sizes = np.array([sum(len(line.encode()) + 1 for line in document) for document in texts])
    encoded = [[document_tokens(document, lm.tokenizer) for document in texts] for lm in (first, second)]
    return Texts(encoded[0], encoded[1], "byte", sizes, int(sizes.sum()))


def _score(lm: TextModel, texts: list[list[int]], text_bytes: int | None) -> Scored:
    """Score the texts one after the other, as `hmmlm eval` reads them."""
    import numpy as np

    from hmmlm.lm.scoring import score_of

    tokens = [token for text in texts for token in text]
    log_probs = lm.token_log_probs([tokens])[0]
    each = log_probs.split([len(text) for text in texts])
    return Scored(
        np.array([float(values.sum()) for values in each]), score_of(lm.tokenizer, tokens, log_probs, text_bytes)
    )


def _print(result: dict[str, Any], unit: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hmmlm.runs.progress import perplexity_text
    from hmmlm.terminal import printable

    table = Table("", "model", "tokens", "perplexity", "bits per\nbyte", "unknown\nwords", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for letter, score in zip("AB", result["models"], strict=True):
        per_byte = "–" if score["bits_per_byte"] is None else f"{score['bits_per_byte']:.4f}"
        figures = (f"{score['tokens']:,}", perplexity_text(score["perplexity"], 2), per_byte)
        table.add_row(letter, Text(printable(score["model"])), *figures, f"{score['unknown_share']:.2%}")
    Console().print(table)
    bits = result[f"bits_per_{unit}_difference"]
    print(f"A − B: {bits['mean']:+.4f} bits per {unit} (95% interval {bits['low']:+.4f} to {bits['high']:+.4f})")
    if "perplexity_ratio" in result:
        ratio = result["perplexity_ratio"]
        print(f"perplexity of A / B: {ratio['mean']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})")
    print(f"A is better on {result['first_better_share']:.1%} of {counted(result['texts'], 'text')}")
    if bits["low"] <= 0 <= bits["high"]:
        print("no clear difference: the interval contains 0")
