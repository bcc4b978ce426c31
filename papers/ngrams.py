"""Kneser-Ney n-grams as rows of a study: their settings, and what `hmmlm data` and `hmmlm ngram` make of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from hmmlm.config.training import TrainingConfig
from hmmlm.report.results import count_ngram, score_split
from hmmlm.runs.progress import LineProgress
from hmmlm.training.prepare import find_data, prepare


class NgramConfig(TrainingConfig):
    """The text of an n-gram and its order."""

    command: ClassVar[str] = "ngram"
    order: Annotated[int, Field(ge=1, le=10)] = 5
    """Tokens of an n-gram."""
    reset_at_eos: bool = True
    """Restart the context after every <eos>."""


def count_and_score(config: NgramConfig, folder: Path) -> dict[str, Any]:
    """Count the n-gram of a training text and return its perplexities; token files go to `folder`."""
    began = time.perf_counter()
    data = prepare(config, find_data(config), folder, LineProgress())
    model = count_ngram(data, config.order, config.reset_at_eos)
    scores = {
        split: score_split(data, split, model.log_probs(np.asarray(data.tokens[split].tokens)))
        for split in ("valid", "test")
    }
    perplexities = {f"{split}_perplexity": round(score.perplexity, 3) for split, score in scores.items()}
    return {**perplexities, "tokens": len(data.tokens["train"]), "seconds": round(time.perf_counter() - began, 1)}
