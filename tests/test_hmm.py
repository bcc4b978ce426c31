"""The HMM's contract: every query against enumeration of all paths, and every bad input against its message."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Enumeration, random_hmm

import hmmlm
from hmmlm import HMM

CASES = [[2], [0, 3, 1, 1], [1, -1, 0, -1], [-1], [3, 2, 2, 0, 1]]


@pytest.fixture(params=["naive", "torch"])
def hmm(request: pytest.FixtureRequest) -> HMM:
    return HMM.from_probs(*random_hmm(3, 4, seed=11), impl=request.param)


def every(hmm: HMM, tokens: list[int]) -> Enumeration:
    return Enumeration(*(p.exp() for p in hmm.parameters), tokens)


@pytest.mark.parametrize("tokens", CASES)
def test_queries_agree_with_enumeration(hmm: HMM, tokens: list[int]) -> None:
    batch, oracle = torch.tensor([tokens]), every(hmm, tokens)
    assert hmm.log_likelihood(batch).item() == pytest.approx(oracle.log_likelihood(), rel=1e-10)
    torch.testing.assert_close(hmm.posterior(batch)[0], oracle.posterior())
    assert hmm.entropy(batch).item() == pytest.approx(oracle.entropy(), abs=1e-10)
    states, log_prob = hmm.viterbi(batch)
    assert log_prob.item() == pytest.approx(oracle.best(), rel=1e-10)
    assert math.log(oracle.probability(tuple(states[0].tolist())) * oracle.total) == pytest.approx(log_prob.item())
    counts = hmm.expected_counts(batch)
    for mine, theirs in zip(counts[:3], oracle.counts(4), strict=True):
        torch.testing.assert_close(mine, theirs)
    filtered = hmm.filter(batch)
    for t in range(len(tokens)):
        torch.testing.assert_close(filtered.probs[0, t], every(hmm, tokens[: t + 1]).posterior()[-1])
    torch.testing.assert_close(filtered.final[0], filtered.probs[0, -1])


@pytest.mark.parametrize("tokens", CASES)
def test_next_token_and_infill_agree_with_enumeration(hmm: HMM, tokens: list[int]) -> None:
    following, filled = hmm.next_token(torch.tensor([tokens]))[0], hmm.infill(torch.tensor([tokens]))[0]
    whole = every(hmm, tokens).total
    for word in range(4):
        assert following[word].exp().item() == pytest.approx(every(hmm, [*tokens, word]).total / whole, rel=1e-10)
    for t in range(len(tokens)):
        others = every(hmm, [-1 if s == t else x for s, x in enumerate(tokens)]).total
        for word in range(4):
            completed = every(hmm, [word if s == t else x for s, x in enumerate(tokens)]).total
            assert filled[t, word].exp().item() == pytest.approx(completed / others, rel=1e-10)


def test_ragged_batches_answer_like_each_sequence_alone(hmm: HMM) -> None:
    lengths = torch.tensor([len(case) for case in CASES])
    tokens = torch.full((len(CASES), 6), 3)  # padding that would matter if it were read
    for row, case in enumerate(CASES):
        tokens[row, : len(case)] = torch.tensor(case)
    posterior, infill, (states, best) = hmm.posterior(tokens, lengths), hmm.infill(tokens, lengths), hmm.viterbi(
        tokens, lengths)
    filtered, entropy = hmm.filter(tokens, lengths), hmm.entropy(tokens, lengths)
    following = hmm.next_token(tokens, lengths)
    total = [torch.zeros(()), torch.zeros(()), torch.zeros(())]
    for row, case in enumerate(CASES):
        alone, n = torch.tensor([case]), len(case)
        torch.testing.assert_close(hmm.log_likelihood(tokens, lengths)[row], hmm.log_likelihood(alone)[0])
        torch.testing.assert_close(posterior[row, :n], hmm.posterior(alone)[0])
        torch.testing.assert_close(infill[row, :n], hmm.infill(alone)[0])
        torch.testing.assert_close(filtered.probs[row, :n], hmm.filter(alone).probs[0])
        torch.testing.assert_close(filtered.final[row], hmm.filter(alone).final[0])
        torch.testing.assert_close(entropy[row], hmm.entropy(alone)[0])
        torch.testing.assert_close(best[row], hmm.viterbi(alone)[1][0])
        torch.testing.assert_close(following[row], hmm.next_token(alone)[0])
        assert states[row, :n].tolist() == hmm.viterbi(alone)[0][0].tolist()
        assert bool((posterior[row, n:] == 0).all()) and bool((states[row, n:] == -1).all())
        total = [a + b for a, b in zip(total, hmm.expected_counts(alone)[:3], strict=True)]
    for mine, theirs in zip(hmm.expected_counts(tokens, lengths)[:3], total, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_carried_filter_is_the_filter_of_the_whole(hmm: HMM) -> None:
    tokens = torch.tensor([[0, 3, 1, 1, 2, 0], [1, 1, -1, 2, 3, 3]])
    whole, first = hmm.filter(tokens), hmm.filter(tokens[:, :4])
    second = hmm.filter(tokens[:, 4:], initial=first.final)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(torch.cat([first.probs, second.probs], 1), whole.probs)


def test_posterior_sample_follows_the_posterior(hmm: HMM) -> None:
    tokens, lengths = torch.tensor([[0, 3, -1, 1], [2, 1, 0, 0]]), torch.tensor([4, 2])
    draws = hmm.posterior_sample(tokens, lengths, num=20_000, generator=torch.Generator().manual_seed(0))
    assert draws.shape == (20_000, 2, 4)
    assert bool((draws[:, 1, 2:] == -1).all())
    for row, case in enumerate(([0, 3, -1, 1], [2, 1])):
        oracle = every(hmm, case)
        seen: dict[tuple[int, ...], int] = {}
        for path in draws[:, row, : len(case)].tolist():
            seen[tuple(path)] = seen.get(tuple(path), 0) + 1
        for path in oracle.paths:
            p = oracle.probability(path)
            assert seen.get(path, 0) / 20_000 == pytest.approx(p, abs=5 * math.sqrt(p / 20_000) + 1e-4)


def test_sample_follows_the_model(hmm: HMM) -> None:
    tokens, states = hmm.sample(20_000, 3, generator=torch.Generator().manual_seed(1))
    assert tokens.shape == states.shape == (20_000, 3)
    start, transition, emission = (p.exp() for p in hmm.parameters)
    marginal = start
    for t in range(3):
        torch.testing.assert_close(torch.bincount(states[:, t], minlength=3) / 20_000, marginal.float(), atol=0.02,
                                   rtol=0)
        torch.testing.assert_close(torch.bincount(tokens[:, t], minlength=4) / 20_000,
                                   (marginal @ emission).float(), atol=0.02, rtol=0)
        marginal = marginal @ transition
    again, _ = hmm.sample(20_000, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(tokens, again)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), states=st.integers(1, 12), words=st.integers(1, 9), length=st.integers(1, 12))
def test_conditionals_are_probabilities(seed: int, states: int, words: int, length: int) -> None:
    hmm = HMM.from_probs(*random_hmm(states, words, seed, sharpness=4.0)).to(torch.float32)
    tokens = torch.randint(-1, words, (2, length), generator=torch.Generator().manual_seed(seed))
    for log_probs in (hmm.next_token(tokens), hmm.infill(tokens)):
        totals = log_probs.exp().sum(-1)
        torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-4, rtol=0)
    totals = hmm.posterior(tokens).sum(-1)
    torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-4, rtol=0)
    states_path, log_prob = hmm.viterbi(tokens)
    reference, reference_prob = HMM(*hmm.parameters, impl="naive").viterbi(tokens)
    torch.testing.assert_close(log_prob, reference_prob, atol=1e-4, rtol=1e-4)
    assert states_path.shape == reference.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_query_survives_emissions_of_1e_300(dtype: torch.dtype) -> None:
    tiny = -690.0  # log 1e-300
    log_emission = torch.tensor([[0.0, tiny, tiny], [tiny, 0.0, tiny]], dtype=dtype)
    half = torch.full((2,), 0.5, dtype=dtype).log()
    hmm = HMM(half, torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=dtype).log(), log_emission)
    tokens = torch.tensor([[0, 1, 2, 0, 2], [2, 2, 2, 2, 2]])
    expected = HMM(*(p.double() for p in hmm.parameters), impl="naive")
    for name in ("log_likelihood", "posterior", "entropy", "next_token", "infill"):
        got, want = getattr(hmm, name)(tokens), getattr(expected, name)(tokens)
        assert not bool(got.isnan().any()), name
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(hmm.viterbi(tokens)[1].double(), expected.viterbi(tokens)[1], rtol=1e-5, atol=1e-3)


def test_infill_at_a_token_that_only_improbable_states_emit() -> None:
    """Leaving the token out changes the posterior beyond what scaled probabilities can hold."""
    log_emission = torch.tensor([[0.0, -200.0], [-200.0, 0.0]])
    log_transition = torch.tensor([[0.0, -150.0], [-150.0, 0.0]])
    hmm = HMM(torch.tensor([0.5, 0.5]).log(), log_transition, log_emission)
    tokens = torch.tensor([[0, 0, 1, 0, 0]])
    expected = HMM(*(p.double() for p in hmm.parameters), impl="naive").infill(tokens)
    torch.testing.assert_close(hmm.infill(tokens).double(), expected, rtol=1e-4, atol=1e-3)


def test_a_long_sequence_in_float32() -> None:
    hmm = HMM.from_probs(*random_hmm(4, 5, seed=13)).to(torch.float32)
    tokens = torch.randint(0, 5, (1, 20_000), generator=torch.Generator().manual_seed(3))
    states, log_prob = hmm.viterbi(tokens)
    wide_states, wide_prob = hmm.to(torch.float64).viterbi(tokens)
    assert log_prob.item() == pytest.approx(wide_prob.item(), rel=1e-6)
    assert (states == wide_states).double().mean().item() > 0.999
    totals = hmm.posterior(tokens).sum(-1)
    torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-3, rtol=0)
    assert bool(hmm.entropy(tokens).isfinite().all())


def impossible_hmm() -> HMM:
    """Word 2 cannot follow word 0."""
    return HMM.from_probs([1.0, 0.0], [[0.5, 0.5], [0.0, 1.0]], [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])


def test_impossible_sequences() -> None:
    hmm = impossible_hmm()
    tokens = torch.tensor([[1, 1, 0, 0], [1, 0, 2, 0]])
    log_likelihood = hmm.log_likelihood(tokens)
    assert log_likelihood[1] == -math.inf and math.isfinite(log_likelihood[0])
    for query in (hmm.posterior, hmm.viterbi, hmm.posterior_sample, hmm.entropy, hmm.infill, hmm.next_token):
        with pytest.raises(ValueError, match=r"sequence 1 .*token 2 at position 2 "):
            query(tokens)
    counts = hmm.expected_counts(tokens)
    for mine, alone in zip(counts[:3], hmm.expected_counts(tokens[:1])[:3], strict=True):
        torch.testing.assert_close(mine, alone)


def test_gradients_are_there_only_when_asked_for() -> None:
    hmm = HMM.from_probs(*random_hmm(3, 4, seed=14))
    tokens = torch.tensor([[0, 1, 2]])
    assert not hmm.log_likelihood(tokens).requires_grad
    learnt = HMM(*(p.clone().requires_grad_() for p in hmm.parameters))
    assert learnt.log_likelihood(tokens).requires_grad and learnt.filter(tokens).log_likelihood.requires_grad
    assert not learnt.posterior(tokens).requires_grad and not learnt.filter(tokens).final.requires_grad
    with torch.no_grad():
        assert not learnt.log_likelihood(tokens).requires_grad


def test_from_probs_takes_lists_arrays_and_tensors() -> None:
    start, transition, emission = random_hmm(2, 3, seed=15)
    tokens = torch.tensor([[0, 2, 1]])
    reference = HMM.from_probs(start, transition, emission).log_likelihood(tokens)
    for form in (np.asarray, lambda p: p.tolist(), lambda p: p.float()):
        hmm = HMM.from_probs(form(start), form(transition), form(emission))
        torch.testing.assert_close(hmm.log_likelihood(tokens).double(), reference, rtol=1e-5, atol=0)


START, TRANSITION, EMISSION = [0.5, 0.5], [[0.5, 0.5], [0.5, 0.5]], [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]


@pytest.mark.parametrize(("arguments", "message"), [
    (([0.5, 0.4], TRANSITION, EMISSION), r"start sums to 0\.9.*normalise"),
    ((START, [[0.5, 0.5], [0.5, 0.6]], EMISSION), r"transition row 1 sums to 1\.1"),
    ((START, TRANSITION, [[0.1, 0.2, 0.7], [0.3, 0.3, 0.3]]), r"emission row 1 sums to 0\.9"),
    (([1.5, -0.5], TRANSITION, EMISSION), r"start contains negative"),
    (([math.nan, 1.0], TRANSITION, EMISSION), r"start contains .*NaN"),
    ((START, [[1.0], [1.0]], EMISSION), r"log_transition must have shape \[2, 2\], not \[2, 1\]"),
    ((START, TRANSITION, [[1.0]]), r"log_emission must have shape \[2, words\], not \[1, 1\]"),
    (([[0.5, 0.5]], TRANSITION, EMISSION), r"log_start must have shape \[states\]"),
    ((START, [[0.5, 0.5], [0.5]], EMISSION), r"transition must be a tensor, an array or equally long lists"),
])
def test_bad_parameters_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(hmmlm.InputError, match=message):
        HMM.from_probs(*arguments)


@pytest.mark.parametrize(("tokens", "lengths", "message"), [
    ([[0, 1, 3]], None, r"token 3 in sequence 0 at position 2 is outside the vocabulary of size 3"),
    ([[0, -2, 1]], None, r"token -2 in sequence 0 at position 1"),
    ([[0.0, 1.0]], None, r"tokens must be integers, not float32"),
    ([0, 1, 2], None, r"shape \[sequences, positions\], not \[3\]; for one sequence use tokens\[None\]"),
    ([[]], None, r"empty"),
    ([[0, 1]], [3], r"length 3 of sequence 0 is not between 1 and 2"),
    ([[0, 1]], [0], r"length 0 of sequence 0"),
    ([[0, 1]], [1, 1], r"lengths must have shape \[1\], one a sequence, not \[2\]"),
    ([[0, 1]], [1.0], r"lengths must be integers"),
])
def test_bad_tokens_are_named(tokens: list, lengths: list | None, message: str) -> None:
    hmm = HMM.from_probs(START, TRANSITION, EMISSION)
    with pytest.raises(hmmlm.InputError, match=message):
        hmm.log_likelihood(torch.tensor(tokens), None if lengths is None else torch.tensor(lengths))


def test_bad_initial_and_mixed_dtypes_are_named() -> None:
    hmm = HMM.from_probs(START, TRANSITION, EMISSION)
    with pytest.raises(hmmlm.InputError, match=r"initial must have shape \[1, 2\], not \[2\]"):
        hmm.filter(torch.tensor([[0, 1]]), initial=torch.tensor([0.5, 0.5]))
    with pytest.raises(hmmlm.InputError, match="share one dtype"):
        HMM(hmm.log_start.double(), hmm.log_transition, hmm.log_emission)
    with pytest.raises(hmmlm.InputError, match="from_probs takes arrays"):
        HMM(np.zeros(2), hmm.log_transition, hmm.log_emission)  # type: ignore[arg-type]


TINY = [[1.0, 1e-300], [1.0, 1e-300]]


@pytest.mark.parametrize(("arguments", "dtype"), [
    (([1, 0], TRANSITION, TINY), torch.float32),
    ((np.array([1.0, 0.0]), TRANSITION, TINY), torch.float64),
    (([1, 0], torch.tensor(TRANSITION), TINY), torch.float32),
    (([1, 0], TRANSITION, np.array(TINY)), torch.float64),
    (([1, 0], np.array(TRANSITION, dtype=np.float32), TINY), torch.float32),
])
def test_probabilities_below_float32_in_lists_and_arrays_are_not_zero(arguments: tuple, dtype: torch.dtype) -> None:
    hmm = HMM.from_probs(*arguments)
    assert hmm.dtype == dtype
    want = torch.tensor([2 * math.log(1e-300)], dtype=dtype)
    torch.testing.assert_close(hmm.log_likelihood([[1, 0, 1]]), want)


def test_mixed_lists_keep_their_digits_and_tensors_their_own() -> None:
    third = [[1 / 3, 2 / 3], [2 / 3, 1 / 3]]
    hmm = HMM.from_probs(torch.tensor([0.5, 0.5]), third, np.array(third))
    assert torch.equal(hmm.log_transition, torch.tensor(third, dtype=torch.float64).log())
    assert torch.equal(hmm.log_start, torch.tensor([0.5, 0.5]).log().double())
    narrow = HMM.from_probs(*(torch.tensor(p) for p in ([0.5, 0.5], third, third)))
    assert torch.equal(narrow.log_transition, torch.tensor(third).log())
    carried = hmm.filter([[0]], initial=[[1 / 3, 2 / 3]]).probs
    assert torch.equal(carried, hmm.filter([[0]], initial=torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64)).probs)


@pytest.mark.parametrize("tokens", [[[]], [], torch.zeros(0, 3, dtype=torch.int64), np.zeros((2, 0))])
def test_no_tokens_are_called_empty(tokens: object) -> None:
    with pytest.raises(hmmlm.InputError, match=r"tokens of shape \[.*\] are empty: at least one token is needed"):
        HMM.from_probs(START, TRANSITION, EMISSION).log_likelihood(tokens)  # type: ignore[arg-type]


def test_the_constructor_leaves_checking_to_validate() -> None:
    hmm = HMM(torch.zeros(2), torch.tensor(TRANSITION).log(), torch.tensor(EMISSION).log())
    with pytest.raises(hmmlm.InputError, match="start sums to 2"):
        hmm.validate()
