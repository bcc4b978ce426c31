"""How many parameters a run has, counted on its model without memory for them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from papers.settings import configuration
from papers.study import NGRAM, StudyRow, StudyRun

WORDS = {"ptb": 10_000, "wikitext-2": 33_278}
"""Vocabularies of the texts of Chiu & Rush 2020, with `<unk>` and `<eos>`."""


def count_parameters(run: StudyRun) -> int | None:
    """Return the number of parameters; None of an n-gram, of a combination, or if the vocabulary is not known."""
    if run.row.recipe == NGRAM or run.row.combine is not None:
        return None
    return _count(run.row.recipe, json.dumps(dict(run.row.settings)))


@cache
def _count(recipe: str, settings: str) -> int | None:
    config = configuration(StudyRun(StudyRow(name="counted", recipe=recipe, settings=json.loads(settings)), 0))
    words = WORDS.get(str(config.data))
    if words is None:
        return None
    import torch
    from torch.overrides import TorchFunctionMode

    class ShapesOnly(TorchFunctionMode):
        """Makes what parameters are made of on the meta device; structures are computed as always."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            on_meta = {"device": "meta"} if function in (torch.empty, torch.randn) else {}
            return function(*args, **{**(kwargs or {}), **on_meta})

    with ShapesOnly():
        return sum(parameter.numel() for parameter in build_model(config, words).parameters())


def build_model(config: Any, words: int) -> Any:
    """Return the model of a configuration for a vocabulary of `words`; its blocks have equal numbers of them."""
    import torch

    from hmmlm.config.networks import BaselineConfig

    vocabulary = make_vocabulary(words)
    if isinstance(config, BaselineConfig):
        return config.model.build(vocabulary, config.batches.length, None)
    blocks = config.model.blocks_needed
    block_of_word = torch.arange(words) % blocks if blocks else None
    return config.model.build(vocabulary, block_of_word, config.train.seed, torch.device("cpu"))


def make_vocabulary(words: int) -> Any:
    """Return a tokenizer with as many words."""
    from hmmlm.data.tokenizers import WordTokenizer

    return WordTokenizer(["<unk>", "<eos>", *map(str, range(words - 2))])
