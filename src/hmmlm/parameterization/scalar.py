"""One logit a probability: the classic multinomial HMM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
        return HMM(*(logits.log_softmax(-1) for logits in (self.start, self.transition, self.emission)))

    @torch.no_grad()
    def assign(self, hmm: HMM) -> None:
        """Log-probabilities are logits whose log-sum-exp is 0; zero probabilities become logits of −inf."""
        given = (hmm.log_start, hmm.log_transition, hmm.log_emission)
        for (name, logits), value in zip(self.named_parameters(), given, strict=True):
            _copy(name, logits, value)


def _copy(name: str, logits: Tensor, value: Tensor) -> None:
    if logits.shape != value.shape:
        raise InputError(f"{name}: this parameterization has shape {list(logits.shape)}, given {list(value.shape)}")
    logits.copy_(value)
