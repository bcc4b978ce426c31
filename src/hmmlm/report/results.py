"""Evaluate a finished run: perplexities of its best model and of n-gram baselines on the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hmmlm.baselines.ngram import NgramModel
from hmmlm.config.run import RunConfig
from hmmlm.config.sections import StreamConfig
from hmmlm.data.tokenfile import TokenFile
from hmmlm.learning.evaluate import Evaluation, evaluate
from hmmlm.learning.prepare import Prepared, evaluation_batches, reopen, trained_batches
from hmmlm.runs.folders import saved_config
from hmmlm.runs.history import read_history
from hmmlm.text.lm import LanguageModel

BASELINES = {"unigram": 1, "bigram": 2, "5-gram": 5}
BASELINE_TOKENS = 20_000_000  # training tokens of the n-grams at most: their counts are held in memory
STREAM_LENGTH = 4096  # tokens of a single stream that are read at once
SENTENCE_TOKENS = range(9, 16)  # tokens of a sentence to explain, <eos> included


@dataclass(frozen=True)
class RunResults:
    """A finished run: its best model, data, history, and perplexities."""

    run: Path
    lm: LanguageModel
    config: RunConfig
    data: Prepared
    history: list[dict[str, Any]]
    perplexity: dict[str, float]  # of the model, by split: valid and test
    baselines: dict[str, dict[str, float]]  # perplexity by name, then by split


def evaluate_run(run: Path) -> RunResults:
    """Load the best model of the run in the folder `run`, and evaluate it and its baselines."""
    lm, data = LanguageModel.load(run), reopen(run)
    splits = ("valid", "test")
    return RunResults(
        run=run,
        lm=lm,
        config=saved_config(RunConfig, run),
        data=data,
        history=read_history(run / "history.jsonl"),
        perplexity={split: evaluate_tokens(lm, data.tokens[split]).perplexity for split in splits},
        baselines=ngram_perplexities(lm, data, splits),
    )


def run_folder(path: Path) -> Path | None:
    """Return the training run that `path` is, or is in (run/best, run/checkpoints/…), if its token files exist."""
    candidates = (path, *path.absolute().parents[:2], *path.resolve().parents[:2])
    return next((folder for folder in candidates if (folder / "data" / "test.json").exists()), None)


def evaluate_tokens(lm: LanguageModel, tokens: TokenFile) -> Evaluation:
    """Evaluate the model on a text, which is read as `lm.perplexity` reads it.

    Validation during training reads a text through which the chain continues as several streams, each from the start
    distribution, because that is faster. Here it is one stream.
    """
    batches = trained_batches(lm.config)
    if isinstance(batches, StreamConfig) and not batches.eval_reset_at_eos:
        batches = batches.model_copy(update={"batch_size": 1, "length": STREAM_LENGTH})
    return evaluate(lm.hmm, evaluation_batches(batches, tokens, lm.tokenizer.eos_id).epoch(0))


def ngram_perplexities(lm: LanguageModel, data: Prepared, splits: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Compute perplexities of Kneser-Ney n-grams of the training tokens; their context restarts where the HMM does.

    Returns:
        Perplexity by the name of the n-gram, then by split.
    """
    eos = data.tokenizer.eos_id if lm.restarts else None
    train = np.asarray(data.tokens["train"].tokens[:BASELINE_TOKENS])
    perplexities = {}
    for name, order in BASELINES.items():
        model = NgramModel(train, data.tokenizer.vocab_size, order, eos)
        perplexities[name] = {split: model.perplexity(np.asarray(data.tokens[split].tokens)) for split in splits}
    return perplexities


def unknown_fraction(tokens: TokenFile, unk: int | None, eos: int) -> float:
    """Return the fraction of `<unk>` among the words; `<eos>` is not counted as a word."""
    ids = np.asarray(tokens.tokens)
    words = int(np.count_nonzero(ids != eos))
    return float(np.count_nonzero(ids == unk)) / words if unk is not None and words else 0.0


def bits_per_token(perplexity: float) -> float:
    """Return bits per token, log₂ of the perplexity."""
    return math.log2(perplexity)


def typical_sentence(data: Prepared) -> str:
    """Return a line of the test split to explain: the first of 8 to 14 known words, else the start of the first."""
    tokenizer = data.tokenizer
    ids = np.asarray(data.tokens["test"].tokens[:50_000])
    lines = [line for line in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1) if len(line) > 1]
    suitable = (line for line in lines if len(line) in SENTENCE_TOKENS and tokenizer.unk_id not in line)
    line = next(suitable, lines[0] if lines else ids)[: SENTENCE_TOKENS.stop - 1]
    return tokenizer.decode([int(i) for i in line if i != tokenizer.eos_id])
