"""The interface that every parameterization shares."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.hmm import HMM, AnyHMM


class Parameterization(nn.Module):
    """A module whose forward pass makes the distributional parameters.

    Training calls `scan` once a batch, with gradients; for use the module is called once and the HMM is kept without
    it.
    """

    def __init__(self, states: int, vocab_size: int) -> None:
        super().__init__()
        self.states = states
        self.vocab_size = vocab_size

    def forward(self) -> AnyHMM:
        """The model with its distributional parameters, differentiable in those of the module."""
        raise NotImplementedError

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, initial: Any = None, restart: Tensor | None = None
    ) -> Any:
        """log p(x) [B] of a training batch and where each sequence stands (`final`, the next window's `initial`)."""
        return self().scan(tokens, lengths, initial, restart)

    def assign(self, hmm: HMM) -> None:
        """Take given distributional parameters, so that `forward` returns them: what Baum-Welch needs."""
        raise InputError(
            f"the {type(self).__name__.lower()} parameterization cannot take given probabilities, "
            "as Baum-Welch needs: train it with adamw, or use the scalar parameterization"
        )
