"""What the commands that use a trained model share: the model, its device, a text to read, a warning."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hmmlm.cli.parse import Arguments, ModelPath
from hmmlm.errors import InputError
from hmmlm.terminal import print_table, printable

if TYPE_CHECKING:
    from hmmlm.data.corpora import Documents
    from hmmlm.lm.scoring import TextScore
    from hmmlm.lm.textmodel import TextModel

MANY_UNKNOWN = 0.05
"""Share of unknown words above which the perplexity of a text is misleading."""


class ModelArguments(Arguments):
    """A model and where it computes."""

    model: ModelPath
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""


def tokens_of_models(data: Path | None, models: Sequence[Path]) -> Path | None:
    """Return the folder of token files `data`, or that of the first of the models that is a run; None if none is."""
    from hmmlm.report.results import run_folder
    from hmmlm.training.prepare import is_prepared

    if data is not None and not is_prepared(data):
        raise InputError(f"{data} has no token files: give the folder of a run, or one made by `hmmlm data`")
    return data or next(filter(None, map(run_folder, models)), None)


def tokens_of_text(lm: TextModel, model: Path, data: str | None) -> Path | None:
    """Return the folder of token files `data`; without, that of the model's run, or that the model was trained on.

    Return None if that is no such folder.
    """
    from hmmlm.report.results import run_folder
    from hmmlm.training.prepare import is_prepared

    folder = run_folder(model) if data is None else None
    named = lm.config.get("data") if data is None else data
    folder = folder or (None if named is None else Path(named))
    return folder if folder is not None and is_prepared(folder) else None


def read_texts(
    lm: TextModel, data: str | None, data_folder: Path | None, splits: tuple[str, ...]
) -> dict[str, Documents]:
    """Return a text by name: a file whole, a corpus or a folder by its splits; None: what the model was trained on."""
    from hmmlm.data.corpora import file_documents, load_text
    from hmmlm.data.text import is_pipe

    unit = lm.config.get("text", {}).get("unit", "line")
    if data is not None and (Path(data).is_file() or is_pipe(Path(data))):
        return {Path(data).name: file_documents(Path(data), unit)}
    name, trained_folder = data or lm.config.get("data"), lm.config.get("data_folder")
    if name is None:
        raise InputError("the model does not name the text that it was trained on: give a text with --data")
    home = data_folder or (None if trained_folder is None else Path(trained_folder))
    corpus = load_text(name, folder=home, download=True, unit=unit)
    return {split: corpus[split] for split in splits}


def warn_unknown(shares: Mapping[str, float], data: str) -> None:
    """Warn if many words of a text are unknown. Named corpora have `<unk>` of their own, which no model can avoid."""
    from hmmlm.data.corpora import NAMES

    for name, share in shares.items():
        if share > MANY_UNKNOWN and data not in NAMES:
            print(
                f"hmmlm: warning: {share:.1%} of the words of {printable(name)} are unknown and count as <unk>, which "
                "makes its perplexity too low: use subwords (hmmlm train --tokenizer.kind bpe) or a larger vocabulary",
                file=sys.stderr,
            )


def print_scores(scores: Mapping[str, TextScore]) -> None:
    """Print a table of scores by the name of the text."""
    from hmmlm.runs.progress import perplexity_text

    columns = (
        "text",
        "tokens",
        "perplexity",
        "perplexity,\nknown words",
        "bits per\ntoken",
        "bits per\nbyte",
        "unknown\nwords",
    )
    rows = []
    for name, score in scores.items():
        per_byte = "–" if score.bits_per_byte is None else f"{score.bits_per_byte:.3f}"
        perplexities = (perplexity_text(value, 2) for value in (score.perplexity, score.known_perplexity))
        bits = (f"{score.bits_per_token:.3f}", per_byte)
        rows.append((name, f"{score.tokens:,}", *perplexities, *bits, f"{score.unknown_share:.2%}"))
    print_table(columns, rows)
