"""Several trained HMMs over one vocabulary as one: their union, mixed per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.baselines.mixture import fit_weights
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel


@check_arguments
def join_models(models: Sequence[LanguageModel], weights: Sequence[float] | None = None) -> LanguageModel:
    """Return the union of models as one: each sequence is drawn from one of them, by the weights (None: equal).

    A sequence is what the models read from the start distribution: a line or a chunk, or a whole text.
    """
    check_alike(models)
    first, *_ = models
    return LanguageModel(HMM.union([lm.hmm for lm in models], weights), first.tokenizer, first.config)


def check_alike(models: Sequence[LanguageModel]) -> None:
    """Raise an InputError unless the models have one vocabulary and read a text in the same way."""
    if not len(models):
        raise InputError("a union needs at least one model")
    first, *others = models
    for number, lm in enumerate(others, 2):
        if lm.tokenizer.fingerprint() != first.tokenizer.fingerprint():
            raise InputError(
                f"model {number} has another vocabulary than the first: train it on the token files of the first "
                "(hmmlm train --data RUN)"
            )
        if _reading(lm) != _reading(first):
            raise InputError(
                f"model {number} reads a text in {_reading(lm)}, the first in {_reading(first)}: train both with the "
                "same batches.kind, batches.length and batches.eval_reset_at_eos"
            )


def _reading(lm: LanguageModel) -> str:
    batches = lm.config.get("batches", {})
    if batches.get("kind") == "chunks":
        return f"chunks of {batches.get('length')} tokens"
    return "lines" if lm.restarts else "one sequence"


def sequence_scores(models: Sequence[LanguageModel], tokens: Sequence[int]) -> Tensor:
    """Compute the log-likelihoods [K, N] of the sequences of a text under each model."""
    sequences = models[0].sequences(tokens)
    return torch.stack([lm.score_sequences(sequences) for lm in models])


def fit_sequence_weights(scores: Tensor) -> list[float]:
    """Return the weights of a union that maximize the likelihood of sequences, by their log-likelihoods [K, N]."""
    fitted: np.ndarray = fit_weights(scores.numpy())
    return [float(weight) for weight in fitted]
