"""What can be said of settings before anything is made: inputs that are not there, and options that are not used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hmmlm.errors import InputError
from hmmlm.learning.config import RunConfig, TokenizerConfig

USED: Sequence[tuple[Sequence[str], Mapping[str, Sequence[str]]]] = (
    (("model.blocks", "model.clusters", "model.exchange_passes"), {"model.structure": ("brown",)}),
    (("model.states_per_word",), {"model.structure": ("uniform",)}),
    (("model.dropout",), {"model.structure": ("brown", "uniform"), "model.parameterization": ("neural",)}),
    (("model.hidden",), {"model.parameterization": ("neural", "linear", "mlp", "transformer")}),
    (("model.layers",), {"model.parameterization": ("mlp", "transformer")}),
    (("model.form", "model.factored", "model.network_dropout"), {"model.parameterization": ("neural",)}),
    (("optimizer.rate", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip"),
     {"optimizer.kind": ("adamw",)}),
    (("optimizer.baum_welch",), {"optimizer.kind": ("baum-welch",)}),
    (("schedule.final_fraction",), {"schedule.kind": ("cosine",)}),
    (("schedule.factor", "schedule.patience"), {"schedule.kind": ("plateau",)}),
    (("batches.reset_at_eos", "batches.eval_reset_at_eos"), {"batches.kind": ("stream",)}),
    (("tokenizer.vocab_size",), {"tokenizer.kind": ("word", "bpe")}),
    (("tokenizer.min_count", "tokenizer.split", "tokenizer.lowercase"), {"tokenizer.kind": ("word",)}),
    (("initialization.alike",), {"initialization.network": ("pretrained", "body", "random")}),
    (("initialization",),
     {"initialization.kind": ("lvd", "counts"), "initialization.network": ("pretrained", "body", "random")}),
)  # fmt: skip
"""Settings, or sections of them, and what they are for: any one of these."""


def unused(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    """A line for each of the settings `given` (such as "model.blocks") that this configuration makes no use of."""
    for name in given:
        for names, needed in USED:
            within = any(name == other or name.startswith(f"{other}.") for other in names)
            if within and name not in needed and not any(_value(config, k) in kinds for k, kinds in needed.items()):
                what = " or ".join(f"{k} {' or '.join(map(repr, kinds))}" for k, kinds in needed.items())
                now = " and ".join(f"{k} is {_value(config, k)!r}" for k in needed)
                yield f"{name} is not used: it is for {what}, and {now}"
                break  # what holds for its section is no news


def _value(config: RunConfig, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def check_data(data: str, tokenizer: TokenizerConfig) -> None:
    """An InputError if a text, or its tokenizer, is not there or can be seen to be none; names are not looked up."""
    from hmmlm.data.corpora import NAMES, load_text
    from hmmlm.data.tokenizer import load_tokenizer

    if (Path(data) / "data" / "train.json").exists():  # token files, with their tokenizer
        return
    if data not in NAMES:
        load_text(data)
    if tokenizer.file is not None:
        load_tokenizer(tokenizer.file)


def check_files(config: RunConfig) -> None:
    """An InputError if a file that the settings name is not there."""
    check_data(config.data, config.tokenizer)
    model, start = config.model, config.initialization
    for name, used, path, advice in (
        ("model.clusters", model.structure == "brown", model.clusters, "`hmmlm data --clusters` makes one"),
        ("initialization.clusters", start.kind != "none", start.clusters, "runs with a teacher make one"),
    ):
        if used and path is not None and not path.is_file():
            raise InputError(f"{name}: there is no file {path}; {advice}, or leave the setting out")
