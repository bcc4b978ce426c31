"""The interface that every parameterization shares."""

from __future__ import annotations

from torch import nn

from hmmlm.errors import InputError
from hmmlm.hmm import HMM


class Parameterization(nn.Module):
    """A module whose forward pass makes the distributional parameters.

    Training calls it once a batch, with gradients; for use it is called once and the HMM is kept without the module.
    """

    def __init__(self, states: int, vocab_size: int) -> None:
        super().__init__()
        self.states = states
        self.vocab_size = vocab_size

    def forward(self) -> HMM:
        """The HMM with log_start [Z], log_transition [Z,Z] and log_emission [Z,V], differentiable in the parameters."""
        raise NotImplementedError

    def assign(self, hmm: HMM) -> None:
        """Take given distributional parameters, so that `forward` returns them: what Baum-Welch needs."""
        raise InputError(
            f"the {type(self).__name__.lower()} parameterization cannot take given probabilities, "
            "as Baum-Welch needs: train it with adamw, or use the scalar parameterization"
        )
