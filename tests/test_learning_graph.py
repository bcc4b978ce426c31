"""The recorded step on the CPU, where a replay calls the step on the recorded tensors; tests/gpu has CUDA graphs."""

from types import SimpleNamespace

import pytest
import torch
from helpers.runs import cpu_fabric
from torch import Tensor

from hmmlm.config.sections import AdamWConfig
from hmmlm.data.batches import Batch, StreamBatches
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm import Carry
from hmmlm.learning.graph import WARM_UP, GraphedStep, Learn
from hmmlm.learning.learners import AdamWLearner
from hmmlm.models.scalar import Scalar

WORDS, BATCH, LENGTH = 6, 3, 4


class ReplayedStep(GraphedStep):
    """A `GraphedStep` on the CPU; `replays` counts the steps that were not eager."""

    def __init__(self, learn: Learn) -> None:
        self.learn, self.device, self.graph, self.done = learn, torch.device("cpu"), None, 0
        self.replays, self.recordings = 0, 0

    def run_eagerly(self, batch: Batch, carry: Carry | None):  # type: ignore[no-untyped-def]
        return self.learn(batch, carry)

    def record(self, batch: Batch, carry: Carry | None) -> None:
        if carry is not None and batch.restart is None:
            batch = batch._replace(restart=torch.zeros_like(batch.tokens, dtype=torch.bool))
        self.batch = batch._replace(tokens=batch.tokens.clone())
        self.carry = None if carry is None else carry.clone()
        self.recordings += 1
        self.graph = SimpleNamespace(replay=self.replay)  # type: ignore[assignment]

    def replay(self) -> None:
        self.replays += 1
        self.result = self.learn(self.batch, self.carry)
        if self.carry is not None:
            self.carry.copy_(self.result.carry)
            self.result = self.result._replace(carry=self.carry)


def make_learner() -> AdamWLearner:
    model = Scalar(4, WORDS, generator=torch.Generator().manual_seed(0))
    tokenizer = WordTokenizer(["<unk>", "<eos>", "a", "b", "c", "d"])
    return AdamWLearner(cpu_fabric(), model, tokenizer, {}, AdamWConfig(lr=0.1))


def learn(learner: AdamWLearner, count: int, reset_at_eos: bool) -> Tensor:
    """Train for three epochs of streams of `count` tokens in all, and return the log-likelihood of every step."""
    tokens = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(1)).numpy()
    file = TokenFile.from_arrays(tokens, None, WORDS)
    batches = StreamBatches(file, BATCH, LENGTH, shuffle=False, reset_at_eos=reset_at_eos, eos_id=1, seed=0)
    found = []
    for epoch in range(3):
        carry = None
        for batch in batches.epoch(epoch):
            result = learner.step(batch, carry, learner.peak_lr)
            carry = result.carry
            found.append(result.log_likelihood.detach().sum().clone())
    return torch.stack(found)


@pytest.mark.parametrize("reset_at_eos", [False, True])
@pytest.mark.parametrize("windows", [3, 4, 7])
@pytest.mark.parametrize("more", [0, 5])
def test_replays_agree_with_eager_steps(windows: int, more: int, reset_at_eos: bool) -> None:
    """Also if the first batch of an epoch, which has no carry, is the one that is recorded."""
    eager, replayed = make_learner(), make_learner()
    assert eager.graphed is None  # on the CPU steps are eager
    replayed.graphed = step = ReplayedStep(replayed.learn)
    count = BATCH * LENGTH * windows + more
    torch.testing.assert_close(learn(replayed, count, reset_at_eos), learn(eager, count, reset_at_eos))
    for name, value in replayed.parameters().items():
        torch.testing.assert_close(value, eager.parameters()[name])
    assert step.replays >= 3 * windows - WARM_UP - 1  # the last window of an epoch has another shape if there is more
    assert step.recordings == (2 if windows == WARM_UP else 1)


def test_batches_that_do_not_fit_are_left_to_the_caller() -> None:
    step = ReplayedStep(make_learner().learn)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    ragged = Batch(tokens, torch.tensor([4, 2, 1]), None, carry=False)
    labeled = Batch(tokens, None, None, carry=False, labels=tokens)
    assert step(ragged, None) is None and step(labeled, None) is None
    plain = Batch(tokens, None, None, carry=False)
    for _ in range(WARM_UP + 1):
        assert step(plain, None) is not None
    assert step.replays == 1
    assert step(plain._replace(tokens=tokens[:2]), None) is None  # fewer sequences
    assert step(plain, None) is not None and step.replays == 2
