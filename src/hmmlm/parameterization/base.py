"""The interface that every parameterization shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.hmm import HMM, AnyHMM
from hmmlm.ops.blocked_scan import BlockedScan
from hmmlm.ops.results import Scan


class Parameterization(nn.Module, ABC):
    """A module whose forward pass makes the distributional parameters.

    Training calls `scan` once a batch, with gradients; for use the module is called once and the HMM is kept without
    it.
    """

    def __init__(self, states: int, vocab_size: int) -> None:
        super().__init__()
        self.states = states
        self.vocab_size = vocab_size
        self.skipped: Tensor
        self.register_buffer("skipped", torch.zeros((), dtype=torch.long), persistent=False)

    def trusted(self, result: BlockedScan | Scan) -> Tensor:
        """Log-likelihoods with those of suspect sequences, which carry no gradient, left out and counted in `skipped`.

        There are none, except inside a CUDA graph, where a sequence whose mass underflows cannot be done again.
        """
        if result.suspect is None:
            return result.log_likelihood
        self.skipped += result.suspect.sum()
        return torch.where(result.suspect, 0.0, result.log_likelihood)

    @abstractmethod
    def forward(self) -> AnyHMM:
        """The model with its distributional parameters, differentiable in those of the module."""

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, initial: Any = None, restart: Tensor | None = None
    ) -> Any:
        """log p(x) [B] of a training batch and where each sequence stands (`final`, the next window's `initial`)."""
        result: Any = self().scan(tokens, lengths, initial, restart)
        return result._replace(log_likelihood=self.trusted(result))

    def assign(self, hmm: HMM) -> None:
        """Take given distributional parameters, so that `forward` returns them: what Baum-Welch needs."""
        raise InputError(
            f"the {type(self).__name__.lower()} parameterization cannot take given probabilities, "
            "as Baum-Welch needs: train it with adamw, or use the scalar parameterization"
        )
