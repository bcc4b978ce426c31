"""The dense scan: log space against enumeration, scaled probabilities against log space, and neither ever NaN."""

import math

import pytest
import torch
from helpers import naive_scan as naive
from helpers.dense_scan import assert_agrees, log_parameters, make_problem, scan, sticky
from helpers.oracle import NEG_INF, Enumeration, matrices, random_hmm
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.ops.common import Impl, installed
from hmmlm.ops.scan import Evidence, Parameters, api

RECURSIONS: list[Impl] = ["scaled", "compiled", "parallel"] if installed("numba") else ["scaled", "parallel"]
CLOSE = {torch.float32: {"rtol": 2e-4, "atol": 2e-5}, torch.float64: {"rtol": 1e-9, "atol": 1e-10}}


def leaves(parameters: Parameters, dtype: torch.dtype | None = None) -> Parameters:
    return Parameters(*(p.to(dtype or p.dtype, copy=True).requires_grad_() for p in parameters))


# --- the specification ---


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("restart", [None, [False, True, False, True]])
@pytest.mark.parametrize("initial", [None, [0.2, 0.5, 0.3]])
def test_log_space_agrees_with_enumeration(
    zeros: float, restart: list[bool] | None, initial: list[float] | None
) -> None:
    hmm = HMM.from_probs(*random_hmm(3, 4, seed=1, zeros=zeros))
    before = None if initial is None else torch.tensor(initial, dtype=torch.float64)
    possible = 0
    for tokens in ([2], [0, 3, 1, 1], [1, -1, 0, -1]):
        starts = None if restart is None else restart[: len(tokens)]
        oracle = Enumeration(hmm, tokens, before, starts)
        evidence = Evidence(
            torch.tensor([tokens]),
            carry=None if before is None else before[None].log(),
            restart=None if starts is None else torch.tensor([starts]),
        )
        parameters = leaves(matrices(hmm))
        result = scan(parameters, evidence, "naive")
        torch.testing.assert_close(result.log_likelihood[0], oracle.log_likelihood())
        if oracle.log_likelihood() == NEG_INF:
            continue
        possible += 1
        torch.testing.assert_close(result.carry.log_probs.exp()[0], oracle.posterior()[-1])
        alpha, beta = naive.forward(parameters, evidence), naive.backward(parameters, evidence)
        torch.testing.assert_close((alpha + beta)[0].softmax(1), oracle.posterior())
        counts = naive.expected_counts(parameters, evidence, torch.ones(1, dtype=torch.float64))
        gradients = torch.autograd.grad(
            result.log_likelihood.sum(), parameters, allow_unused=True, materialize_grads=True
        )
        for got, want in zip(counts, gradients, strict=False):
            torch.testing.assert_close(got, want)
        if restart is None and initial is None:
            for got, want in zip(counts, oracle.counts(), strict=False):
                torch.testing.assert_close(got, want)
    assert possible


def test_a_restart_gives_the_product_of_independent_pieces() -> None:
    parameters = log_parameters(random_hmm(4, 5, seed=3))
    tokens = torch.tensor([[0, 3, 2, 4, 1, 1]])
    restart = torch.tensor([[False, False, True, False, True, False]])
    together = scan(parameters, Evidence(tokens, restart=restart)).log_likelihood
    pieces = [scan(parameters, Evidence(tokens[:, a:b])).log_likelihood for a, b in ((0, 2), (2, 4), (4, 6))]
    torch.testing.assert_close(together, sum(pieces))


# --- scaled probabilities ---


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 5), st.integers(1, 9)),
    seed=st.integers(0, 10**6),
    zeros=st.sampled_from([0.0, 0.4]),
    sharpness=st.sampled_from([1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    ragged=st.booleans(),
    carried=st.booleans(),
    restarts=st.booleans(),
)
def test_scaled_agrees_with_log_space(
    size: tuple[int, int, int, int], dtype: torch.dtype, **options: int | float | bool
) -> None:
    parameters, evidence = make_problem(*size, **options)  # type: ignore[arg-type]
    for impl in RECURSIONS:
        assert_agrees(parameters, evidence, impl, dtype, **CLOSE[dtype])


def test_gradients_agree_with_finite_differences() -> None:
    parameters = leaves(log_parameters(random_hmm(4, 5, seed=5)))
    evidence = Evidence(torch.tensor([[0, 3, -1, 2], [4, 4, 1, 0]]), torch.tensor([3, 4]))
    assert torch.autograd.gradcheck(lambda *p: scan(Parameters(*p), evidence).log_likelihood, tuple(parameters))


@pytest.mark.parametrize("impl", ["naive", *RECURSIONS])
def test_windows_with_a_carry_add_up_to_the_whole(impl: Impl) -> None:
    parameters = log_parameters(random_hmm(6, 8, seed=6))
    tokens = torch.randint(0, 8, (3, 20), generator=torch.Generator().manual_seed(0))
    whole = scan(parameters, Evidence(tokens), impl)
    carried, total = None, torch.zeros(3, dtype=torch.float64)
    for window in tokens.split(7, dim=1):
        part = scan(parameters, Evidence(window, carry=carried), impl)
        carried, total = part.carry.log_probs, total + part.log_likelihood
    torch.testing.assert_close(total, whole.log_likelihood)
    assert carried is not None
    torch.testing.assert_close(carried, whole.carry.log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_leak", [-50.0, -120.0, -2000.0, NEG_INF])
@pytest.mark.parametrize("log_wrong", [-30.0, -120.0, -690.0, -2000.0])
def test_sequences_whose_mass_underflows_are_recomputed(dtype: torch.dtype, log_leak: float, log_wrong: float) -> None:
    """Evidence for one state, then more for the other: the paths that win were lost long before."""
    tokens = torch.tensor([[0] * 9 + [1] * 20, [0] * 20 + [1] * 9, [0, 1] * 14 + [0]])
    parameters = sticky(log_leak, log_wrong)
    assert bool(scan(parameters, Evidence(tokens)).log_likelihood.isfinite().all())
    assert_agrees(parameters, Evidence(tokens), "auto", dtype, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", ["naive", *RECURSIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_impossible_sequence_has_minus_infinity_and_no_gradient(impl: Impl, dtype: torch.dtype) -> None:
    start, transition, emission = random_hmm(3, 4, seed=7)
    emission[:, 3] = 0
    emission = emission / emission.sum(1, keepdim=True)
    parameters = leaves(log_parameters((start, transition, emission), dtype))
    result = scan(parameters, Evidence(torch.tensor([[0, 3, 1], [0, 1, 2]])), impl)
    assert result.log_likelihood[0] == NEG_INF
    assert bool(result.log_likelihood[1].isfinite())
    assert bool((result.carry.log_probs.exp()[0] == 0).all())
    gradients = torch.autograd.grad(result.log_likelihood[0], parameters)
    assert all(bool((g == 0).all()) for g in gradients)


def test_unreachable_states_that_explain_everything_do_not_matter() -> None:
    """A second chain that π never enters fits far better: its messages grow without bound."""
    stay = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    emission = torch.tensor([[1e-3, 1 - 1e-3], [1.0, 0.0]])
    parameters = leaves(Parameters(torch.tensor([1.0, 0.0]).log(), stay.log(), emission.log()))
    tokens = torch.zeros(1, 400, dtype=torch.long)
    result = scan(parameters, Evidence(tokens)).log_likelihood
    assert result.item() == pytest.approx(400 * math.log(1e-3), rel=1e-5)
    gradients = torch.autograd.grad(result.sum(), parameters)
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert gradients[2][0, 0].item() == pytest.approx(400, rel=1e-4)


def test_fifty_thousand_tokens_in_float32() -> None:
    parameters = leaves(log_parameters(random_hmm(5, 6, seed=8), torch.float32))
    tokens = torch.randint(0, 6, (1, 50_000), generator=torch.Generator().manual_seed(1))
    result = scan(parameters, Evidence(tokens)).log_likelihood
    with torch.no_grad():
        windows, carried = torch.zeros((), dtype=torch.float64), None
        exact = Parameters(*(p.double() for p in parameters))
        for window in tokens.split(12_500, 1):
            part = scan(exact, Evidence(window, carry=carried))
            carried, windows = part.carry.log_probs, windows + part.log_likelihood[0]
    assert result.item() == pytest.approx(windows.item(), rel=1e-5)
    start, transition, emission = torch.autograd.grad(result.sum(), parameters)
    assert transition.sum().item() == pytest.approx(49_999, rel=1e-3)
    assert emission.sum().item() == pytest.approx(50_000, rel=1e-3)
    assert start.sum().item() == pytest.approx(1, rel=1e-3)


def test_low_precision_products_follow_autocast() -> None:
    parameters = leaves(log_parameters(random_hmm(16, 20, seed=9), torch.float32))
    evidence = Evidence(torch.randint(0, 20, (4, 30), generator=torch.Generator().manual_seed(2)))
    exact = scan(parameters, evidence).log_likelihood
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = scan(parameters, evidence).log_likelihood
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
    torch.autograd.grad(rough.sum(), parameters)


def test_an_unknown_implementation_is_named() -> None:
    parameters, evidence = make_problem(2, 3, 1, 2)
    with pytest.raises(InputError, match="scan: unknown impl 'torch': use auto, naive, scaled or triton"):
        scan(parameters, evidence, "torch")  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ["scaled", "compiled"])
def test_a_carry_below_the_floor_may_be_the_only_explanation(impl: Impl) -> None:
    if impl == "compiled" and not installed("numba"):
        pytest.skip("numba is not installed")
    never = NEG_INF
    transition = torch.tensor([[0.0, never], [0.0, -60.0]])
    emission = torch.tensor([[0.0, never], [never, 0.0]])  # state 1 alone emits word 1, and only state 1 leads to it
    parameters = Parameters(torch.tensor([0.0, never]), transition, emission)
    carry = torch.tensor([[1.0, 2e-39]], dtype=torch.float64).log()
    result = scan(parameters, Evidence(torch.tensor([[1]]), None, carry), impl)
    torch.testing.assert_close(result.log_likelihood, torch.tensor([math.log(2e-39) - 60]))
    torch.testing.assert_close(result.carry.log_probs.exp(), torch.tensor([[0.0, 1.0]], dtype=torch.float64))


@pytest.mark.parametrize("impl", RECURSIONS)
def test_a_path_of_many_small_factors_is_not_impossible(impl: Impl) -> None:
    """A start, two emissions and the transition between them underflow: so would the product of two in the bound."""
    never = NEG_INF
    transition = torch.full((4, 4), never).fill_diagonal_(0.0)
    transition[1, 2] = -50.0
    # The other two states emit both words best, and cannot explain the text.
    emission = torch.tensor([[0.0, never], [-50.0, never], [0.0, -50.0], [never, 0.0]])
    parameters = Parameters(torch.tensor([0.0, -50.0, never, never]), transition, emission)
    result = scan(parameters, Evidence(torch.tensor([[0, 1]])), impl)
    torch.testing.assert_close(result.log_likelihood, torch.tensor([-200.0]))


@pytest.mark.parametrize("impl", RECURSIONS)
def test_a_missing_token_may_be_emitted_by_states_that_emit_no_first_word(impl: Impl) -> None:
    """The second state underflows before the missing token, and explains the words after it."""
    parameters = sticky(-90.0, -25.0)
    never = torch.full((2, 1), NEG_INF, dtype=torch.float64)
    parameters = parameters._replace(log_emission=torch.cat([never, parameters.log_emission], 1))
    assert_agrees(parameters, Evidence(torch.tensor([[1] * 4 + [-1] + [2] * 10])), impl)


# --- compiled loops ---


def test_compiled_loops_name_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, evidence = log_parameters(random_hmm(3, 4, seed=1)), Evidence(torch.tensor([[0, 1]]))
    monkeypatch.setattr(api, "installed", lambda name: False)
    with pytest.raises(InputError, match=r"needs numba, which the extra hmmlm\[fast\] installs"):
        scan(parameters, evidence, "compiled")
    assert "needs numba" in api.refusal(parameters, evidence, torch.float64, "compiled")
    assert not api.path_loops_pay(3, 2, torch.device("cpu"))


def test_a_numba_that_cannot_be_imported_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.4 or less")

    monkeypatch.setattr(api, "installed", lambda name: True)
    monkeypatch.setattr(api, "import_module", refuse)
    api._importable.cache_clear()
    try:
        parameters, evidence = log_parameters(random_hmm(3, 4, seed=1)), Evidence(torch.tensor([[0, 1]]))
        assert api.refusal(parameters, evidence, torch.float64, "compiled") == "cannot import numba"
        assert not api.path_loops_pay(3, 2, torch.device("cpu"))
        assert bool(scan(parameters, evidence).log_likelihood.isfinite().all())
    finally:
        api._importable.cache_clear()


@pytest.mark.skipif(not installed("numba"), reason="numba is not installed")
def test_compiled_loops_refuse_tokens_outside_the_vocabulary() -> None:
    parameters = log_parameters(random_hmm(3, 4, seed=1))
    for token in (-2, 4, 10**9):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            scan(parameters, Evidence(torch.tensor([[0, token]])), "compiled")


@pytest.mark.skipif(not installed("numba"), reason="numba is not installed")
def test_compiled_loops_run_more_sequences_than_a_tile_and_their_best_paths() -> None:
    rng = torch.Generator().manual_seed(0)
    start, transition, emission = random_hmm(11, 13, seed=2, zeros=0.2)
    tokens = torch.randint(-1, 13, (150, 37), generator=rng)
    lengths = torch.randint(1, 38, (150,), generator=rng)
    ours, theirs = (HMM.from_probs(start, transition, emission, impl=impl) for impl in ("compiled", "scaled"))
    torch.testing.assert_close(ours.log_likelihood(tokens, lengths), theirs.log_likelihood(tokens, lengths))
    for got, want in zip(ours.expected_counts(tokens, lengths), theirs.expected_counts(tokens, lengths), strict=True):
        torch.testing.assert_close(got, want)
    possible = ours.log_likelihood(tokens, lengths).isfinite()
    best, wanted = (hmm.viterbi(tokens[possible], lengths[possible]) for hmm in (ours, theirs))
    torch.testing.assert_close(best[1], wanted[1])
    assert bool((best[0] == wanted[0]).all()) and int(possible.sum()) > 70


@pytest.mark.skipif(not installed("numba"), reason="numba is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("states", [7, 8, 16, 33])  # below, at and beyond whole vectors
def test_compiled_loops_of_padded_rows_agree_with_log_space(states: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(states)
    given = log_parameters(random_hmm(states, 12, seed=states, zeros=0.1))
    tokens, lengths = torch.randint(-1, 12, (19, 9), generator=rng), torch.randint(1, 10, (19,), generator=rng)
    carried, restart = torch.rand(19, states, generator=rng), torch.rand(19, 9, generator=rng) < 0.1
    found = []
    impl: Impl
    for impl, wanted in (("compiled", dtype), ("naive", torch.float64)):  # type: ignore[assignment]
        inputs = leaves(given, wanted)
        result = scan(inputs, Evidence(tokens, lengths, carried.double().log_softmax(1), restart), impl)
        possible = result.log_likelihood.isfinite()
        gradients = torch.autograd.grad(result.log_likelihood[possible].sum(), inputs)
        found.append([result.log_likelihood.detach()[possible], result.carry.log_probs.exp()[possible], *gradients])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want.double(), **CLOSE[dtype])
