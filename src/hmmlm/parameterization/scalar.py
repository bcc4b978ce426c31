"""One logit a probability: the classic multinomial HMM."""

from __future__ import annotations

import torch
from torch import nn

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.parameterization.base import Parameterization


class Scalar(Parameterization):
    """Logits start [Z], transition [Z,Z] and emission [Z,V], drawn from N(0, scale²); a softmax over each row."""

    def __init__(
        self, states: int, vocab_size: int, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(states, vocab_size)

        def logits(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        self.start = logits(states)
        self.transition = logits(states, states)
        self.emission = logits(states, vocab_size)

    def forward(self) -> HMM:
        return HMM(self.start.log_softmax(-1), self.transition.log_softmax(-1), self.emission.log_softmax(-1))

    @torch.no_grad()
    def assign(self, hmm: HMM) -> None:
        """Log-probabilities are logits whose log-sum-exp is 0; zero probabilities become logits of −inf."""
        if (hmm.states, hmm.vocab_size) != (self.states, self.vocab_size):
            raise InputError(
                f"an HMM of {hmm.states} states and {hmm.vocab_size} words given to a parameterization of "
                f"{self.states} states and {self.vocab_size} words"
            )
        self.start.copy_(hmm.log_start)
        self.transition.copy_(hmm.log_transition)
        self.emission.copy_(hmm.log_emission)
