"""Queries beyond the contract: in products of probabilities beside log space, over long sequences, and their memory."""

import math

import pytest
import torch
from helpers import naive_scan as naive
from helpers.dense_scan import sticky
from helpers.memory import LargestTensor
from helpers.oracle import random_blocked_hmm, random_hmm, single_block
from torch import Tensor

from hmmlm.hmm import HMM
from hmmlm.numerics import logmatrix
from hmmlm.ops import pieces
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.scan.recursions import run_messages

NEG_INF = -math.inf
DTYPES = [torch.float32, torch.float64]


def possible_tokens(hmm: HMM, batch: int, steps: int, seed: int, missing: float) -> Tensor:
    """Return tokens [batch, steps] drawn from the model, a fraction of them then missing."""
    generator = torch.Generator().manual_seed(seed)
    tokens, _ = hmm.sample(batch, steps, generator)
    return tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < missing, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log_leak", [-50.0, -120.0, -2000.0, NEG_INF])
@pytest.mark.parametrize("log_wrong", [-30.0, -690.0, -2000.0])
def test_posteriors_where_later_evidence_reverses_earlier_agree_with_log_space(
    dtype: torch.dtype, log_leak: float, log_wrong: float
) -> None:
    parameters = Parameters(*(p.to(dtype) for p in sticky(log_leak, log_wrong)))
    tokens = torch.tensor([[0] * 9 + [1] * 20, [0] * 20 + [1] * 9, [0, 1] * 14 + [0]])
    exact = Parameters(*(p.double() for p in parameters))
    scores = naive.forward(exact, Evidence(tokens)) + naive.backward(exact, Evidence(tokens))
    dense = HMM(*parameters)
    for hmm in (dense, *([single_block(dense)] if log_leak > NEG_INF else [])):
        torch.testing.assert_close(hmm.posterior(tokens).double(), scores.softmax(2), rtol=1e-3, atol=1e-4)


def test_a_long_sequence_in_float32() -> None:
    hmm = HMM.from_probs(*random_hmm(4, 5, seed=13)).to(torch.float32)
    tokens = torch.randint(0, 5, (1, 1_500), generator=torch.Generator().manual_seed(3))
    states, log_prob = hmm.viterbi(tokens)
    wide_states, wide_prob = hmm.to(torch.float64).viterbi(tokens)
    assert log_prob.item() == pytest.approx(wide_prob.item(), rel=1e-6)
    assert (states == wide_states).double().mean().item() > 0.999
    totals = hmm.posterior(tokens).sum(-1)
    torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-3, rtol=0)
    assert bool(hmm.entropy(tokens).isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sharpness", "zeros"), [(1.0, 0.0), (4.0, 0.0), (15.0, 0.0), (1.0, 0.3), (90.0, 0.0)])
def test_products_of_probabilities_agree_with_log_space_in_every_cell(
    sharpness: float, zeros: float, dtype: torch.dtype
) -> None:
    hmm = HMM.from_probs(*random_hmm(24, 30, 7, sharpness, zeros)).to(dtype)
    tokens, lengths = possible_tokens(hmm, 5, 23, 3, missing=0.1), torch.tensor([4, 23, 1, 23, 9])

    def results() -> list[Tensor]:
        lattice = hmm._possible(tokens, lengths)
        cells = [*lattice.filtered, *lattice.scales, *run_messages(hmm, lattice)]
        return [*cells, hmm.posterior(tokens, lengths), hmm.infill(tokens, lengths), *hmm.viterbi(tokens, lengths)]

    fast = results()
    used = hmm._possible(tokens, lengths).stacked is not None
    assert used or sharpness > 4
    assert not used or sharpness < 90 or dtype == torch.float64  # underflow is noticed
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    with pieces.limit(50):
        exact = results()
    for got, want in zip(fast, exact, strict=True):
        torch.testing.assert_close(got, want, **close)


def test_a_step_of_little_mass_is_computed_in_log_space() -> None:
    """The second state, whose share of the second word is a denormal number in float32, explains the words after it."""
    start = torch.tensor([1.0, 3e-8, 1e-9])
    transition = torch.tensor([[1.0, 1e-24, 1e-28], [1e-24, 1.0, 1e-28], [1e-20, 1e-24, 1.0]])
    emission = torch.tensor([[1.0, 1e-25, 1e-3], [1.0, 2e-36, 1.0], [1e-20, 1.0, 1e-3]])
    hmm, tokens = HMM(start.log(), transition.log(), emission.log()), torch.tensor([[0, 1] + [2] * 8])
    exact = HMM(*(p.double() for p in hmm.tensors().values()))
    want = exact.token_log_probs(tokens)
    torch.testing.assert_close(hmm.token_log_probs(tokens).double(), want, rtol=1e-5, atol=1e-4)


def test_paths_drawn_in_pieces_of_steps_continue_each_other() -> None:
    states, num = 64, 64
    cycle = torch.eye(states).roll(1, 1)  # a path is determined by any of its states
    hmm = HMM(torch.full((states,), 1 / states).log(), cycle.log(), torch.zeros(states, 1))
    lengths = torch.tensor([13, 20])
    drawn = hmm.posterior_sample(torch.zeros(2, 20, dtype=torch.long), lengths, num, torch.Generator().manual_seed(0))
    for paths, length in zip(drawn.unbind(1), lengths.tolist(), strict=True):
        assert bool((paths[:, :length].diff(dim=1) % states == 1).all()) and bool((paths[:, length:] == -1).all())


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("query", ["filter", "posterior", "token_log_probs", "infill", "viterbi", "entropy"])
def test_columns_beyond_every_length_change_no_answer_and_stay(query: str, blocked: bool) -> None:
    hmm = random_blocked_hmm(2, 3, 7, seed=0) if blocked else HMM.from_probs(*random_hmm(3, 7, 0))
    tokens, lengths = possible_tokens(hmm, 2, 8, 0, missing=0), torch.tensor([5, 5])

    def answer(*batch: Tensor) -> Tensor:
        found = getattr(hmm, query)(*batch)
        return found.probs if query == "filter" else found[0] if query == "viterbi" else found

    found, want = answer(tokens, lengths), answer(tokens[:, :5])
    if query == "entropy":
        torch.testing.assert_close(found, want)
    else:
        assert found.shape[:2] == tokens.shape
        torch.testing.assert_close(found[:, :5], want)


# --- memory ---


def test_infill_in_log_space_makes_nothing_of_size_z_by_z_per_position() -> None:
    states, steps = 256, 80
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return (300 * torch.randn(*shape, generator=generator)).log_softmax(-1)

    hmm = HMM(rows(states), rows(states, states), rows(states, 5))
    tokens = hmm.sample(1, steps, generator)[0]
    with LargestTensor() as largest:
        hmm.infill(tokens)
    assert largest.elements <= logmatrix._CELLS < steps * states**2


@pytest.mark.parametrize("query", ["viterbi", "entropy", "infill"])
def test_missing_tokens_of_a_blocked_hmm_make_no_matrix_per_sequence(query: str) -> None:
    batch, states = 16, 64
    hmm = random_blocked_hmm(4, states // 4, 8, seed=0)
    tokens = possible_tokens(hmm, batch, 4, 0, missing=0.5)
    expected = getattr(hmm, query)(tokens)
    with pieces.limit(2**10), LargestTensor() as largest:
        found = getattr(hmm, query)(tokens)
    torch.testing.assert_close(found, expected)
    assert largest.elements <= batch * states * 4 < batch * states**2
