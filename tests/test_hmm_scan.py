"""`scan` through a model, beside underflow, and from a carry that has lost nothing."""

import math
from collections.abc import Callable

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm, single_block, with_gradients
from torch import Tensor, nn

from hmmlm.emissions import Blocked
from hmmlm.hmm import HMM, Carry
from hmmlm.models.base import Model
from hmmlm.scan.generic_filter import GenericProblem, run_scaled
from hmmlm.scan.generic_scan import generic_scan
from hmmlm.scan.recursions import sort_batch
from hmmlm.transitions import Dense, Factored


def make_hmm(kind: str, seed: int = 0) -> HMM:
    """Return an HMM over five words in float64."""
    if kind == "blocked":
        return random_blocked_hmm(2, 2, 5, seed)
    dense = HMM.from_probs(*random_hmm(4, 5, seed))
    return dense if kind == "dense" else single_block(dense)


def draw(hmm: HMM, batch: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and states [batch, steps] of the model."""
    return hmm.sample(batch, steps, torch.Generator().manual_seed(seed))


class BlockedLogits(Model):
    """A model that returns a blocked HMM and has no scan of its own."""

    def __init__(self, hmm: HMM) -> None:
        super().__init__(hmm.num_states, hmm.vocab_size)
        assert isinstance(hmm.transition, Factored)
        self.start, self.u = nn.Parameter(hmm.log_start), nn.Parameter(hmm.transition.u)
        self.w, self.emission = hmm.transition.w, hmm.emission

    def forward(self) -> HMM:
        normalizer = (self.u @ self.w.t()).logsumexp(1)
        return HMM(self.start.log_softmax(0), Factored(self.u, self.w, normalizer), self.emission)


@pytest.mark.parametrize("kind", ["blocked", "blocked, one block"])
def test_a_model_of_a_blocked_hmm_inherits_scan(kind: str) -> None:
    hmm = make_hmm(kind)
    model = BlockedLogits(hmm)
    tokens, _ = draw(hmm, 3, 9)
    whole = model.scan(tokens)
    torch.testing.assert_close(whole.log_likelihood, hmm.log_likelihood(tokens))
    first = model.scan(tokens[:, :4])
    second = model.scan(tokens[:, 4:], carry=first.carry)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
    ragged = model.scan(tokens, torch.tensor([9, 3, 5]))
    torch.testing.assert_close(ragged.log_likelihood, hmm.log_likelihood(tokens, [9, 3, 5]))
    restart = torch.zeros_like(tokens, dtype=torch.bool)
    restart[:, 4] = True
    torch.testing.assert_close(
        model.scan(tokens, restart=restart).log_likelihood,
        first.log_likelihood + hmm.log_likelihood(tokens[:, 4:]),
    )
    assert int(model.skipped) == 0
    got = torch.autograd.grad(whole.log_likelihood.sum(), list(model.parameters()))
    want = torch.autograd.grad(model().dense().log_likelihood(tokens).sum(), list(model.parameters()))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_model_drops_suspect_sequences_and_counts_them() -> None:
    hmm = make_hmm("blocked")
    model = BlockedLogits(hmm)
    result = model.scan(draw(hmm, 3, 4)[0])
    suspect = torch.tensor([False, True, False])
    dropped = model.drop_underflowed(result._replace(suspect=suspect))
    assert dropped.log_likelihood[1] == 0 and int(model.skipped) == 1
    assert torch.equal(dropped.log_likelihood[[0, 2]], result.log_likelihood[[0, 2]])


def test_a_sequence_that_underflows_beside_one_with_missing_tokens() -> None:
    """Log space computes the first alone, whose values are over the states of a block; those of the batch are not."""
    log_transition = torch.tensor([[-0.7, -200.0], [-200.0, -0.7]]).repeat(2, 2)
    emission = Blocked(torch.tensor([[0.0, -200.0], [-200.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 0, 1]))
    hmm = with_gradients(HMM(torch.full((4,), 0.25).log(), Dense(log_transition), emission))
    tokens = torch.tensor([[0, 0, 1, 1], [-1, -1, -1, -1]])
    alone = torch.cat([hmm.log_likelihood(tokens[:1]), hmm.log_likelihood(tokens[1:])])
    torch.testing.assert_close(hmm.log_likelihood(tokens), alone)


@pytest.mark.parametrize(("log_second", "computed_again"), [(-math.inf, []), (-100.0, [0])])
def test_only_what_underflow_may_have_changed_is_computed_again(log_second: float, computed_again: list[int]) -> None:
    """The second state explains the text far better; it matters unless the sequence cannot start in it."""
    emission = torch.tensor([[1e-3, 1 - 1e-3], [1.0, 0.0]])
    hmm = HMM(torch.tensor([0.0, log_second]), torch.eye(2).log(), emission.log())
    batch = sort_batch(hmm, torch.zeros(1, 40, dtype=torch.long), None)
    problem = GenericProblem(hmm, batch, None, exact_carry=False, in_log_space=False, learns=False)
    run = run_scaled(problem, hmm.log_start[None])
    assert run.rows.tolist() == computed_again
    want = max(40 * math.log(1e-3), log_second)
    torch.testing.assert_close(run.total, torch.tensor([want], dtype=torch.float64))


def test_an_emission_below_the_floor_may_explain_a_word_best() -> None:
    """The last state, which is impossible, emits the word best: of the others, only the less likely one is kept."""
    emission = torch.tensor([[9e-67], [1e-47], [1.0]], dtype=torch.float64).log().float()
    hmm = HMM(torch.tensor([1.0, 1e-20, 0.0]).log(), torch.eye(3).log(), emission)
    found = generic_scan(hmm, torch.tensor([[0]])).log_likelihood
    torch.testing.assert_close(found, torch.tensor([math.log(9e-67 + 1e-67)]))


def test_a_sum_of_which_a_term_is_below_the_floor_is_not_sure() -> None:
    """The second word is as likely in either state, though only one of the two ways into the last one is kept."""
    start, transition = torch.tensor([0.2, 0.8]), torch.tensor([[1.0, 2e-36], [1.0, 9e-37]])
    emission = torch.tensor([[1.0, 1e-36], [0.5, 0.5]])
    hmm, tokens = HMM(start.log(), transition.log(), emission.log()), torch.tensor([[0, 1]])
    want = HMM(*(p.double() for p in hmm.tensors().values()), impl="naive").log_likelihood(tokens)
    torch.testing.assert_close(generic_scan(hmm, tokens).log_likelihood.double(), want, rtol=1e-5, atol=0)


def test_the_carry_of_a_model_that_requires_gradients_loses_no_state() -> None:
    uniform = Factored(torch.zeros(2, 1), torch.zeros(2, 1))
    hmm = HMM(torch.tensor([0.5, 0.5]).log(), uniform, torch.tensor([[0.0, -200.0], [-200.0, 0.0]]))
    for model in (hmm, with_gradients(hmm)):
        carry = model.scan(torch.tensor([[0, 0]])).carry
        torch.testing.assert_close(carry.over_all(2), torch.tensor([[0.0, -200.0]], dtype=torch.float64))


@pytest.mark.parametrize("kind", ["auto", "scaled", "blocked", "union"])
def test_a_carry_loses_no_state_below_the_range_of_float64(kind: str) -> None:
    """The second state is reached by a transition of e^−800 only, and explains each word as well as the first."""
    start, emission = torch.tensor([0.0, -math.inf]), torch.zeros(2, 1)
    transition = torch.tensor([[0.0, -800.0], [-math.inf, 0.0]])
    hmm = HMM(start, transition, emission, impl="scaled" if kind == "scaled" else "auto")
    if kind == "blocked":
        hmm = with_gradients(HMM(start, transition, Blocked(emission.t(), torch.tensor([0]))))
    if kind == "union":
        hmm = HMM.union([hmm, hmm], [1.0, 0.0])
    carry = hmm.scan(torch.tensor([[0, 0]]), exact_carry=True).carry
    want = torch.tensor([[0.0, -800.0]], dtype=torch.float64)
    torch.testing.assert_close(carry.over_all(hmm.num_states)[:, :2], want)


def unlikely_first() -> tuple[HMM, Tensor]:
    """Return a union whose second component alone explains the end of a text, and hardly its beginning."""
    sure, rare = math.log1p(-math.exp(-30.0)), -30.0
    parts = [
        HMM(torch.zeros(1), torch.zeros(1, 1), torch.tensor([[sure, rare, -math.inf]])),
        HMM(torch.zeros(1), torch.zeros(1, 1), torch.tensor([[rare, -math.inf, sure]])),
    ]
    return HMM.union(parts), torch.tensor([[0] * 30 + [2] * 30])


def left_to_right() -> tuple[HMM, Tensor]:
    """Return a model of which the last state, hardly reached at first, alone explains the end of a text."""
    transition = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1 - 1e-30, 1e-30], [0.0, 0.0, 1.0]], dtype=torch.float64)
    emission = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    hmm = HMM.from_probs(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), transition, emission)
    return hmm.to(torch.float32), torch.tensor([[0] * 5 + [2] * 5, [0, 1] * 5])


def union() -> tuple[HMM, Tensor]:
    hmm, tokens = left_to_right()
    return HMM.union([hmm, hmm], [0.3, 0.7]), tokens


@pytest.mark.parametrize("make", [left_to_right, unlikely_first, union])
@pytest.mark.parametrize("width", [1, 7, 30])
@pytest.mark.parametrize("query", ["filter", "token_log_probs", "scan"])
def test_a_carry_loses_no_unlikely_state(make: Callable[[], tuple[HMM, Tensor]], width: int, query: str) -> None:
    hmm, tokens = make()
    carry: Carry | None = None
    total = torch.zeros(len(tokens), dtype=torch.float64)
    for window in tokens.split(width, 1):
        found = hmm.scan(window, carry=carry) if query == "scan" else hmm.filter(window, carry=carry)
        scored = hmm.token_log_probs(window, carry=carry).sum(1) if query == "token_log_probs" else found.log_likelihood
        carry, total = found.carry, total + scored.double()
    whole = hmm.log_likelihood(tokens).double()
    assert bool(whole.isfinite().all())
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-3)
