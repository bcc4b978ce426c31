"""Baum-Welch: the M step against its definition, likelihood that never falls, and what mini-batches do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_runs import random_hmm
from lightning_fabric import Fabric

from hmmlm.data.batches import Batch
from hmmlm.hmm import HMM
from hmmlm.learning.baum_welch import RunningCounts, batches_per_update, maximise
from hmmlm.learning.config import OptimizerConfig
from hmmlm.learning.sections import BaumWelchConfig
from hmmlm.learning.updaters import BaumWelch, Counted, Step
from hmmlm.parameterization import Scalar


def em_step(hmm: HMM, tokens: torch.Tensor, lengths: torch.Tensor | None = None, step: float = 1.0) -> HMM:
    counts = hmm.expected_counts(tokens, lengths)
    return maximise(counts.start, counts.transition, counts.emission, hmm, step=step)


def total(hmm: HMM, tokens: torch.Tensor, lengths: torch.Tensor | None = None) -> float:
    return hmm.log_likelihood(tokens, lengths).sum().item()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), st.integers(0, 10_000),
    st.floats(0.05, 1.0), st.floats(0.1, 6.0),
)  # fmt: skip
def test_full_batch_em_never_lowers_the_likelihood(
    states: int, words: int, batch: int, length: int, seed: int, step: float, sharpness: float
) -> None:
    hmm = random_hmm(states, words, seed, sharpness)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, words, (batch, length), generator=generator)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    before = total(hmm, tokens, lengths)
    for _ in range(4):
        hmm = em_step(hmm, tokens, lengths, step)
        hmm.validate()
        after = total(hmm, tokens, lengths)
        assert after >= before - 1e-9
        before = after


def test_em_from_a_random_start_reaches_the_likelihood_of_the_planted_model() -> None:
    truth = random_hmm(2, 4, seed=3, sharpness=3.0)
    tokens, _ = truth.sample(60, 12, generator=torch.Generator().manual_seed(0))
    hmm = random_hmm(2, 4, seed=5)
    assert total(hmm, tokens) < total(truth, tokens) - 50
    for _ in range(150):
        hmm = em_step(hmm, tokens)
    assert total(hmm, tokens) >= total(truth, tokens)


def test_m_step_is_normalised_counts_with_pseudocounts() -> None:
    current = random_hmm(2, 3, seed=0)
    start, transition = torch.tensor([3.0, 1.0]).double(), torch.tensor([[1.0, 3.0], [2.0, 2.0]]).double()
    emission = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 4.0]]).double()
    plain = maximise(start, transition, emission, current)
    assert plain.log_transition.exp().tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert plain.log_emission.exp().tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]]
    smoothed = maximise(start, transition, emission, current, pseudocount=2.0)
    torch.testing.assert_close(smoothed.log_start.exp(), torch.tensor([5 / 8, 3 / 8]).double())
    torch.testing.assert_close(smoothed.log_emission[1].exp(), torch.tensor([0.2, 0.2, 0.6]).double())


def test_partial_step_mixes_probabilities() -> None:
    current = random_hmm(3, 4, seed=1)
    counts = current.expected_counts(torch.tensor([[0, 1, 2, 3, 3, 0]]))
    parts = (counts.start, counts.transition, counts.emission)
    whole, part = maximise(*parts, current), maximise(*parts, current, step=0.3)
    for mixed, new, old in zip(part.parameters, whole.parameters, current.parameters, strict=True):
        torch.testing.assert_close(mixed.exp(), 0.3 * new.exp() + 0.7 * old.exp())


@pytest.mark.parametrize("step, pseudocount", [(1.0, 0.0), (0.5, 0.0), (0.5, 0.1)])
def test_a_state_never_visited_keeps_its_rows(step: float, pseudocount: float) -> None:
    start = torch.tensor([0.5, 0.5, 0.0]).double()
    transition = torch.tensor([[0.5, 0.5, 0.0], [0.3, 0.7, 0.0], [0.2, 0.2, 0.6]]).double()
    current = HMM(start.log(), transition.log(), random_hmm(3, 4, seed=0).log_emission)
    counts = current.expected_counts(torch.tensor([[0, 1, 2, 3]]))
    new = maximise(counts.start, counts.transition, counts.emission, current, pseudocount, step)
    assert torch.equal(new.log_transition[2], current.log_transition[2])
    assert torch.equal(new.log_emission[2], current.log_emission[2])
    assert not torch.equal(new.log_emission[1], current.log_emission[1])
    new.validate()


def test_running_counts_add_up_and_begin_again() -> None:
    running = RunningCounts(2, 3, momentum=0.0, device=torch.device("cpu"))
    ones = (torch.ones(2), torch.ones(2, 2), torch.ones(2, 3))
    running.add(*ones)
    running.add(*ones)
    assert running.take()["emission"].tolist() == [[2.0] * 3] * 2
    running.add(*ones)
    assert running.take()["start"].tolist() == [1.0, 1.0]


def test_momentum_is_an_average_of_updates_without_bias_to_zero() -> None:
    running = RunningCounts(1, 1, momentum=0.75, device=torch.device("cpu"))
    seen, weights = [8.0, 4.0, 16.0], [0.75**2 * 0.25, 0.75 * 0.25, 0.25]
    for value in seen:
        running.add(torch.full((1,), value), torch.full((1, 1), value), torch.full((1, 1), value))
        taken = running.take()
    expected = sum(w * s for w, s in zip(weights, seen, strict=True)) / sum(weights)
    assert taken["start"].item() == pytest.approx(expected)


def test_batches_grow_by_a_factor_an_epoch_up_to_the_epoch() -> None:
    sizes = [batches_per_update(2, 1.5, False, epoch, 12) for epoch in range(7)]
    assert sizes == [2, 3, 4, 7, 10, 12, 12]
    assert all(a <= b for a, b in pairwise(sizes))
    assert batches_per_update(2, 3.0, False, 100_000, 12) == 12
    assert batches_per_update(1, 1.0, True, 0, 12) == 12
    assert batches_per_update(5, 1.0, False, 3, 12) == 5


def test_a_recorded_e_step_learns_as_the_eager_one_does() -> None:
    """A stand-in for a CUDA graph: it keeps one result and writes each replay's values into it."""

    def learn(recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        updater = BaumWelch(
            Fabric(accelerator="cpu", devices=1), Scalar(3, 5),
            OptimizerConfig(kind="baum-welch", baum_welch=BaumWelchConfig(full_batch=False, step=0.5, accumulate=2)),
        )  # fmt: skip
        kept: list[Counted] = []

        def replay(batch: Batch, initial: object) -> Counted | None:
            if len(batch.tokens) != 4:
                return None  # another shape: left to the eager step
            counted = updater.count(batch, None)
            if not kept:
                kept.append(counted)
            with torch.no_grad():
                for mine, new in zip(kept[0].hmm.parameters, counted.hmm.parameters, strict=True):
                    mine.copy_(new)
            return kept[0]

        if recorded:
            updater.graphed = replay  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(1)
        for number, size in enumerate((4, 4, 2, 4, 4, 4)):
            tokens = torch.randint(0, 5, (size, 6), generator=generator)
            updater.step(Batch(tokens, None, None, False), None, tokens.numel(), Step(0, number, 6, 1.0))
        return [p.detach() for p in updater.parameterization().parameters]

    for eager, recorded in zip(learn(False), learn(True), strict=True):
        torch.testing.assert_close(recorded, eager)
