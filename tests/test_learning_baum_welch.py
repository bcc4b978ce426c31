"""Baum-Welch: the M step against its definition, a likelihood that never falls, and mini-batches."""

from __future__ import annotations

import pytest
import torch
from helpers.runs import cpu_fabric, random_hmm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hmmlm.config.sections import BaumWelchConfig
from hmmlm.data.batches import Batch
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.learning.learners import BaumWelchLearner, StepOutput
from hmmlm.learning.optimizers import RunningCounts, maximize
from hmmlm.models.scalar import Scalar
from hmmlm.scan.composition import matrices


def expected_counts(hmm: HMM, tokens: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
    counts = hmm.expected_counts(tokens, lengths)
    return {"start": counts.start, "transition": counts.transition, "emission": counts.emission}


def tables(hmm: HMM) -> dict[str, Tensor]:
    return dict(zip(("start", "transition", "emission"), matrices(hmm), strict=True))


def em_step(hmm: HMM, tokens: Tensor, lengths: Tensor | None = None, step: float = 1.0) -> HMM:
    return HMM(*maximize(expected_counts(hmm, tokens, lengths), tables(hmm), step=step).values())


def total(hmm: HMM, tokens: Tensor, lengths: Tensor | None = None) -> float:
    return hmm.log_likelihood(tokens, lengths).sum().item()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(0, 10_000),
    st.floats(0.05, 1.0),
    st.floats(0.1, 6.0),
)
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


def test_m_step_is_normalized_counts_with_pseudocounts() -> None:
    current = random_hmm(2, 3, seed=0)
    counts = {
        "start": torch.tensor([3.0, 1.0]).double(),
        "transition": torch.tensor([[1.0, 3.0], [2.0, 2.0]]).double(),
        "emission": torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 4.0]]).double(),
    }
    plain = maximize(counts, tables(current))
    assert plain["transition"].exp().tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert plain["emission"].exp().tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]]
    smoothed = maximize(counts, tables(current), pseudocount=2.0)
    torch.testing.assert_close(smoothed["start"].exp(), torch.tensor([5 / 8, 3 / 8]).double())
    torch.testing.assert_close(smoothed["emission"][1].exp(), torch.tensor([0.2, 0.2, 0.6]).double())


def test_partial_step_interpolates_probabilities() -> None:
    current = random_hmm(3, 4, seed=1)
    counts = expected_counts(current, torch.tensor([[0, 1, 2, 3, 3, 0]]))
    old = tables(current)
    whole, part = maximize(counts, old), maximize(counts, old, step=0.3)
    for name, before in old.items():
        torch.testing.assert_close(part[name].exp(), 0.3 * whole[name].exp() + 0.7 * before.exp())


@pytest.mark.parametrize("step, pseudocount", [(1.0, 0.0), (0.5, 0.0), (0.5, 0.1)])
def test_a_state_never_visited_keeps_its_rows(step: float, pseudocount: float) -> None:
    start = torch.tensor([0.5, 0.5, 0.0]).double()
    transition = torch.tensor([[0.5, 0.5, 0.0], [0.3, 0.7, 0.0], [0.2, 0.2, 0.6]]).double()
    current = HMM(start.log(), transition.log(), random_hmm(3, 4, seed=0).emission)
    counts = expected_counts(current, torch.tensor([[0, 1, 2, 3]]))
    new = HMM(*maximize(counts, tables(current), pseudocount, step).values())
    assert torch.equal(new.transition.log_probs[2], current.transition.log_probs[2])
    assert torch.equal(new.emission.log_probs[2], current.emission.log_probs[2])
    assert not torch.equal(new.emission.log_probs[1], current.emission.log_probs[1])
    new.validate()


def test_running_counts_are_summed_and_reset() -> None:
    ones = (torch.ones(2), torch.ones(2, 2), torch.ones(2, 3))
    running = RunningCounts(dict(zip(("start", "transition", "emission"), ones, strict=True)), momentum=0.0)
    running.add(*ones)
    running.add(*ones)
    with running.take() as taken:
        assert taken["emission"].tolist() == [[2.0] * 3] * 2
    running.add(*ones)
    with running.take() as taken:
        assert taken["start"].tolist() == [1.0, 1.0]


def test_momentum_is_an_average_of_updates_without_bias_to_zero() -> None:
    one = {"start": torch.ones(1), "transition": torch.ones(1, 1), "emission": torch.ones(1, 1)}
    running = RunningCounts(one, momentum=0.75)
    seen, weights = [8.0, 4.0, 16.0], [0.75**2 * 0.25, 0.75 * 0.25, 0.25]
    for value in seen:
        running.add(torch.full((1,), value), torch.full((1, 1), value), torch.full((1, 1), value))
        with running.take() as taken:
            pass
    expected = sum(w * s for w, s in zip(weights, seen, strict=True)) / sum(weights)
    assert taken["start"].item() == pytest.approx(expected)


def make_learner(**settings: float) -> BaumWelchLearner:
    torch.manual_seed(0)
    fabric, tokenizer = cpu_fabric(), WordTokenizer(["<unk>", "<eos>", "a", "b", "c"])
    return BaumWelchLearner(fabric, Scalar(3, 5), tokenizer, {}, BaumWelchConfig.model_validate(settings))


def test_full_batch_updates_once_at_the_last_batch_and_mini_batches_every_time() -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 5, (4, 6), generator=generator) for _ in range(3)]
    for full_batch in (True, False):
        learner, changes = make_learner(full_batch=full_batch), []
        for number, tokens in enumerate(texts):
            before = learner.model.get_parameter("emission").detach().clone()
            learner.step(Batch(tokens, None, None, False, last=number == 2), None, 1.0)
            changes.append(not torch.equal(before, learner.model.get_parameter("emission")))
        assert changes == ([False, False, True] if full_batch else [True, True, True])


@pytest.mark.parametrize("full_batch", [False, True])
def test_a_recorded_e_step_learns_like_the_eager_one(full_batch: bool) -> None:
    """Replace the CUDA graph by a function that keeps one result and writes the values of each replay into it."""

    def learn(recorded: bool) -> list[Tensor]:
        learner = make_learner(full_batch=full_batch, step=0.5, momentum=0.5)
        kept: list[StepOutput] = []

        def replay(batch: Batch, carry: object) -> StepOutput | None:
            if len(batch.tokens) != 4:
                return None  # another shape: left to the eager step
            result = learner.learn(batch, None)
            if not kept:
                kept.append(result)
            with torch.no_grad():
                for mine, new in zip(kept[0].log_probs.values(), result.log_probs.values(), strict=True):
                    mine.copy_(new)
            return kept[0]

        if recorded:
            learner.graphed = replay  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(1)
        for number, size in enumerate((4, 4, 2, 4, 4, 4)):
            tokens = torch.randint(0, 5, (size, 6), generator=generator)
            learner.step(Batch(tokens, None, None, False, last=number in (2, 5)), None, 0.5)
        assert bool(kept) == recorded
        return [p.detach() for p in learner.model().tensors().values()]

    for eager, recorded in zip(learn(False), learn(True), strict=True):
        torch.testing.assert_close(recorded, eager)
