"""The losses of a run: written on the device by every step, and read where something depends on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.learning.learners import Learner


class Losses:
    """Log-likelihoods of the steps since the loss was last logged: of this process, and the tokens of all."""

    def __init__(self, learner: Learner[Any], log_every: int, failure: Callable[[str], InputError]) -> None:
        """`failure` returns the error to raise where training cannot continue, from the reason."""
        self.learner, self.failure, self.ranks = learner, failure, world()
        self.log_likelihoods = torch.zeros(log_every, dtype=torch.float64, device=learner.device)
        self.tokens: list[int] = []
        self.sequences, self.skipped = 0, 0  # trained on since the loss was last read; dropped until then

    def add(self, log_likelihood: Tensor, tokens: int, sequences: int) -> None:
        """Add the result of a step, without waiting for the device."""
        self.log_likelihoods[len(self.tokens)] = log_likelihood
        self.tokens.append(tokens)
        self.sequences += sequences

    def read(self, step: int) -> list[float]:
        """Return the log-likelihoods of the last steps; waits for the device. One that is not finite ends the run.

        So does what a CUDA graph hides, where a dropped sequence counts as 0: NaN parameters, and most sequences
        dropped.
        """
        values = self.ranks.sum_numbers(self.log_likelihoods[: len(self.tokens)].tolist())
        for at, value in enumerate(values, step - len(values) + 1):
            if not math.isfinite(value):
                raise self.failure(f"the training loss is {-value} at step {at}")
        parameters = (p for p in self.learner.parameters().values() if p.is_floating_point())
        if self.ranks.any(bool(torch.stack([p.isnan().any() for p in parameters]).any())):
            raise self.failure(f"parameters are NaN after step {step}")
        skipped, sequences = int(self.ranks.sum_numbers([self.learner.skipped()])[0]), self.sequences
        lost, self.skipped, self.sequences = skipped - self.skipped, skipped, 0
        if 2 * lost > sequences:
            what = f"the probability of {lost} of the last {sequences} sequences underflowed"
            raise self.failure(f"{what} before step {step}")
        return values

    def collect(self) -> None:
        """Move the losses of all processes to rank 0, as a checkpoint stores them."""
        if self.ranks.count > 1:
            self.log_likelihoods.copy_(torch.tensor(self.ranks.sum_numbers(self.log_likelihoods.tolist())))
            self.ranks.keep_in_first([self.log_likelihoods])
