"""The likelihood of long sequences by a reduction over chunks: against the steps one after another, in float64."""

import pytest
import torch
from helpers.dense_scan import assert_agrees, log_parameters, make_problem, only_first, scan, sticky
from helpers.oracle import random_hmm

from hmmlm.hmm import HMM
from hmmlm.ops.scan import Evidence, api
from hmmlm.scan import parallel_scan
from hmmlm.scan.implementations import PARALLEL_STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("steps", [1, 2, 50, 700])
def test_long_sequences_agree_with_log_space(steps: int, zeros: float, dtype: torch.dtype) -> None:
    """Ragged, with a carry, restarts and missing tokens, and the longest in more than a power of two of chunks."""
    parameters, evidence = make_problem(
        5, 7, 3, steps, ragged=True, carried=True, restarts=zeros > 0, sharpness=3.0, zeros=zeros, seed=steps
    )
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_scan, "STEPS", 23)
        assert_agrees(parameters, evidence, "parallel", dtype, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_leak", [-50.0, -300.0])
def test_states_that_later_chunks_need_are_not_lost(log_leak: float, dtype: torch.dtype) -> None:
    """One state explains the first chunks, the other all that follow; no step is unlikely in itself."""
    tokens = torch.tensor([[0] * 30 + [1] * 70, [0] * 70 + [1] * 30, [0, 1] * 50])
    for parameters in (sticky(log_leak, -8.0), only_first(log_leak)):
        assert_agrees(parameters, Evidence(tokens), "parallel", dtype, rtol=1e-3, atol=1e-3)


def test_the_likelihood_without_a_gradient_is_that_with_it() -> None:
    parameters, evidence = make_problem(4, 6, 2, 300, ragged=True, sharpness=4.0)
    hmm = HMM(*parameters, impl="parallel")
    plain = hmm.scan(evidence.tokens, evidence.lengths)
    learned = HMM(*(p.clone().requires_grad_() for p in parameters), impl="parallel").scan(*evidence[:2])
    torch.testing.assert_close(plain.log_likelihood, learned.log_likelihood.detach(), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(plain.carry.log_probs, learned.carry.log_probs)


def test_a_sequence_that_restarts_forgets_a_lost_carry() -> None:
    parameters, evidence = make_problem(3, 4, 2, 20)
    restart = torch.zeros_like(evidence.tokens, dtype=torch.bool)
    restart[0, 0] = True
    lost = torch.full((2, 3), -torch.inf, dtype=torch.float64)
    given = evidence._replace(carry=lost, restart=restart)
    result = scan(parameters, given, "parallel").log_likelihood
    torch.testing.assert_close(result[0], scan(parameters, evidence, "scaled").log_likelihood[0])
    assert result[1] == -torch.inf


def test_expected_counts_are_those_of_all_steps() -> None:
    parameters, evidence = make_problem(4, 6, 2, 300, ragged=True)
    got, want = (HMM(*parameters, impl=impl).expected_counts(*evidence[:2]) for impl in ("parallel", "scaled"))
    for one, other in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(one, other)


def test_it_serves_long_sequences_where_no_loops_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "installed", lambda name: False)
    tokens = torch.zeros(1, PARALLEL_STEPS, dtype=torch.long)

    def reason(states: int, tokens: torch.Tensor) -> str | None:
        chosen, refused = HMM(*log_parameters(random_hmm(states, 3, seed=1))).implementation(tokens)
        assert chosen in ("parallel", "scaled")
        return refused.get("parallel")

    assert reason(16, tokens) is None
    assert reason(64, tokens) == "is slower for 64 states, 1 at a time"
    assert reason(16, tokens.expand(9, -1)) == "is slower for 16 states, 9 at a time"
    assert reason(16, tokens[:, 1:]) == f"is slower for fewer than {PARALLEL_STEPS:,} tokens"
