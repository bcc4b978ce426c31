"""What a finished run is worth: perplexities of its best model beside n-grams of the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hmmlm.baselines.ngram import NgramModel
from hmmlm.data.tokenfile import TokenFile
from hmmlm.learning.config import RunConfig, config_from_dict
from hmmlm.learning.evaluate import Evaluation, evaluate
from hmmlm.learning.history import read_history
from hmmlm.learning.prepare import Prepared, make_batches, reopen
from hmmlm.lm import LanguageModel

BASELINES = {"unigram": 1, "bigram": 2, "5-gram": 5}
BASELINE_TOKENS = 20_000_000  # n-grams learn from at most the first so many: they count in memory


@dataclass(frozen=True)
class Results:
    """A run: its model, its data, its history, and how it compares."""

    run: Path
    lm: LanguageModel
    config: RunConfig
    data: Prepared
    history: list[dict[str, Any]]
    perplexity: dict[str, float]  # of the model: valid and test
    baselines: dict[str, dict[str, float]]  # by name, then by split


def gather(run: Path) -> Results:
    """Everything a report says of the run in the folder `run`."""
    lm, data = LanguageModel.load(run), reopen(run)
    config = config_from_dict(lm.config, str(run))
    splits = ("valid", "test")
    own = {split: evaluate_split(lm, config, data, split).perplexity for split in splits}
    history, beside = read_history(run / "history.jsonl"), ngram_perplexities(config, data, splits)
    return Results(run, lm, config, data, history, own, beside)


def evaluate_split(lm: LanguageModel, config: RunConfig, data: Prepared, split: str) -> Evaluation:
    """The model's perplexity on a split, read as the run's own validation reads it."""
    return evaluate(lm.hmm, make_batches(config, data, split).epoch(0))


def ngram_perplexities(config: RunConfig, data: Prepared, splits: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Kneser-Ney n-grams of the training tokens, scored on the same tokens; context restarts where the HMM does."""
    restarts = config.batches.kind == "stream" and config.batches.eval_reset_at_eos
    eos = data.tokenizer.eos_id if restarts else None
    train = np.asarray(data.tokens["train"].tokens[:BASELINE_TOKENS])
    perplexities = {}
    for name, order in BASELINES.items():
        model = NgramModel(train, data.tokenizer.vocab_size, order, eos)
        perplexities[name] = {split: model.perplexity(np.asarray(data.tokens[split].tokens)) for split in splits}
    return perplexities


def unknown_share(tokens: TokenFile, unk: int | None, eos: int) -> float:
    """Share of the words (`<eos>` is none) that are `<unk>`."""
    ids = np.asarray(tokens.tokens)
    words = int(np.count_nonzero(ids != eos))
    return float(np.count_nonzero(ids == unk)) / words if unk is not None and words else 0.0


def bits(perplexity: float) -> float:
    """Bits a token."""
    return math.log2(perplexity)


def typical_sentence(data: Prepared) -> str:
    """A line of the test split to explain: the first of 8 to 14 known tokens, or the first at all."""
    tokens, tokenizer = data.tokens["test"], data.tokenizer
    ids = np.asarray(tokens.tokens[:50_000])
    lines = [line for line in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1) if len(line) > 1]
    good = (line for line in lines if 9 <= len(line) <= 15 and tokenizer.unk_id not in line)
    line = next(good, lines[0] if lines else ids[:1])
    return tokenizer.decode([int(i) for i in line if i != tokenizer.eos_id])
