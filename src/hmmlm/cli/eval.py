"""`hmmlm eval`: perplexity of a model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from hmmlm.cli.models import ModelArguments, print_scores, read_texts, tokens_of_text, warn_unknown
from hmmlm.cli.parse import parse
from hmmlm.section import DeviceCount

if TYPE_CHECKING:
    from hmmlm.data.tokenfile import TokenFile
    from hmmlm.distributed.ranks import Ranks
    from hmmlm.lm.textmodel import TextModel

DESCRIPTION = """Print the perplexity of a model, exp(−Σ log p / tokens), with <eos> and <unk> counted; the same
without unknown words; bits per token; bits per byte of the text; and the share of words outside
the vocabulary. Bits per byte can be compared between vocabularies if no words are unknown.

A text file is scored whole, a corpus or a folder by its splits, each read like the model's own
validation text. Several processes share a text at the places where the model starts again, at
every line as a rule; torchrun starts them on several machines.

examples:
  hmmlm eval runs/mine
  hmmlm eval latest --splits valid,test
  hmmlm eval runs/mine --data another.txt --json
  hmmlm eval runs/mine --data /dev/stdin
  hmmlm eval runs/mine --devices 8"""


class EvalArguments(ModelArguments):
    data: str | None = None
    """A text file or a pipe (/dev/stdin), a folder with train, valid and test files, a folder made by `hmmlm data`, or
    a corpus by name; None: the data the model was trained on."""
    data_folder: Path | None = None
    """Folder of named corpora."""
    splits: Annotated[tuple[Literal["train", "valid", "test"], ...], Field(min_length=1)] = ("test",)
    """Splits of a corpus, separated by commas."""
    devices: DeviceCount = 1
    """Processes on this machine that share the text, each with a GPU, or with a part of the CPU's cores."""
    json_output: bool = Field(default=False, alias="json")
    """Print JSON."""

    @field_validator("splits", mode="before")
    @classmethod
    def _split_at_commas(cls, values: list[str]) -> list[str]:
        return [name for value in values for name in value.split(",")]


def run(argv: list[str]) -> int:
    from hmmlm.cli.launch import launch

    arguments = parse(EvalArguments, argv, "eval", DESCRIPTION)
    if (code := launch("eval", argv, arguments, "devices", "repeat the command")) is not None:
        return code

    from hmmlm.device import pick_device
    from hmmlm.distributed.ranks import connected
    from hmmlm.lm.mixture import load_text_model
    from hmmlm.report.results import score_tokens

    with connected(pick_device(arguments.device).type == "cuda") as ranks, tempfile.TemporaryDirectory() as scratch:
        lm = ranks.first_before_others(lambda: load_text_model(arguments.model, arguments.device))
        files = _token_files(arguments, lm, Path(scratch), ranks)
        scores = {name: score_tokens(lm, tokens) for name, tokens in files.items()}
        if not ranks.first:
            return 0
        if arguments.json_output:
            results = {name: score.figures() for name, score in scores.items()}
            print(json.dumps({"model": str(arguments.model), "device": str(lm.device), "results": results}, indent=1))
        else:
            print_scores(scores)
        trained_on = str(lm.config.get("data", ""))
        warn_unknown({name: score.unknown_share for name, score in scores.items()}, arguments.data or trained_on)
    return 0


def _token_files(arguments: EvalArguments, lm: TextModel, scratch: Path, ranks: Ranks) -> dict[str, TokenFile]:
    """Return the texts to score; one that is not encoded yet is encoded by rank 0, which alone can read a pipe."""
    from hmmlm.data.corpora import encode_documents
    from hmmlm.errors import InputError
    from hmmlm.training.prepare import reopen

    folder = tokens_of_text(lm, arguments.model, arguments.data)
    if folder is not None:
        prepared = ranks.first_before_others(lambda: reopen(folder))
        if prepared.tokenizer.fingerprint() != lm.tokenizer.fingerprint():
            raise InputError(
                f"the token files in {folder} have another vocabulary than the model: give the text itself with --data"
            )
        return {split: prepared.tokens[split] for split in arguments.splits}

    def encode() -> dict[str, TokenFile]:
        documents = read_texts(lm, arguments.data, arguments.data_folder, arguments.splits).items()
        return {name: encode_documents(d, lm.tokenizer, scratch / str(i)) for i, (name, d) in enumerate(documents)}

    return ranks.on_first(encode)
