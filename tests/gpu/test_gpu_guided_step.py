"""Kernels of a token under constraints on a GPU: they agree with log space, first launched and then replayed."""

import pytest
import torch
from torch import Tensor

from hmmlm import HMM, Guide, Steering
from hmmlm.constrain.automaton import containing
from hmmlm.constrain.guided_step import GuidedSteps

END, WORDS, LENGTH = 0, 3000, 12


def random_model(states: int, equal: int) -> HMM:
    """Return a model in which the last `equal` words have the same column."""
    generator = torch.Generator().manual_seed(states)

    def draw(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=generator)

    emission = draw(states, WORDS)
    emission[:, WORDS - equal :] = emission[:, -1:]
    logits = (draw(states), draw(states, states), emission)
    return HMM(*(each.log_softmax(-1).cuda() for each in logits))


@pytest.mark.parametrize(("states", "equal"), [(64, 0), (1000, 0), (1000, 2000), (4096, 0)])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.filterwarnings("ignore:.*before the constraint was satisfied")
def test_steps_agree_with_log_space(states: int, equal: int, rows: int) -> None:
    hmm, generator = random_model(states, equal), torch.Generator().manual_seed(1)
    line = (containing([1, 2], WORDS) & containing([30], WORDS) & ~containing([5], WORDS)).until(END)
    guide = Guide(hmm, line, LENGTH)
    kernels, portable = Steering(guide, guide.begin()), Steering(guide, guide.begin())
    portable._kernels = None
    texts = torch.randint(6, WORDS, (rows, LENGTH - 1), generator=generator)
    texts[0, 3:5], texts[-1, 2] = torch.tensor([1, 2]), 30
    texts = torch.cat([torch.full((rows, 2), 7), texts], 1).cuda()
    for length in range(2, texts.shape[1] - 4):
        scores = torch.randn(rows, WORDS + 3, generator=generator).cuda()
        ours, theirs = kernels(texts[:, :length], scores), portable(texts[:, :length], scores)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kernels.log_masses, portable.log_masses, rtol=1e-4, atol=1e-4)
    assert not kernels._doubtful and kernels.report == portable.report
    steps = GuidedSteps.of(hmm)
    assert steps is not None and any(step.graph is not None for step in steps._graphs.values())
