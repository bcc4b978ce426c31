"""A teacher that knows the states of a planted HMM: its embedding of a token is a vector of the most likely state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hmmlm.hmm import HMM
from hmmlm.training import warm_start

LVD: dict[str, Any] = {"kind": "lvd", "teacher": "fake", "tokens": 1000, "kmeans": {"tokens": 800}}
"""An initialization section for a run with a fake teacher."""


class FakeTeacher:
    """Embeds a token as a vector of the most likely state of `hmm`, with noise; `calls` counts how often it reads."""

    hidden_size, layers, device = 6, 1, torch.device("cpu")

    def __init__(self, hmm: HMM) -> None:
        self.hmm, self.calls = hmm, 0
        self.table = 5 * torch.randn(hmm.num_states, self.hidden_size, generator=torch.Generator().manual_seed(7))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [B, T, 6] of tokens [B, T]."""
        self.calls += 1
        words = self.hmm.vocab_size
        known = tokens.clamp(min=0, max=words - 1)
        states = self.hmm.posterior(known).argmax(-1)
        noise = torch.randn(words**2, self.hidden_size, generator=torch.Generator().manual_seed(8))
        return self.table[states] + 0.3 * noise[known * words + known.roll(1, 1)]


def cyclic_hmm() -> HMM:
    """Return an HMM with a cycle of six states that share their words, so that only the order distinguishes them."""
    transition = 0.9 * torch.eye(6).roll(1, 1) + 0.1 / 6
    emission = torch.full((6, 6), 0.01) + 0.47 * (torch.eye(6).roll(2, 1) + torch.eye(6)[[0, 0, 1, 1, 2, 2]])
    return HMM.from_probs(torch.full((6,), 1 / 6), transition, emission)


def use_fake_teacher(monkeypatch: pytest.MonkeyPatch) -> FakeTeacher:
    """Let every run open a fake teacher, which is returned."""
    made = FakeTeacher(cyclic_hmm())

    def embed(teacher: FakeTeacher, tokenizer: object, tokens: Tensor, *, align: str, layer: int) -> Tensor:
        return teacher.embed(tokens)

    monkeypatch.setattr(warm_start, "open_teacher", lambda *args, **kwargs: made)
    monkeypatch.setattr(warm_start, "student_embeddings", embed)
    return made
