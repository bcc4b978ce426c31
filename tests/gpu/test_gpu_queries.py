"""Queries of both kinds of HMM on a GPU against the same queries on the CPU."""

from collections.abc import Iterator

import pytest
import torch
from helpers.oracle import matrices, random_blocked_hmm, random_hmm, with_gradients
from torch import Tensor

from hmmlm.constrain.automaton import containing
from hmmlm.constrain.guide import Guide
from hmmlm.constrain.steering import Steering
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm import HMM, Carry
from hmmlm.lm.lm import LanguageModel
from hmmlm.ops import pieces
from hmmlm.scan.composition import parameters_of
from hmmlm.scan.likelihood import joint_scan

WORDS = 30
CLOSE = {torch.float32: {"rtol": 1e-3, "atol": 3e-4}, torch.float64: {"rtol": 1e-8, "atol": 1e-9}}
LENGTHS = torch.tensor([12, 7, 1, 12, 3])


def make_hmm(kind: str, dtype: torch.dtype, sharpness: float = 1.0) -> HMM:
    hmm: HMM = random_blocked_hmm(4, 8, WORDS, seed=1, sharpness=sharpness)
    if kind == "dense":
        hmm = HMM.from_probs(*random_hmm(20, WORDS, seed=1, sharpness=sharpness, zeros=0.2))
    return hmm.to(dtype)


def draw(hmm: HMM, missing: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return tokens and states [5, 12] of the model, some of the tokens missing."""
    generator = torch.Generator().manual_seed(2)
    tokens, states = hmm.sample(5, 12, generator)
    return tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < missing, -1), states


@pytest.mark.parametrize("kind", ["dense", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [1.0, 20.0])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_queries_agree_with_the_cpu(
    kind: str, dtype: torch.dtype, sharpness: float, lengths: Tensor | None, device: torch.device
) -> None:
    hmm = make_hmm(kind, dtype, sharpness)
    there, exact = hmm.to(device), hmm.to(torch.float64)
    tokens, _ = draw(hmm)

    def assert_close(got: Tensor, want: Tensor, what: str) -> None:
        assert got.device.type == device.type and got.dtype == dtype
        got = got.to_dense().double().cpu()
        torch.testing.assert_close(got, want.to_dense(), **CLOSE[dtype], msg=lambda m: f"{what}: {m}")

    for name in ("log_likelihood", "posterior", "entropy", "next_token", "infill"):
        assert_close(getattr(there, name)(tokens, lengths), getattr(exact, name)(tokens, lengths), name)
    initial = torch.rand(5, hmm.num_states, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    for before in (None, Carry(initial.log())):
        found = there.filter(tokens, lengths, None if before is None else before.to(device))
        wanted = exact.filter(tokens, lengths, before)
        assert_close(found.log_likelihood, wanted.log_likelihood, "filter")
        assert_close(found.probs, wanted.probs, "filter")
        torch.testing.assert_close(found.carry.log_probs.cpu(), wanted.carry.log_probs, **CLOSE[dtype])
    for got, want in zip(there.expected_counts(tokens, lengths), exact.expected_counts(tokens, lengths), strict=True):
        assert_close(got, want, "expected_counts")
    path, log_prob = there.viterbi(tokens, lengths)
    assert_close(log_prob, exact.viterbi(tokens, lengths)[1], "viterbi")
    sizes = torch.full((5,), 12) if lengths is None else lengths
    inside = torch.arange(12) < sizes[:, None]
    assert torch.equal(path.cpu() >= 0, inside)
    scored = joint_scan(exact, tokens.masked_fill(~inside, -1), path.cpu(), sizes).log_likelihood
    torch.testing.assert_close(scored, log_prob.double().cpu(), **CLOSE[dtype])


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_samples_on_the_gpu_follow_the_model(kind: str, device: torch.device) -> None:
    hmm, num = make_hmm(kind, torch.float32), 20_000
    there, generator = hmm.to(device), torch.Generator(device).manual_seed(1)
    tokens, states = there.sample(num, 3, generator)
    assert tokens.device.type == states.device.type == device.type
    assert bool(joint_scan(hmm, tokens.cpu(), states.cpu()).log_likelihood.isfinite().all())
    marginal, transition, emission = (p.double().exp() for p in matrices(hmm))
    for t in range(3):
        for drawn, expected in ((states, marginal), (tokens, marginal @ emission)):
            seen = torch.bincount(drawn[:, t].cpu(), minlength=len(expected)) / num
            assert bool(((seen - expected).abs() < 5 * (expected / num).sqrt() + 1e-3).all())
        marginal = marginal @ transition
    given, _ = draw(hmm)
    paths = there.posterior_sample(given, LENGTHS, num_samples=num, generator=generator).cpu()
    posterior = hmm.posterior(given, LENGTHS)
    for row, size in enumerate(LENGTHS.tolist()):
        assert bool((paths[:, row, size:] == -1).all())
        for t in (0, size - 1):
            seen = torch.bincount(paths[:, row, t], minlength=hmm.num_states) / num
            expected = posterior[row, t]
            assert bool(((seen - expected).abs() < 5 * (expected / num).sqrt() + 1e-3).all())


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_scans_agree_with_the_cpu(kind: str, device: torch.device) -> None:
    """Windows with a carry and restarts, P(O) and P(O, S)."""
    hmm = make_hmm(kind, torch.float32)
    there = hmm.to(device)
    tokens, states = draw(hmm, missing=0.0)
    restart = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    for joint in (False, True):
        carries = [None, None]
        for window in (slice(0, 6), slice(6, 12)):
            found = []
            for i, model in enumerate((hmm, there)):
                own = [x[:, window].to(model.device) for x in (tokens, states, restart)]
                if joint:
                    result = joint_scan(model, own[0], own[1], None, carries[i], own[2])
                else:
                    result = model.scan(own[0], None, carries[i], own[2])
                carries[i] = result.carry
                found.append(result)
            want, got = found
            torch.testing.assert_close(got.log_likelihood.cpu(), want.log_likelihood, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                got.carry.log_probs.exp().cpu(), want.carry.log_probs.exp(), rtol=1e-3, atol=1e-5
            )
            assert torch.equal(got.carry.most_likely().cpu(), want.carry.most_likely())


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_gradients_of_the_log_likelihood_agree_with_the_cpu(kind: str, device: torch.device) -> None:
    """With and without missing tokens and lengths: kernels, portable scans and the recursion of the queries."""
    hmm = make_hmm(kind, torch.float32)
    for missing in (0.0, 0.3):
        for lengths in (None, LENGTHS):
            tokens, _ = draw(hmm, missing)
            found = []
            for where, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
                model = with_gradients(hmm.to(where, dtype))
                total, leaves = model.log_likelihood(tokens, lengths).sum(), list(parameters_of(model).values())
                gradients = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
                found.append([g.double().cpu() for g in gradients])
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dense", "blocked"])
def test_guides_and_texts_agree_with_the_cpu(kind: str, device: torch.device) -> None:
    hmm = make_hmm(kind, torch.float64)
    automaton = (containing([3, 4], WORDS) & containing([5], WORDS).complement()).until(0)
    guides = [Guide(model, automaton, 8) for model in (hmm, hmm.to(device))]
    for context in ((), (3,), (7, 3, 4)):
        want, got = (guide.next_token(guide.begin(context)).cpu() for guide in guides)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    for positions in ([()], [(3,), (7,), (7, 3, 4), ()]):
        want, got = (guide.log_probs_accept_of([guide.begin(tokens) for tokens in positions]).cpu() for guide in guides)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
        ids, scores = torch.tensor([[1]] * len(positions)), torch.randn(len(positions), WORDS, dtype=torch.float64)
        steered = [
            Steering.batch([(guide, guide.begin(tokens)._replace(prompt=())) for tokens in positions])
            for guide in guides
        ]
        for text in ((), (3,), (3, 4)):
            rows = torch.cat([ids, torch.tensor([text] * len(ids), dtype=torch.long).view(len(ids), -1)], 1)
            want, got = steered[0](rows, scores), steered[1](rows.to(device), scores.to(device)).cpu()
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
    words = ["<unk>", "<eos>", *(f"w{i}" for i in range(WORDS - 2))]
    lm = LanguageModel(hmm, WordTokenizer(words))
    there = lm.to(device)
    texts = ["w1 w2 w3", "w9", "w4 w4\nw5"]
    torch.testing.assert_close(there.score(texts), lm.score(texts), rtol=1e-8, atol=1e-9)
    for seed in range(3):  # a seed gives the same text on every device
        for options in ({}, {"must": ["w3"], "never": ["w5"]}):
            arguments = {"max_new_tokens": 12, "seed": seed, **options}
            assert there.generate("w1", **arguments) == lm.generate("w1", **arguments)
    got, want = there.infill("w1 ___ w3 ___", top=5), lm.infill("w1 ___ w3 ___", top=5)
    for mine, theirs in zip(got, want, strict=True):
        assert [word for word, _ in mine] == [word for word, _ in theirs]
        assert [p for _, p in mine] == pytest.approx([p for _, p in theirs])


@pytest.fixture(params=["table", "tiles"])
def computed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the transition matrix of 32 states, or compute tiles of it when they are needed."""
    with pieces.limit(2**22 if request.param == "table" else 32**2 - 1):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [1.0, 300.0])
@pytest.mark.usefixtures("computed")
def test_one_long_text_agrees_with_the_cpu(dtype: torch.dtype, sharpness: float, device: torch.device) -> None:
    hmm = make_hmm("blocked", dtype, sharpness)
    tokens, words = hmm.sample(1, 700, torch.Generator().manual_seed(3))[0], torch.tensor([7, 2, 11])
    exact, there = hmm.to(torch.float64), hmm.to(device)
    want = exact.token_log_probs(tokens)
    torch.testing.assert_close(there.token_log_probs(tokens).double().cpu(), want, **CLOSE[dtype])
    probs = {
        int(t): row
        for _, step, *_, part in exact.predictions(tokens, None, words)
        for t, row in zip(step, part, strict=True)
    }
    for found in there.predictions(tokens, None, words.to(device)):
        torch.testing.assert_close(found.log_observed.double().cpu(), want[0, found.step.cpu()], **CLOSE[dtype])
        expected = torch.stack([probs[t] for t in found.step.tolist()])
        torch.testing.assert_close(found.probs.double().cpu(), expected, **CLOSE[dtype])
