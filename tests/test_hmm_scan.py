"""`scan` and `joint_scan` of both kinds of HMM: against enumeration, window by window, and through a model."""

import math

import pytest
import torch
from helpers.oracle import Enumeration, matrices, random_blocked_hmm, random_hmm, single_block, with_gradients
from torch import Tensor, nn

from hmmlm.emissions import Blocked
from hmmlm.hmm import HMM, Carry
from hmmlm.models.base import Model
from hmmlm.ops.common import Scan
from hmmlm.transitions import Dense, Factored

KINDS = ["dense", "blocked", "blocked, one block"]
RESTART = torch.tensor([[True, False, False, True], [False, False, True, False], [False, True, False, False]])
LENGTHS = torch.tensor([4, 4, 2])


def make_hmm(kind: str, seed: int = 0) -> HMM:
    """Return an HMM over five words in float64."""
    if kind == "blocked":
        return random_blocked_hmm(2, 2, 5, seed)
    dense = HMM.from_probs(*random_hmm(4, 5, seed))
    return dense if kind == "dense" else single_block(dense)


def draw(hmm: HMM, batch: int, steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and states [batch, steps] of the model."""
    return hmm.sample(batch, steps, torch.Generator().manual_seed(seed))


def some_carry(hmm: HMM, batch: int) -> Carry:
    """Return a carry over all states."""
    return Carry(torch.rand(batch, hmm.states, generator=torch.Generator().manual_seed(1)).double().log_softmax(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("restart", [None, RESTART])
@pytest.mark.parametrize("carried", [False, True])
def test_scan_agrees_with_enumeration(kind: str, lengths: Tensor | None, restart: Tensor | None, carried: bool) -> None:
    hmm = make_hmm(kind)
    tokens, _ = draw(hmm, 3, 4)
    carry = some_carry(hmm, 3) if carried else None
    found = hmm.scan(tokens, lengths, carry, restart)
    for row in range(3):
        size = 4 if lengths is None else int(lengths[row])
        initial = None if carry is None else carry.log_probs[row].exp()
        starts = None if restart is None else restart[row].tolist()
        oracle = Enumeration(hmm.dense(), tokens[row, :size].tolist(), initial, starts)
        torch.testing.assert_close(found.log_likelihood[row], oracle.log_likelihood())
        states = torch.arange(hmm.states) if found.carry.states is None else found.carry.states[row]
        torch.testing.assert_close(found.carry.log_probs[row].exp(), oracle.posterior()[-1][states])
        assert oracle.posterior()[-1][states].sum().item() == pytest.approx(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("restart", [None, RESTART])
@pytest.mark.parametrize("carried", [False, True])
def test_joint_scan_agrees_with_enumeration(
    kind: str, lengths: Tensor | None, restart: Tensor | None, carried: bool
) -> None:
    """log p(x, z) of a given path; with a carry that is certain of the state before it."""
    hmm = make_hmm(kind)
    tokens, states = draw(hmm, 3, 5)
    before, tokens, states = (
        hmm.joint_scan(tokens[:, :1], states[:, :1]).carry,
        tokens[:, 1:].clone(),
        states[:, 1:].clone(),
    )
    previous = before.most_likely()
    tokens[0, 1] = -1  # a missing token: only its state is known
    sizes = [4, 4, 4] if lengths is None else lengths.tolist()
    if lengths is not None:
        outside = torch.arange(4) >= lengths[:, None]
        tokens, states = tokens.masked_fill(outside, -1), states.masked_fill(outside, -1)
    found = hmm.joint_scan(tokens, states, lengths, before if carried else None, restart)
    for row, size in enumerate(sizes):
        certain = torch.nn.functional.one_hot(previous[row], hmm.states).double() if carried else None
        starts = None if restart is None else restart[row].tolist()
        oracle = Enumeration(hmm.dense(), tokens[row, :size].tolist(), certain, starts)
        torch.testing.assert_close(found.log_likelihood[row], oracle.log_joint_of(states[row, :size].tolist()))
        assert found.carry.most_likely()[row] == states[row, size - 1]
        assert found.carry.log_probs[row].exp().sum() == 1 and found.carry.log_probs[row].max() == 0


def test_joint_scan_of_states_that_cannot_emit_the_token() -> None:
    """A state of another block does not emit the word; a missing token is emitted by every state."""
    hmm = make_hmm("blocked")
    word = torch.tensor([[0, 1]])
    own = hmm.emission.tensors()["block_of_word"][word] * 2  # the first state of each block
    other = (own + 2) % 4
    assert hmm.joint_scan(word, own).log_likelihood.isfinite().all()
    assert hmm.joint_scan(word, torch.cat([own[:, :1], other[:, 1:]], 1)).log_likelihood.item() == -math.inf
    found = hmm.joint_scan(torch.full((1, 2), -1), other)
    expected = Enumeration(hmm.dense(), [-1, -1]).log_joint_of(other[0].tolist())
    torch.testing.assert_close(found.log_likelihood[0], expected)
    assert found.carry.most_likely().item() == other[0, 1]  # whatever word 0 is


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joint", [False, True])
def test_windows_with_a_carry_add_up_to_the_whole(kind: str, joint: bool) -> None:
    hmm = make_hmm(kind)
    tokens, states = draw(hmm, 3, 20)
    restart = torch.rand(3, 20, generator=torch.Generator().manual_seed(2)) < 0.2

    def run(window: slice, carry: Carry | None) -> Scan:
        if joint:
            return hmm.joint_scan(tokens[:, window], states[:, window], None, carry, restart[:, window])
        return hmm.scan(tokens[:, window], None, carry, restart[:, window])

    whole = run(slice(0, 20), None)
    total, carry = torch.zeros(3, dtype=torch.float64), None
    for first in range(0, 20, 7):
        part = run(slice(first, first + 7), carry)
        total, carry = total + part.log_likelihood, part.carry
    torch.testing.assert_close(total, whole.log_likelihood)
    assert carry is not None
    torch.testing.assert_close(carry.log_probs, whole.carry.log_probs)
    assert torch.equal(carry.most_likely(), whole.carry.most_likely())
    assert (carry.states is None) == (kind == "dense")
    if carry.states is not None:
        assert torch.equal(carry.states, whole.carry.states)


@pytest.mark.parametrize("joint", [False, True])
def test_gradients_of_a_blocked_scan_are_those_of_the_dense_one(joint: bool) -> None:
    tokens, states = draw(make_hmm("blocked"), 3, 6)
    restart = torch.rand(3, 6, generator=torch.Generator().manual_seed(2)) < 0.2
    found = []
    for dense in (False, True):
        model = with_gradients(make_hmm("blocked"))
        leaves = list(model.parameters().values())
        hmm = model.dense() if dense else model
        carry = some_carry(hmm, 3)
        result = (
            hmm.joint_scan(tokens, states, None, carry, restart) if joint else hmm.scan(tokens, None, carry, restart)
        )
        assert not result.carry.log_probs.requires_grad
        weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        found.append(torch.autograd.grad(result.log_likelihood, leaves, weight))
    for blocked, want in zip(*found, strict=True):
        torch.testing.assert_close(blocked, want)


def test_the_gradient_of_joint_scan_counts_starts_transitions_and_emissions() -> None:
    dense = HMM.from_probs([1.0, 0.0], [[0.5, 0.5], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]])
    leaves = [p.clone().requires_grad_() for p in matrices(dense)]
    result = HMM(*leaves).joint_scan(torch.tensor([[1, 0], [0, 1]]), torch.tensor([[0, 1], [1, 0]]))
    torch.testing.assert_close(result.log_likelihood.detach(), torch.tensor([math.log(0.5), -math.inf]))
    start, transition, emission = torch.autograd.grad(result.log_likelihood[0], leaves)
    assert torch.equal(start, torch.tensor([1.0, 0.0])) and torch.equal(emission, torch.eye(2).flip(0))
    assert torch.equal(transition, torch.tensor([[0.0, 1.0], [0.0, 0.0]]))


class BlockedLogits(Model):
    """A model that returns a blocked HMM and has no scan of its own."""

    def __init__(self, hmm: HMM) -> None:
        super().__init__(hmm.states, hmm.vocab_size)
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


def test_the_carry_of_a_model_that_requires_gradients_loses_no_state() -> None:
    uniform = Factored(torch.zeros(2, 1), torch.zeros(2, 1))
    hmm = HMM(torch.tensor([0.5, 0.5]).log(), uniform, torch.tensor([[0.0, -200.0], [-200.0, 0.0]]))
    for model in (hmm, with_gradients(hmm)):
        carry = model.scan(torch.tensor([[0, 0]])).carry
        torch.testing.assert_close(carry.over_all(2), torch.tensor([[0.0, -200.0]], dtype=torch.float64))
