"""What is carried from one window to the next loses nothing: windows of any length are the whole."""

import math

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm
from torch import Tensor

from hmmlm.baselines.mixture import mix
from hmmlm.hmm import HMM, Carry

TOKENS = torch.randint(5, (3, 60), generator=torch.Generator().manual_seed(0))


def unlikely_first() -> tuple[HMM, Tensor]:
    """Return a union whose second component alone explains the end of a text, and hardly its beginning."""
    sure, rare = math.log1p(-math.exp(-30.0)), -30.0
    parts = [
        HMM(torch.zeros(1), torch.zeros(1, 1), torch.tensor([[sure, rare, -math.inf]])),
        HMM(torch.zeros(1), torch.zeros(1, 1), torch.tensor([[rare, -math.inf, sure]])),
    ]
    return HMM.union(parts), torch.tensor([[0] * 30 + [2] * 30])


def make(kind: str) -> tuple[HMM, Tensor]:
    if kind == "unlikely first":
        return unlikely_first()
    if kind == "dense":
        return HMM.from_probs(*random_hmm(4, 5, seed=1, sharpness=6.0)), TOKENS
    if kind == "left to right":
        transition = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1 - 1e-30, 1e-30], [0.0, 0.0, 1.0]], dtype=torch.float64)
        emission = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
        hmm = HMM.from_probs(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), transition, emission)
        return hmm.to(torch.float32), torch.tensor([[0] * 5 + [2] * 5, [0, 1] * 5])
    blocked = random_blocked_hmm(2, 3, 5, seed=2)
    return (blocked if kind == "blocked" else HMM.union([blocked, make("dense")[0].to(blocked.dtype)])), TOKENS


@pytest.mark.parametrize("kind", ["dense", "left to right", "blocked", "union", "unlikely first"])
@pytest.mark.parametrize("width", [1, 7, 30])
@pytest.mark.parametrize("query", ["filter", "token_log_probs", "scan"])
def test_windows_are_the_whole(kind: str, width: int, query: str) -> None:
    hmm, tokens = make(kind)
    carry: Carry | None = None
    total = torch.zeros(len(tokens), dtype=torch.float64)
    for window in tokens.split(width, 1):
        found = hmm.scan(window, carry=carry) if query == "scan" else hmm.filter(window, carry=carry)
        scored = hmm.token_log_probs(window, carry=carry).sum(1) if query == "token_log_probs" else found.log_likelihood
        carry, total = found.carry, total + scored.double()
    whole = hmm.log_likelihood(tokens).double()
    assert bool(whole.isfinite().all())
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-3)


def test_a_weight_of_zero_hides_no_other_model() -> None:
    scores = torch.tensor([[-1.0], [-1000.0]], dtype=torch.float64).numpy()
    assert mix(scores, torch.tensor([0.0, 1.0]).numpy()).tolist() == [-1000.0]
    assert mix(scores, torch.tensor([[0.0], [0.5]]).numpy()).tolist() == pytest.approx([-1000.0 + math.log(0.5)])
