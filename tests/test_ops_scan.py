"""The recursions: naive against enumeration, scaled against naive, and neither ever NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Enumeration, random_hmm
from torch import Tensor

from hmmlm.ops import scan as ops
from hmmlm.ops.scan import Evidence, Parameters, naive

NEG_INF = -math.inf


def logs(probs: tuple[Tensor, ...], dtype: torch.dtype = torch.float64) -> Parameters:
    return Parameters(*(p.log().to(dtype) for p in probs))


def leaves(parameters: Parameters) -> Parameters:
    return Parameters(*(p.clone().requires_grad_() for p in parameters))


@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_naive_agrees_with_enumeration(zeros: float) -> None:
    probs = random_hmm(3, 4, seed=1, zeros=zeros)
    parameters = logs(probs)
    for tokens in ([2], [0, 3, 1, 1, 2], [1, -1, 0, -1]):
        every = Enumeration(*probs, tokens)
        evidence = Evidence(torch.tensor([tokens]))
        assert naive.log_likelihood(parameters, evidence).item() == pytest.approx(every.log_likelihood(), rel=1e-12)
        if every.total == 0:
            continue
        torch.testing.assert_close(naive.posterior(parameters, evidence)[0], every.posterior())
        counts = naive.expected_counts(parameters, evidence, torch.ones(1, dtype=torch.float64))
        for mine, theirs in zip(counts[:3], every.counts(4), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert naive.entropy(parameters, evidence).item() == pytest.approx(every.entropy(), abs=1e-12)


def test_naive_carried_state_agrees_with_enumeration() -> None:
    probs = random_hmm(3, 4, seed=2)
    initial = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    tokens = [1, 3, -1, 0]
    every = Enumeration(*probs, tokens, initial=initial)
    mine = naive.log_likelihood(logs(probs), Evidence(torch.tensor([tokens]), initial=initial[None]))
    assert mine.item() == pytest.approx(every.log_likelihood(), rel=1e-12)


def test_restart_is_the_product_of_independent_pieces() -> None:
    parameters = logs(random_hmm(4, 5, seed=3))
    tokens = torch.tensor([[0, 3, 2, 4, 1, 1]])
    restart = torch.tensor([[False, False, True, False, True, False]])
    together = ops.scan(*parameters, tokens, restart=restart).log_likelihood
    pieces = [ops.scan(*parameters, tokens[:, a:b]).log_likelihood for a, b in ((0, 2), (2, 4), (4, 6))]
    torch.testing.assert_close(together, sum(pieces))


def problem(seed: int, states: int, words: int, batch: int, steps: int, zeros: float, sharpness: float,
            dtype: torch.dtype, ragged: bool, carried: bool, restarts: bool) -> tuple[Parameters, Evidence]:
    generator = torch.Generator().manual_seed(seed)
    parameters = logs(random_hmm(states, words, seed, sharpness, zeros), dtype)
    tokens = torch.randint(-1, words, (batch, steps), generator=generator)
    lengths = torch.randint(1, steps + 1, (batch,), generator=generator) if ragged else None
    initial = torch.rand(batch, states, generator=generator, dtype=torch.float64) if carried else None
    if initial is not None:
        initial = (initial / initial.sum(1, keepdim=True)).to(dtype)
    restart = torch.rand(batch, steps, generator=generator) < 0.3 if restarts else None
    return parameters, Evidence(tokens, lengths, initial, restart)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), states=st.integers(1, 9), words=st.integers(1, 7), batch=st.integers(1, 5),
    steps=st.integers(1, 9), zeros=st.sampled_from([0.0, 0.4]), sharpness=st.sampled_from([1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]), ragged=st.booleans(), carried=st.booleans(),
    restarts=st.booleans(),
)
def test_scaled_agrees_with_naive(**case: object) -> None:
    parameters, evidence = problem(**case)  # type: ignore[arg-type]
    double = case["dtype"] == torch.float64
    close = {"rtol": 1e-9, "atol": 1e-10} if double else {"rtol": 2e-4, "atol": 2e-5}
    wide = Parameters(*(p.double() for p in parameters))
    wide_evidence = evidence if evidence.initial is None else evidence._replace(initial=evidence.initial.double())

    mine, theirs = leaves(parameters), leaves(wide)
    my_initial = None if evidence.initial is None else evidence.initial.clone().requires_grad_()
    their_initial = None if my_initial is None else my_initial.detach().double().requires_grad_()
    result = ops.scan(*mine, *evidence._replace(initial=my_initial), impl="torch")
    expected = ops.scan(*theirs, *evidence._replace(initial=their_initial), impl="naive")
    torch.testing.assert_close(result.log_likelihood.double(), expected.log_likelihood, **close)
    possible = expected.log_likelihood > NEG_INF
    torch.testing.assert_close(result.final.double()[possible], expected.final[possible], **close)
    weight = torch.linspace(-1, 2, evidence.tokens.shape[0], dtype=torch.float64)
    inputs_mine, inputs_theirs = list(mine), list(theirs)
    if my_initial is not None and their_initial is not None:
        inputs_mine.append(my_initial)
        inputs_theirs.append(their_initial)
    gradients = torch.autograd.grad(result.log_likelihood, inputs_mine, weight.to(result.log_likelihood))
    reference = torch.autograd.grad(
        expected.log_likelihood, inputs_theirs, torch.where(possible, weight, 0.0), allow_unused=True,
        materialize_grads=True)
    for name, got, want in zip(("start", "transition", "emission", "initial"), gradients, reference, strict=False):
        torch.testing.assert_close(got.double(), want, msg=lambda m, n=name: f"{n}: {m}", **close)

    for query in (ops.posterior, ops.expected_counts, ops.entropy, ops.filter_states):
        got, want = query(parameters, evidence, "torch"), query(wide, wide_evidence, "naive")
        for a, b in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
            if query is ops.filter_states:
                a, b = a.exp(), b.exp()
            if query in (ops.entropy, ops.filter_states):
                a, b = a[possible], b[possible]
            torch.testing.assert_close(a.double(), b, **close)


def test_gradient_is_that_of_the_likelihood_by_finite_differences() -> None:
    parameters = leaves(logs(random_hmm(4, 5, seed=5)))
    tokens = torch.tensor([[0, 3, -1, 2], [4, 4, 1, 0]])
    lengths = torch.tensor([3, 4])
    assert torch.autograd.gradcheck(lambda *p: ops.scan(*p, tokens, lengths).log_likelihood, tuple(parameters))


def test_windows_with_carried_state_add_up_to_the_whole() -> None:
    parameters = logs(random_hmm(6, 8, seed=6))
    tokens = torch.randint(0, 8, (3, 20), generator=torch.Generator().manual_seed(0))
    whole = ops.scan(*parameters, tokens)
    carried, total = None, torch.zeros(3, dtype=torch.float64)
    for window in tokens.split(7, dim=1):
        part = ops.scan(*parameters, window, initial=carried)
        carried, total = part.final, total + part.log_likelihood
    torch.testing.assert_close(total, whole.log_likelihood)
    assert carried is not None
    torch.testing.assert_close(carried, whole.final)


def sticky(dtype: torch.dtype, log_leak: float, log_wrong: float) -> Parameters:
    """Two states that hardly ever change, each with its own word, hardly ever emitting the other's."""
    stay, right = math.log1p(-math.exp(log_leak)), math.log1p(-math.exp(log_wrong))
    transition = torch.tensor([[stay, log_leak], [log_leak, stay]], dtype=dtype)
    emission = torch.tensor([[right, log_wrong], [log_wrong, right]], dtype=dtype)
    return Parameters(torch.tensor([0.5, 0.5], dtype=dtype).log(), transition, emission)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_leak", [-50.0, -120.0, -2000.0, NEG_INF])
@pytest.mark.parametrize("log_wrong", [-30.0, -120.0, -690.0, -2000.0])
def test_mass_that_underflows_is_noticed(dtype: torch.dtype, log_leak: float, log_wrong: float) -> None:
    """Evidence for one state, then more for the other: the paths that win were lost long before."""
    parameters = sticky(dtype, log_leak, log_wrong)
    tokens = torch.tensor([[0] * 9 + [1] * 20, [0] * 20 + [1] * 9, [0, 1] * 14 + [0]])
    wide = Parameters(*(p.double() for p in parameters))
    expected = ops.scan(*wide, tokens, impl="naive").log_likelihood
    mine = leaves(parameters)
    result = ops.scan(*mine, tokens).log_likelihood
    assert bool(result.isfinite().all())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        ops.posterior(parameters, Evidence(tokens)).double(), ops.posterior(wide, Evidence(tokens), "naive"),
        rtol=1e-3, atol=1e-4)
    theirs = leaves(wide)
    got = torch.autograd.grad(result.sum(), mine)
    want = torch.autograd.grad(ops.scan(*theirs, tokens, impl="naive").log_likelihood.sum(), theirs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", ["naive", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_sequence_is_minus_infinity_with_zero_gradient(impl: ops.Impl, dtype: torch.dtype) -> None:
    start, transition, emission = random_hmm(3, 4, seed=7)
    emission[:, 3] = 0
    emission = emission / emission.sum(1, keepdim=True)
    parameters = leaves(logs((start, transition, emission), dtype))
    result = ops.scan(*parameters, torch.tensor([[0, 3, 1], [0, 1, 2]]), impl=impl)
    assert result.log_likelihood[0] == NEG_INF
    assert bool(result.log_likelihood[1].isfinite())
    gradients = torch.autograd.grad(result.log_likelihood[0], parameters)
    assert all(bool((g == 0).all()) for g in gradients)


def test_unreachable_states_that_explain_everything_do_no_harm() -> None:
    """A second chain that π never enters fits far better: its messages grow without bound and must not matter."""
    leave = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    emission = torch.tensor([[1e-3, 1 - 1e-3], [1.0, 0.0]])
    parameters = leaves(Parameters(torch.tensor([1.0, 0.0]).log(), leave.log(), emission.log()))
    tokens = torch.zeros(1, 400, dtype=torch.long)
    result = ops.scan(*parameters, tokens).log_likelihood
    assert result.item() == pytest.approx(400 * math.log(1e-3), rel=1e-5)
    gradients = torch.autograd.grad(result.sum(), parameters)
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert gradients[2][0, 0].item() == pytest.approx(400, rel=1e-4)


def test_a_hundred_thousand_tokens() -> None:
    parameters = leaves(logs(random_hmm(5, 6, seed=8), torch.float32))
    tokens = torch.randint(0, 6, (1, 100_000), generator=torch.Generator().manual_seed(1))
    result = ops.scan(*parameters, tokens).log_likelihood
    with torch.no_grad():
        windows, carried = torch.zeros((), dtype=torch.float64), None
        wide = [p.double() for p in parameters]
        for window in tokens.split(25_000, 1):
            part = ops.scan(*wide, window, initial=carried)
            carried, windows = part.final, windows + part.log_likelihood[0]
    assert result.item() == pytest.approx(windows.item(), rel=1e-5)
    start, transition, emission = torch.autograd.grad(result.sum(), parameters)
    assert transition.sum().item() == pytest.approx(99_999, rel=1e-3)
    assert emission.sum().item() == pytest.approx(100_000, rel=1e-3)
    assert start.sum().item() == pytest.approx(1, rel=1e-3)


def test_low_precision_products_follow_autocast() -> None:
    parameters = leaves(logs(random_hmm(16, 20, seed=9), torch.float32))
    tokens = torch.randint(0, 20, (4, 30), generator=torch.Generator().manual_seed(2))
    exact = ops.scan(*parameters, tokens).log_likelihood
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = ops.scan(*parameters, tokens).log_likelihood
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
    torch.autograd.grad(rough.sum(), parameters)
