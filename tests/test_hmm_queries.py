"""The queries of both kinds of HMM against enumeration of all paths, and against log space for long sequences."""

import itertools
import math

import pytest
import torch
from helpers.dense_scan import sticky
from helpers.memory import LargestTensor
from helpers.oracle import Enumeration, by_state, matrices, random_blocked_hmm, random_hmm, single_block, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hmmlm.emissions import blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry, products
from hmmlm.hmm.recursions import run_messages
from hmmlm.numerics import logmatrix, semirings
from hmmlm.ops.scan import Evidence, Parameters, naive
from hmmlm.transitions import base, factored, tiled, tiles

NEG_INF = -math.inf
KINDS = ["dense", "dense, one state", "blocked", "blocked, one block", "blocked, one state per block"]
DTYPES = [torch.float32, torch.float64]
CLOSE = {torch.float32: {"rtol": 1e-3, "atol": 3e-4}, torch.float64: {"rtol": 1e-9, "atol": 1e-10}}


def make_hmm(
    kind: str, dtype: torch.dtype = torch.float64, seed: int = 11, sharpness: float = 1.0, zeros: float = 0.0
) -> HMM:
    """Return an HMM over five words; transitions of a blocked one are never zero."""
    if kind == "dense":
        hmm = HMM.from_probs(*random_hmm(4, 5, seed, sharpness, zeros))
    elif kind == "dense, one state":
        hmm = HMM.from_probs(*random_hmm(1, 5, seed, sharpness, zeros))
    elif kind == "blocked":
        hmm = random_blocked_hmm(2, 2, 5, seed, sharpness, zeros)
    elif kind == "blocked, one block":
        start, _, emission = random_hmm(3, 5, seed, sharpness, zeros)
        hmm = single_block(HMM.from_probs(start, random_hmm(3, 5, seed + 1, sharpness)[1], emission))
    else:
        hmm = random_blocked_hmm(3, 1, 5, seed, sharpness, zeros)
    return hmm.to(dtype)


def possible_tokens(hmm: HMM, batch: int, steps: int, seed: int, missing: float) -> Tensor:
    """Return tokens [batch, steps] drawn from the model, a fraction of them then missing."""
    generator = torch.Generator().manual_seed(seed)
    tokens, _ = hmm.sample(batch, steps, generator)
    return tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < missing, -1)


def twin(hmm: HMM) -> HMM:
    """Return the same model as a dense one in float64."""
    return HMM(*matrices(hmm.to(torch.float64)), impl="naive")


def dense_counts(hmm: HMM, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the expected counts as a vector and two matrices, and the log-likelihood."""
    start, transition, emission, log_likelihood = hmm.expected_counts(tokens, lengths)
    return start, transition.to_dense(), by_state(hmm.emission, emission), log_likelihood


def assert_queries_agree(hmm: HMM, tokens: Tensor, lengths: Tensor | None = None) -> None:
    """Compare every query of a batch of possible sequences with the enumeration of each alone."""
    reference, close = twin(hmm), CLOSE[hmm.dtype]
    sizes = [tokens.shape[1]] * len(tokens) if lengths is None else lengths.tolist()
    log_likelihood, entropy = hmm.log_likelihood(tokens, lengths), hmm.entropy(tokens, lengths)
    posterior, infill, filtered = (query(tokens, lengths) for query in (hmm.posterior, hmm.infill, hmm.filter))
    states, best = hmm.viterbi(tokens, lengths)
    following = hmm.next_token(tokens, lengths)
    counts = [torch.zeros_like(p) for p in matrices(reference)]

    def assert_close(got: Tensor, want: Tensor, what: str) -> None:
        torch.testing.assert_close(got.double(), want, **close, msg=lambda m: f"{what} of sequence {row}: {m}")

    for row, size in enumerate(sizes):
        oracle = Enumeration(reference, tokens[row, :size].tolist())
        assert_close(log_likelihood[row], oracle.log_likelihood(), "log_likelihood")
        assert_close(filtered.log_likelihood[row], oracle.log_likelihood(), "filter().log_likelihood")
        assert_close(filtered.probs[row, :size], oracle.filtered(), "filter().probs")
        assert_close(filtered.carry.log_probs[row].exp(), oracle.filtered()[-1], "filter().carry")
        assert_close(posterior[row, :size], oracle.posterior(), "posterior")
        assert_close(entropy[row], oracle.entropy(), "entropy")
        assert_close(best[row], oracle.best(), "log-probability of viterbi")
        assert_close(best[row], oracle.log_joint_of(states[row, :size].tolist()), "path of viterbi")
        assert_close(following[row], oracle.next_token(), "next_token")
        assert_close(infill[row, :size], oracle.infill(), "infill")
        counts = [total + own for total, own in zip(counts, oracle.counts(), strict=True)]
        for beyond, fill in ((posterior, 0.0), (filtered.probs, 0.0), (infill, NEG_INF), (states, -1)):
            assert bool((beyond[row, size:] == fill).all())
    row = -1  # all
    for got, want in zip(dense_counts(hmm, tokens, lengths)[:3], counts, strict=True):
        assert_close(got, want, "expected_counts")


# --- against enumeration ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sharpness", "zeros"), [(1.0, 0.0), (1.0, 0.4), (30.0, 0.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_agree_with_enumeration(kind: str, sharpness: float, zeros: float, dtype: torch.dtype) -> None:
    hmm = make_hmm(kind, dtype, sharpness=sharpness, zeros=zeros)
    assert_queries_agree(hmm, possible_tokens(hmm, 3, 4, 0, missing=0.0))
    assert_queries_agree(hmm, possible_tokens(hmm, 2, 1, 1, missing=0.0))  # a single token
    assert_queries_agree(hmm, torch.tensor([[-1], [-1]]))
    tokens, lengths = possible_tokens(hmm, 5, 5, 2, missing=0.4), torch.tensor([3, 5, 1, 5, 2])
    outside = torch.arange(5) >= lengths[:, None]
    assert_queries_agree(hmm, tokens.masked_fill(outside, 3), lengths)  # padding would matter if it were read


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 4),
    steps=st.integers(1, 5),
    zeros=st.sampled_from([0.0, 0.4]),
    sharpness=st.sampled_from([1.0, 8.0, 60.0]),
    dtype=st.sampled_from(DTYPES),
    ragged=st.booleans(),
    missing=st.sampled_from([0.0, 0.5]),
)
def test_queries_of_random_models_agree_with_enumeration(
    seed: int,
    kind: str,
    batch: int,
    steps: int,
    zeros: float,
    sharpness: float,
    dtype: torch.dtype,
    ragged: bool,
    missing: float,
) -> None:
    hmm = make_hmm(kind, dtype, seed, sharpness, zeros)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, steps + 1, (batch,), generator=generator) if ragged else None
    assert_queries_agree(hmm, possible_tokens(hmm, batch, steps, seed, missing), lengths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_infill_blanks_agrees_with_enumeration(kind: str, dtype: torch.dtype) -> None:
    hmm = make_hmm(kind, dtype, zeros=0.2)
    tokens = possible_tokens(hmm, 1, 4, 3, missing=0.0)[0].tolist()
    tokens[1] = tokens[3] = -1
    words = [word for word in range(5) if word != 2]
    expected = torch.full((2, 5), NEG_INF, dtype=torch.float64)
    for choice in itertools.product(words, repeat=2):
        filled = [tokens[0], choice[0], tokens[2], choice[1]]
        score = Enumeration(twin(hmm), filled).log_likelihood()
        for blank, word in enumerate(choice):
            expected[blank, word] = torch.logaddexp(expected[blank, word], score)
    found = hmm.infill_blanks([tokens], 2).double()
    torch.testing.assert_close(found, expected.log_softmax(1), **CLOSE[dtype])
    assert hmm.infill_blanks([filled], 2).shape == (0, 5)
    with pytest.raises(InputError, match="takes one sequence, not 2"):
        hmm.infill_blanks([tokens, tokens], 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_advancing_by_one_token_agrees_with_enumeration(kind: str, dtype: torch.dtype) -> None:
    """−1 is a missing token: the distribution moves one step without evidence."""
    hmm, read = make_hmm(kind, dtype), list[int]()
    log_state = hmm.begin()
    for token in (1, -1, 4, 0):
        log_state = hmm.advance(log_state, token)
        read.append(token)
        torch.testing.assert_close(
            hmm.emit(log_state).double(), Enumeration(twin(hmm), read).next_token(), **CLOSE[dtype]
        )
        some = torch.tensor([3, 0])
        torch.testing.assert_close(hmm.emit(log_state, some), hmm.emit(log_state)[some])
    with pytest.raises(InputError, match="token 5 "):
        hmm.advance(log_state, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_filter_continues_from_an_initial_distribution(kind: str, dtype: torch.dtype) -> None:
    hmm = make_hmm(kind, dtype)
    tokens, lengths = torch.tensor([[0, 3, -1], [1, 1, 2]]), torch.tensor([3, 2])
    initial = torch.rand(2, hmm.states, generator=torch.Generator().manual_seed(0)).softmax(1)
    found = hmm.filter(tokens, lengths, Carry(initial.double().log()))
    for row, size in enumerate(lengths.tolist()):
        oracle = Enumeration(twin(hmm), tokens[row, :size].tolist(), initial[row])
        torch.testing.assert_close(found.log_likelihood[row].double(), oracle.log_likelihood(), **CLOSE[dtype])
        torch.testing.assert_close(found.probs[row, :size].double(), oracle.filtered(), **CLOSE[dtype])
    whole, first = hmm.filter(tokens), hmm.filter(tokens[:, :2])
    second = hmm.filter(tokens[:, 2:], carry=first.carry)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(torch.cat([first.probs, second.probs], 1), whole.probs)


# --- against log space, for sequences too long to enumerate ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_queries_of_long_sequences_agree_with_log_space(kind: str, sharpness: float, dtype: torch.dtype) -> None:
    hmm: HMM = random_blocked_hmm(3, 4, 20, 5, sharpness).to(dtype)
    hmm = hmm.dense() if kind == "dense" else hmm
    tokens, lengths = possible_tokens(hmm, 4, 50, 5, missing=0.1), torch.tensor([50, 7, 1, 33])
    parameters, evidence = matrices(twin(hmm)), Evidence(tokens, lengths)
    alpha, beta = naive.forward(parameters, evidence), naive.backward(parameters, evidence)
    inside = (torch.arange(50) < lengths[:, None])[..., None]

    def assert_close(got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got.to_dense().double(), want, rtol=1e-3, atol=1e-3)

    log_likelihood = naive.log_likelihood(parameters, evidence)
    assert_close(hmm.log_likelihood(tokens, lengths), log_likelihood)
    assert_close(hmm.posterior(tokens, lengths), torch.where(inside, (alpha + beta).softmax(2), 0.0))
    assert_close(hmm.filter(tokens, lengths).probs, torch.where(inside, alpha.softmax(2), 0.0))
    for got, want in zip(
        dense_counts(hmm, tokens, lengths)[:3],
        naive.expected_counts(parameters, evidence, torch.ones(4, dtype=torch.float64)),
        strict=True,
    ):
        assert_close(got, want)
    for row in range(4):  # H(z | x) = log p(x) − E log p(x, z)
        counts = naive.expected_counts(parameters, evidence.rows(torch.tensor([row])), torch.ones(1).double())
        expected = sum((torch.where(n > 0, n * p, 0.0)).sum() for n, p in zip(counts, parameters, strict=False))
        assert_close(hmm.entropy(tokens, lengths)[row], log_likelihood[row] - expected)
    path, log_prob = hmm.viterbi(tokens, lengths)
    assert torch.equal(path >= 0, inside[..., 0])
    assert_close(log_prob, torch.stack([best_log_joint(parameters, tokens[b, :n]) for b, n in enumerate(lengths)]))
    scores = twin(hmm).joint_scan(tokens.masked_fill(~inside[..., 0], -1), path, lengths)
    assert_close(log_prob, scores.log_likelihood)


def best_log_joint(parameters: Parameters, tokens: Tensor) -> Tensor:
    """Return the joint log-probability of the most likely path of one sequence."""
    scores = naive.emission_scores(parameters.log_emission, tokens[None])[0]
    best = parameters.log_start + scores[0]
    for score in scores[1:]:
        best = (best[:, None] + parameters.log_transition).amax(0) + score
    return best.max()


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


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), states=st.integers(1, 12), words=st.integers(1, 9), length=st.integers(1, 12))
def test_conditionals_are_probabilities(seed: int, states: int, words: int, length: int) -> None:
    dense = HMM.from_probs(*random_hmm(states, words, seed, sharpness=4.0)).to(torch.float32)
    tokens = torch.randint(-1, words, (2, length), generator=torch.Generator().manual_seed(seed))
    for hmm in (dense, single_block(dense)):
        for probs in (hmm.next_token(tokens).exp(), hmm.infill(tokens).exp(), hmm.posterior(tokens)):
            totals = probs.sum(-1)
            torch.testing.assert_close(totals, torch.ones_like(totals), atol=1e-4, rtol=0)


# --- small probabilities ---


def both_kinds(hmm: HMM) -> list[HMM]:
    return [hmm, single_block(hmm)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_query_supports_emissions_of_1e_300(dtype: torch.dtype) -> None:
    tiny = -690.0  # log 1e-300
    log_emission = torch.tensor([[0.0, tiny, tiny], [tiny, 0.0, tiny]], dtype=dtype)
    half = torch.full((2,), 0.5, dtype=dtype).log()
    dense = HMM(half, torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=dtype).log(), log_emission)
    for hmm in both_kinds(dense):
        assert_queries_agree(hmm, torch.tensor([[0, 1, 2, 0, 2], [2, 2, 2, 2, 2]]))


def test_next_token_and_infill_of_words_below_the_range_of_float32() -> None:
    """The probability 1e-50 has the logarithm −115, not −inf."""
    start, transition, emission = [1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]], [[1.0, 1e-50], [0.0, 1.0]]
    hmm = HMM.from_probs(start, transition, emission)
    assert hmm.dtype == torch.float32
    want = math.log(1e-50)
    assert hmm.next_token([[0]])[0, 1].item() == pytest.approx(want, rel=1e-5)
    assert hmm.infill([[0, -1]])[0, 1, 1].item() == pytest.approx(want, rel=1e-5)
    assert hmm.infill([[0, 0]])[0, 0, 1].item() == pytest.approx(want, rel=1e-5)


def test_infill_at_a_token_that_only_improbable_states_emit() -> None:
    """Leaving the token out changes the posterior by more than scaled probabilities can represent."""
    log_emission = torch.tensor([[0.0, -200.0], [-200.0, 0.0]])
    log_transition = torch.tensor([[0.0, -150.0], [-150.0, 0.0]])
    dense = HMM(torch.tensor([0.5, 0.5]).log(), log_transition, log_emission)
    for hmm in both_kinds(dense):
        assert_queries_agree(hmm, torch.tensor([[0, 0, 1, 0, 0]]))


def test_infill_does_not_read_the_token_itself() -> None:
    """With the first token left out, both words are equally likely there: the second token is missing."""
    hmm = HMM.from_probs([0.5, 0.5], [[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(hmm.infill([[0, -1]])[0, 0].exp(), torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(hmm.infill([[0, -1]])[0, 1].exp(), torch.tensor([1.0, 0.0]))


# --- impossible sequences ---


def impossible_after(kind: str) -> HMM:
    """Return a model of three words in which word 2 is possible at the beginning only; word 0 never follows it."""
    dense = HMM.from_probs([1.0, 0.0], [[0.5, 0.5], [0.0, 1.0]], [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    if kind == "dense":
        return dense
    # Blocked transitions are never zero, so that here a word is impossible everywhere.
    start, transition, emission = random_hmm(2, 3, seed=1)
    emission[:, 2] = 0
    return single_block(HMM.from_probs(start, transition, emission / emission.sum(1, keepdim=True)))


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_impossible_sequences_are_named(kind: str) -> None:
    hmm = impossible_after(kind)
    tokens = torch.tensor([[1, 1, 0, 0], [1, 0, 2, 0], [1, 0, 2, 2]])
    log_likelihood = hmm.log_likelihood(tokens)
    assert log_likelihood[1:].tolist() == [NEG_INF, NEG_INF] and math.isfinite(log_likelihood[0])
    for query in (hmm.posterior, hmm.viterbi, hmm.posterior_sample, hmm.entropy, hmm.infill, hmm.next_token):
        with pytest.raises(InputError, match=r"sequence 1 .*token 2 at position 2 "):
            query(tokens)
        query(tokens, torch.tensor([4, 2, 1]))  # the impossible token is beyond the length
    # From the longest to the shortest, the third sequence comes first; the message names the first as given.
    with pytest.raises(InputError, match=r"sequence 1 .*token 2 at position 2 "):
        hmm.posterior(tokens, torch.tensor([2, 3, 4]))


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_impossible_sequences_add_nothing_to_expected_counts(kind: str) -> None:
    hmm = impossible_after(kind)
    tokens, lengths = torch.tensor([[1, 1, 0, 0], [1, 0, 2, 0]]), torch.tensor([3, 4])
    counts, alone = hmm.expected_counts(tokens, lengths), hmm.expected_counts(tokens[:1], lengths[:1])
    for got, want in zip(counts[:3], alone[:3], strict=True):
        torch.testing.assert_close(got.to_dense(), want.to_dense())
    assert counts.log_likelihood == NEG_INF and math.isfinite(alone.log_likelihood)


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_filter_keeps_the_prefix_before_an_impossible_token(kind: str) -> None:
    hmm = impossible_after(kind)
    found, prefix = hmm.filter([[1, 0, 2, 0]]), hmm.filter([[1, 0]])
    torch.testing.assert_close(found.probs[:, :2], prefix.probs)
    assert bool((found.probs[:, 2:] == 0).all()) and bool(found.carry.is_lost.all())
    assert found.log_likelihood.item() == NEG_INF


@pytest.mark.parametrize("tokens", [[[2]], [[0, 2]], [[0, 2, 0]]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_filter_is_zero_from_a_word_that_no_state_emits(tokens: list[list[int]], dtype: torch.dtype) -> None:
    hmm = HMM.from_probs([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4, 0.0], [0.3, 0.7, 0.0]]).to(dtype)
    result = hmm.filter(tokens)
    at = tokens[0].index(2)
    assert bool((result.probs[0, at:] == 0).all()) and bool(result.carry.is_lost.all())
    assert bool((result.probs[0, :at].sum(1) > 0.99).all())
    assert float(result.log_likelihood) == NEG_INF


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_gradients_of_impossible_sequences_with_missing_tokens_are_zero(kind: str) -> None:
    hmm = with_gradients(impossible_after(kind))
    leaves = hmm.parameters()
    log_likelihood = hmm.log_likelihood(torch.tensor([[1, -1, 0, 0], [1, 2, 2, -1], [-1, 0, 2, 0]]))
    assert (log_likelihood[:2] > NEG_INF).tolist() == [True, kind == "dense"] and log_likelihood[2] == NEG_INF
    for gradient in torch.autograd.grad(log_likelihood[2], list(leaves.values()), retain_graph=True):
        assert bool((gradient == 0).all())
    for gradient in torch.autograd.grad(log_likelihood.sum(), list(leaves.values())):
        assert bool(gradient.isfinite().all())


# --- sampling and gradients ---


@pytest.mark.parametrize("kind", KINDS)
def test_posterior_sample_follows_the_posterior(kind: str) -> None:
    hmm = make_hmm(kind)
    tokens, lengths, num = torch.tensor([[0, 3, -1], [2, 1, 0]]), torch.tensor([3, 2]), 10_000
    draws = hmm.posterior_sample(tokens, lengths, num=num, generator=torch.Generator().manual_seed(0))
    assert draws.shape == (num, 2, 3) and bool((draws[:, 1, 2:] == -1).all())
    for row, size in enumerate(lengths.tolist()):
        oracle = Enumeration(twin(hmm), tokens[row, :size].tolist())
        powers = hmm.states ** torch.arange(size - 1, -1, -1)
        seen = torch.bincount((draws[:, row, :size] * powers).sum(1), minlength=len(oracle.paths)) / num
        expected = oracle.probabilities()
        assert bool(((seen - expected).abs() <= 5 * (expected / num).sqrt() + 1e-4).all())


@pytest.mark.parametrize("kind", KINDS)
def test_sample_follows_the_model(kind: str) -> None:
    hmm, num = make_hmm(kind), 10_000
    tokens, states = hmm.sample(num, 3, generator=torch.Generator().manual_seed(1))
    assert tokens.shape == states.shape == (num, 3)
    marginal, transition, emission = (p.exp() for p in matrices(twin(hmm)))
    for t in range(3):
        for drawn, expected in ((states, marginal), (tokens, marginal @ emission)):
            seen = torch.bincount(drawn[:, t], minlength=len(expected)) / num
            torch.testing.assert_close(seen.double(), expected, atol=0.025, rtol=0)
        marginal = marginal @ transition
    assert bool(hmm.joint_scan(tokens, states).log_likelihood.isfinite().all())  # tokens fit their states
    again, _ = hmm.sample(num, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(tokens, again)


@pytest.mark.parametrize("query", ["sample", "posterior_sample"])
def test_numbers_of_samples_are_checked(query: str) -> None:
    hmm = make_hmm("dense")
    ask = (lambda num: hmm.sample(num, 2)) if query == "sample" else (lambda num: hmm.posterior_sample([[0]], num=num))
    with pytest.raises(InputError, match="num must be at least 1, not 0"):
        ask(0)
    with pytest.raises(InputError, match=r"num must be an integer, not 1\.5"):
        ask(1.5)
    with pytest.raises(InputError, match="length must be at least 1, not 0"):
        hmm.sample(1, 0)


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_only_log_likelihoods_have_gradients(kind: str) -> None:
    hmm, tokens = make_hmm(kind), torch.tensor([[0, 1, 2]])
    assert not hmm.log_likelihood(tokens).requires_grad
    learned = with_gradients(hmm)
    assert learned.log_likelihood(tokens).requires_grad and learned.filter(tokens).log_likelihood.requires_grad
    assert not learned.filter(tokens).carry.log_probs.requires_grad and not learned.filter(tokens).probs.requires_grad
    for query in (learned.posterior, learned.entropy, learned.next_token, learned.infill):
        assert not query(tokens).requires_grad
    torch.testing.assert_close(learned.posterior(tokens), learned.detach().posterior(tokens))
    assert not any(count.requires_grad for count in learned.expected_counts(tokens))
    with torch.no_grad():
        assert not learned.log_likelihood(tokens).requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sharpness", "zeros"), [(1.0, 0.0), (4.0, 0.0), (15.0, 0.0), (1.0, 0.3), (90.0, 0.0)])
def test_products_of_probabilities_agree_with_log_space_in_every_cell(
    sharpness: float, zeros: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(products, "_BULK_CELLS", 0)
    monkeypatch.setattr(semirings, "_CACHE_CELLS", 50)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for got, want in zip(fast, results(), strict=True):
        torch.testing.assert_close(got, want, **close)


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
def test_missing_tokens_of_a_blocked_hmm_make_no_matrix_per_sequence(
    query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, states = 16, 64
    hmm = random_blocked_hmm(4, states // 4, 8, seed=0)
    tokens = possible_tokens(hmm, batch, 4, 0, missing=0.5)
    expected = getattr(hmm, query)(tokens)
    for module in (base, factored, tiles, semirings, blocked):
        monkeypatch.setattr(module, "_CELLS", 2**10)
    monkeypatch.setattr(tiled, "TABLE_CELLS", 0)
    with LargestTensor() as largest:
        found = getattr(hmm, query)(tokens)
    torch.testing.assert_close(found, expected)
    assert largest.elements <= batch * states * 4 < batch * states**2
