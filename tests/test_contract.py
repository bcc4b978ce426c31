"""What every transition and emission has to do, for all pairs of them; a kind joins by an entry in helpers/kinds.py.

The reference is the enumeration of all paths over matrices that the entry writes out.
"""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from helpers import naive_scan as naive
from helpers.fuzz import small_pieces
from helpers.kinds import BLOCK_OF_WORD, EMISSIONS, STATES, TRANSITIONS, WIDTH, WORDS, Rows
from helpers.oracle import with_gradients
from torch import Tensor

from hmmlm import HMM, Automaton, Guide, padded
from hmmlm.emissions import Emission
from hmmlm.errors import InputError
from hmmlm.hmm import Carry
from hmmlm.numerics.semirings import BOOLEAN, LOG, MAX_PLUS, PROBABILITY
from hmmlm.numerics.support import BlockSupport, Support
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.scan.composition import kinds_of, parameters_of, read_parts, with_tensors
from hmmlm.scan.likelihood import joint_scan
from hmmlm.transitions import Factored, Transition

PAIRS = list(itertools.product(TRANSITIONS, EMISSIONS))
TOKENS = torch.tensor([[0, 1, 2, 3], [6, -1, 5, 1], [2, 2, -1, 0]])
LENGTHS = torch.tensor([4, 4, 2])
RESTART = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
CLOSE = {torch.float32: {"rtol": 2e-4, "atol": 2e-5}, torch.float64: {"rtol": 1e-9, "atol": 1e-11}}
SEQUENCES = [row[: int(n)].tolist() for row, n in zip(TOKENS, LENGTHS, strict=True)]


def rows_of(seed: int, scale: float = 1.0, zeros: float = 0.0) -> Rows:
    """Return what draws log-distributions: logits of a standard deviation, a share of the probabilities zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        lost = torch.rand(shape, generator=generator, dtype=torch.float32) < zeros
        lost[..., 0] = False
        return logits.masked_fill(lost, -torch.inf).log_softmax(-1)

    return draw


def make(transition: str, emission: str, seed: int = 0, scale: float = 1.0, zeros: float = 0.0) -> HMM:
    rows = rows_of(seed, scale, zeros)
    return HMM(rows(STATES), TRANSITIONS[transition].make(rows), EMISSIONS[emission].make(rows))


MODELS = [*([pair] for pair in PAIRS), PAIRS[::3]]
"""Models by the kinds of their parts: of every pair, and a union."""


def make_union(parts: list[tuple[str, str]], seed: int) -> HMM:
    models = [make(*pair, seed=seed + i) for i, pair in enumerate(parts)]
    return models[0] if len(models) == 1 else HMM.union(models)


def matrices(hmm: HMM) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrices of an HMM by the definition of its kinds."""
    transition, emission = TRANSITIONS[hmm.transition.kind], EMISSIONS[hmm.emission.kind]
    return hmm.log_start, transition.dense(hmm.transition), emission.dense(hmm.emission)


class Paths:
    """log p(x, z) of all paths of a sequence, from three matrices."""

    def __init__(self, given: Sequence[Tensor], tokens: Sequence[int], restart: Sequence[bool] = (False,) * 9) -> None:
        start, transition, emission = given
        self.given, self.tokens = given, list(tokens)
        self.states = torch.cartesian_prod(*[torch.arange(STATES)] * len(tokens)).view(-1, len(tokens))
        self.joint = torch.zeros(len(self.states), dtype=start.dtype)
        for t, token in enumerate(tokens):
            here = self.states[:, t]
            begins = t == 0 or restart[t]
            self.joint = self.joint + (start[here] if begins else transition[self.states[:, t - 1], here])
            self.joint = self.joint if token < 0 else self.joint + emission[here, token]

    def total(self) -> Tensor:
        return self.joint.logsumexp(0)

    def joint_of(self, path: Tensor) -> Tensor:
        return self.joint[(self.states == path).all(1)][0]

    def posterior(self) -> Tensor:
        weights = self.joint.softmax(0)
        return torch.stack([torch.bincount(column, weights, STATES) for column in self.states.t()])

    def replaced(self, t: int, token: int) -> Tensor:
        return Paths(self.given, [*self.tokens[:t], token, *self.tokens[t + 1 :]]).total()

    def infill(self) -> Tensor:
        rows = [[self.replaced(t, v) for v in range(WORDS)] for t in range(len(self.tokens))]
        none = torch.stack([self.replaced(t, -1) for t in range(len(self.tokens))])
        return torch.stack([torch.stack(row) for row in rows]) - none[:, None]

    def next_token(self) -> Tensor:
        longer = [Paths(self.given, [*self.tokens, v]).total() for v in range(WORDS)]
        return torch.stack(longer) - self.total()


@pytest.fixture(params=PAIRS, ids=lambda pair: " × ".join(pair))
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[False, True], ids=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute as for small models, then as for large ones: in pieces, without a matrix that is kept."""
    with small_pieces(request.param):
        yield


# --- a transition and an emission on their own ---

SUPPORTS: dict[str, Callable[[], Support]] = {
    "all": lambda: None,
    "blocks": lambda: BlockSupport(torch.tensor([2, 0, 2, 1]), WIDTH),
    "some blocks": lambda: BlockSupport(torch.tensor([-1, 0, 2, -1]), WIDTH, wide=True),
}


def covered(support: Support, rows: int = 4) -> Tensor:
    """Return the states [n, Z] that the rows of a support cover, as a mask."""
    if support is None:
        return torch.ones(rows, STATES, dtype=torch.bool)
    assert isinstance(support, BlockSupport)
    return (support.blocks[:, None] == torch.arange(STATES) // support.width) | (support.blocks < 0)[:, None]


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("kind", TRANSITIONS)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_matrix_of_a_transition_is_that_of_its_definition(kind: str, zeros: float) -> None:
    transition = TRANSITIONS[kind].make(rows_of(1, zeros=zeros))
    want, states = TRANSITIONS[kind].dense(transition), torch.tensor([4, 0, 4])
    torch.testing.assert_close(want.exp().sum(1), torch.ones(STATES, dtype=want.dtype))
    transition.validate()
    torch.testing.assert_close(transition.dense(), want)
    torch.testing.assert_close(transition.log_block(slice(1, 3), slice(2, 6)), want[1:3, 2:6])
    torch.testing.assert_close(transition.log_entries(states, states.flip(0)), want[states, states.flip(0)])
    torch.testing.assert_close(transition.log_rows(states), want[states])
    torch.testing.assert_close(transition.log_columns(states), want.t()[states])
    blocks = BlockSupport(torch.tensor([2, 0, 1]), WIDTH)
    tiles = want.view(3, WIDTH, 3, WIDTH)
    torch.testing.assert_close(
        transition.tiles(blocks.blocks, torch.tensor([0, 0, 2]), WIDTH), tiles[[2, 0, 1], :, [0, 0, 2]]
    )
    by_block = want.t()[states].view(3, 3, WIDTH)[torch.arange(3), blocks.blocks]
    torch.testing.assert_close(transition.log_columns(states, blocks), by_block)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("kind", TRANSITIONS)
@pytest.mark.parametrize("source", SUPPORTS)
@pytest.mark.parametrize("target", SUPPORTS)
def test_steps_are_products_in_every_semiring(kind: str, source: str, target: str) -> None:
    transition = TRANSITIONS[kind].make(rows_of(2, scale=3.0, zeros=0.3))
    matrix = TRANSITIONS[kind].dense(transition)
    before, after = SUPPORTS[source](), SUPPORTS[target]()
    values = rows_of(3, zeros=0.3)(4, STATES)
    for ring, forward in itertools.product((LOG, MAX_PLUS, PROBABILITY, BOOLEAN), (True, False)):
        inner, outer = (before, after) if forward else (after, before)
        given = values.masked_fill(~covered(inner), -torch.inf)
        sums = given[:, :, None] + (matrix if forward else matrix.t())
        want = sums.logsumexp(1) if ring is LOG or ring is PROBABILITY else sums.amax(1)
        narrow = inner is not None and not inner.wide  # type: ignore[union-attr]
        own = given.view(4, -1, WIDTH)[torch.arange(4), inner.blocks] if narrow else given  # type: ignore[union-attr]
        step = transition.forward_step if forward else transition.backward_step
        got = step(ring, ring.from_log(own), before, after)
        want = ring.from_log(want)
        mask = covered(outer)
        if got.shape[1] == WIDTH:
            got, want = got.flatten(), want[mask]
        else:
            got, want = got[mask], want[mask]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("kind", EMISSIONS)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_matrix_of_an_emission_is_that_of_its_definition(kind: str, zeros: float) -> None:
    emission = EMISSIONS[kind].make(rows_of(4, zeros=zeros))
    want, words = EMISSIONS[kind].dense(emission), torch.tensor([5, 0, 3])
    emission.validate()
    torch.testing.assert_close(want.exp().sum(1), torch.ones(STATES, dtype=want.dtype))
    torch.testing.assert_close(emission.dense(), want)
    torch.testing.assert_close(emission.log_entries(torch.tensor([4, 0, 1]), words), want[[4, 0, 1], words])
    found, log_probs = emission.log_rows(torch.tensor([4, 0]))
    assert (log_probs[found < 0] == -torch.inf).all()
    for row, state in enumerate((4, 0)):
        listed = torch.full((WORDS,), -torch.inf, dtype=want.dtype)
        listed[found[row][found[row] >= 0]] = log_probs[row][found[row] >= 0]
        torch.testing.assert_close(listed, want[state])
    log_states = rows_of(5, zeros=0.3)(2, STATES)
    by_word = (log_states[:, :, None] + want).logsumexp(1)
    torch.testing.assert_close(emission.word_log_probs(log_states), by_word)
    torch.testing.assert_close(emission.word_log_probs(log_states, words), by_word[:, words])
    group = torch.tensor([0, 1, 1, 0, 2, 0, 2])
    of_group = torch.stack([want[:, group == g].logsumexp(1) for g in range(3)])
    torch.testing.assert_close(emission.group_log_probs(group, 3), of_group)
    for tokens, missing in ((words, False), (torch.tensor([5, -1, 3]), True)):
        support, scores = emission.score(tokens, missing)
        every = scores if support is None else support.spread(scores, STATES, -torch.inf)
        expected = torch.where((tokens < 0)[:, None], 0.0, want.t()[tokens.clamp(min=0)])
        torch.testing.assert_close(every, expected)


# --- queries ---


@pytest.mark.parametrize(("dtype", "zeros"), [(torch.float32, 0.0), (torch.float64, 0.3)], ids=str)
def test_queries_are_those_of_all_paths(pair: tuple[str, str], dtype: torch.dtype, zeros: float) -> None:
    whole = make(*pair, seed=6, zeros=zeros)
    hmm, given = whole.to(dtype), matrices(whole)
    paths = [Paths(given, tokens) for tokens in SEQUENCES]
    possible = [b for b, own in enumerate(paths) if own.total() > -torch.inf]
    total = hmm.log_likelihood(TOKENS, LENGTHS)
    close = CLOSE[dtype]
    torch.testing.assert_close(total.double(), torch.stack([own.total() for own in paths]), **close)
    filtered, stepwise = hmm.filter(TOKENS, LENGTHS), hmm.token_log_probs(TOKENS, LENGTHS)
    torch.testing.assert_close(filtered.log_likelihood, total)
    for b, own in enumerate(SEQUENCES):  # also an impossible one, up to its impossible token
        prefixes = [Paths(given, own[: t + 1]) for t in range(len(own))]
        scores = torch.stack([prefix.total() for prefix in prefixes])
        torch.testing.assert_close(stepwise[b, : len(own)].double().cumsum(0), scores, **close)
        assert torch.equal(stepwise[b, : len(own)] == -torch.inf, scores == -torch.inf)
        last = torch.stack([prefix.posterior()[-1] for prefix in prefixes]).nan_to_num(0.0)
        torch.testing.assert_close(filtered.probs[b, : len(own)].double(), last, **close)
        torch.testing.assert_close(filtered.carry.log_probs[b].exp().double(), last[-1], **close)
        assert not filtered.probs[b, len(own) :].any() and not stepwise[b, len(own) :].any()
    tokens, lengths = TOKENS[possible], LENGTHS[possible]
    posterior, entropy = hmm.posterior(tokens, lengths), hmm.entropy(tokens, lengths)
    infill, following = hmm.infill(tokens, lengths), hmm.next_token(tokens, lengths)
    best, log_prob = hmm.viterbi(tokens, lengths)
    for row, b in enumerate(possible):
        own, n = paths[b], len(SEQUENCES[b])
        weights = own.joint.softmax(0)
        torch.testing.assert_close(posterior[row, :n].double(), own.posterior(), **close)
        torch.testing.assert_close(entropy[row].double(), -torch.xlogy(weights, weights).sum(), rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(infill[row, :n].double(), own.infill(), **close)
        torch.testing.assert_close(following[row].double(), own.next_token(), **close)
        torch.testing.assert_close(log_prob[row].double(), own.joint.max(), **close)
        torch.testing.assert_close(own.joint_of(best[row, :n]), own.joint.max(), **close)
        assert (posterior[row, n:] == 0).all() and (best[row, n:] == -1).all() and (infill[row, n:] == -torch.inf).all()
    for found in hmm.predictions(tokens, lengths) if zeros else ():  # the enumeration takes long
        for b, t, probs in zip(found.sequence, found.step, found.probs, strict=True):
            if t < len(SEQUENCES[possible[int(b)]]):
                before = SEQUENCES[possible[int(b)]][: int(t)]
                want = Paths(given, before).next_token() if before else Paths(given, [-1]).infill()[0]
                torch.testing.assert_close(probs.double(), want.exp(), **close)


def test_gradients_are_those_of_all_paths(pair: tuple[str, str]) -> None:
    hmm, weights = make(*pair, seed=7, zeros=0.2), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters_of(hmm).items()}
    model = with_tensors(hmm, leaves)
    got = model.scan(TOKENS, LENGTHS, restart=RESTART).log_likelihood
    given = matrices(model)
    want = torch.stack([Paths(given, own, row.tolist()).total() for own, row in zip(SEQUENCES, RESTART, strict=True)])
    torch.testing.assert_close(got, want)
    possible = want > -torch.inf
    found = torch.autograd.grad((got[possible] * weights[possible]).sum(), list(leaves.values()), retain_graph=True)
    expected = torch.autograd.grad((want[possible] * weights[possible]).sum(), list(leaves.values()))
    for name, a, b in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0), msg=lambda text, name=name: f"{name}: {text}")


def scan_windows(hmm: HMM, width: int, restart: Tensor | None, exact: bool) -> tuple[Tensor, Carry]:
    """Return the log-likelihood by windows of TOKENS, and the last carry."""
    carry, total = None, torch.zeros(len(TOKENS), dtype=torch.float64)
    for first in range(0, TOKENS.shape[1], width):
        here = slice(first, first + width)
        again = None if restart is None else restart[:, here]
        found = hmm.scan(TOKENS[:, here], carry=carry, restart=again, exact_carry=exact)
        carry, total = found.carry, total + found.log_likelihood
    assert carry is not None
    return total, carry


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("parts", MODELS, ids=str)
def test_windows_equal_the_whole(parts: list[tuple[str, str]], exact: bool) -> None:
    hmm = make_union(parts, seed=8)
    for width, restart in ((1, RESTART), (3, None), (3, RESTART)):
        total, carry = scan_windows(hmm, width, restart, exact)
        whole = hmm.scan(TOKENS, restart=restart, exact_carry=exact)
        torch.testing.assert_close(total, whole.log_likelihood)
        torch.testing.assert_close(carry.over_all(hmm.num_states), whole.carry.over_all(hmm.num_states))
    filtered = hmm.filter(TOKENS)
    torch.testing.assert_close(scan_windows(hmm, 1, None, exact)[0], filtered.log_likelihood)
    first = hmm.filter(TOKENS[:, :1])
    second = hmm.filter(TOKENS[:, 1:], carry=first.carry)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, filtered.log_likelihood)
    torch.testing.assert_close(torch.cat([first.probs, second.probs], 1), filtered.probs)
    torch.testing.assert_close(second.carry.log_probs, filtered.carry.log_probs)
    steps = hmm.token_log_probs(TOKENS[:, 1:], carry=first.carry)
    torch.testing.assert_close(steps, hmm.token_log_probs(TOKENS)[:, 1:])


def test_joint_scans_score_a_given_path(pair: tuple[str, str]) -> None:
    hmm = with_gradients(make(*pair, seed=18))
    leaves, given = list(parameters_of(hmm).values()), matrices(hmm)
    drawn = hmm.posterior_sample(TOKENS, LENGTHS, generator=torch.Generator().manual_seed(0))[0]
    other = torch.randint(STATES, TOKENS.shape, generator=torch.Generator().manual_seed(1)).masked_fill(drawn < 0, -1)
    for states in (drawn, other):  # states that emit the tokens, and some that a blocked emission excludes
        found = joint_scan(hmm, TOKENS, states, LENGTHS, restart=RESTART)
        rows = zip(SEQUENCES, states, RESTART.tolist(), strict=True)
        want = torch.stack([Paths(given, own, again).joint_of(z[: len(own)]) for own, z, again in rows])
        torch.testing.assert_close(found.log_likelihood, want)
        last = states.gather(1, LENGTHS[:, None] - 1)[:, 0]
        assert torch.equal(found.carry.most_likely(), last)
        assert torch.equal(found.carry.over_all(STATES).exp(), torch.nn.functional.one_hot(last, STATES).double())
        possible = want > -torch.inf
        if possible.any():
            one, two = (
                torch.autograd.grad(total[possible].sum(), leaves, retain_graph=True, materialize_grads=True)
                for total in (found.log_likelihood, want)
            )
            torch.testing.assert_close(one, two)
    path = hmm.posterior_sample(TOKENS, generator=torch.Generator().manual_seed(0))[0]
    whole, carry, total = joint_scan(hmm, TOKENS, path, restart=RESTART), None, torch.zeros(3, dtype=torch.float64)
    for t in range(TOKENS.shape[1]):
        here = slice(t, t + 1)
        one = joint_scan(hmm, TOKENS[:, here], path[:, here], None, carry, RESTART[:, here])
        carry, total = one.carry, total + one.log_likelihood
    torch.testing.assert_close(total, whole.log_likelihood)


def test_tokens_one_at_a_time(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=19)
    given, log_states = matrices(hmm), hmm.begin().expand(len(TOKENS), -1)
    for t in range(TOKENS.shape[1]):
        alone = torch.stack([hmm.advance(own, int(v)) for own, v in zip(log_states, TOKENS[:, t], strict=True)])
        log_states = hmm.advance(log_states, TOKENS[:, t])
        torch.testing.assert_close(alone, log_states)
        want = torch.stack([Paths(given, row[: t + 1]).next_token() for row in TOKENS.tolist()])
        torch.testing.assert_close(hmm.emit(log_states), want)
        torch.testing.assert_close(hmm.emit(log_states, torch.tensor([3, 0])), want[:, [3, 0]])


def test_blanks_are_never_the_excluded_word(pair: tuple[str, str]) -> None:
    hmm, excluded = make(*pair, seed=20), 2
    given, want = matrices(hmm), torch.full((2, WORDS), -torch.inf, dtype=torch.float64)
    for choice in itertools.product([v for v in range(WORDS) if v != excluded], repeat=2):
        score = Paths(given, [0, choice[0], 5, choice[1]]).total()
        for row, word in zip(want, choice, strict=True):
            row[word] = torch.logaddexp(row[word], score)
    torch.testing.assert_close(hmm.infill_blanks([[0, -1, 5, -1]], excluded), want.log_softmax(1))
    assert hmm.infill_blanks([[0, 1]], excluded).shape == (0, WORDS)
    torch.testing.assert_close(hmm.infill_at([[0, -1, 5, 1]], 2), hmm.infill([[0, -1, 5, 1]])[0, 2])


def test_long_sequences_agree_with_log_space(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=21, scale=4.0).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens, lengths = hmm.sample(4, 30, generator)[0], torch.tensor([30, 7, 1, 19])
    tokens[torch.rand(tokens.shape, generator=generator) < 0.1] = -1
    given, evidence = Parameters(*matrices(hmm.to(torch.float64))), Evidence(tokens, lengths)
    alpha, beta, total = (ask(given, evidence) for ask in (naive.forward, naive.backward, naive.log_likelihood))
    inside = (torch.arange(30) < lengths[:, None])[..., None]

    def close(got: Tensor, want: Tensor) -> None:
        torch.testing.assert_close(got.to_dense().double(), want, rtol=1e-3, atol=1e-3)

    close(hmm.log_likelihood(tokens, lengths), total)
    close(hmm.filter(tokens, lengths).probs, alpha.softmax(2).where(inside, 0.0))
    close(hmm.posterior(tokens, lengths), (alpha + beta).softmax(2).where(inside, 0.0))
    moved = (alpha[..., None] + given.log_transition).logsumexp(2)
    words = (moved.log_softmax(2)[..., None] + given.log_emission).logsumexp(2)
    close(hmm.next_token(tokens, lengths), words[torch.arange(4), lengths - 1])
    around = (torch.cat([given.log_start.expand(4, 1, -1), moved[:, :-1]], 1) + beta).log_softmax(2)
    close(hmm.infill(tokens, lengths), (around[..., None] + given.log_emission).logsumexp(2).where(inside, -torch.inf))
    counts = naive.expected_counts(given, evidence, torch.ones(4, dtype=torch.float64))
    expected = sum(torch.xlogy(n, p.exp()).sum() for n, p in zip(counts, given, strict=False))
    close(hmm.entropy(tokens, lengths).sum(), total.sum() - expected)  # H(z | x) = log p(x) − E log p(x, z)
    path, best = hmm.viterbi(tokens, lengths)
    assert torch.equal(path >= 0, inside[..., 0])
    close(best, joint_scan(hmm.to(torch.float64), tokens, path, lengths).log_likelihood)
    for row, n in enumerate(lengths):
        scores = naive.emission_scores(given.log_emission, tokens[row : row + 1, :n])[0]
        reached = given.log_start + scores[0]
        for score in scores[1:]:
            reached = (reached[:, None] + given.log_transition).amax(0) + score
        close(best[row], reached.max())


@pytest.mark.parametrize("seed", range(3))
def test_peaked_models_agree_in_float32_and_float64(pair: tuple[str, str], seed: int) -> None:
    hmm = make(*pair, seed=seed, scale=40.0, zeros=0.2).to(torch.float32)
    tokens = hmm.sample(8, 30, torch.Generator().manual_seed(seed))[0]
    tokens[:4, ::7] = torch.randint(WORDS, tokens[:4, ::7].shape, generator=torch.Generator().manual_seed(seed))
    leaves = {name: value.clone().requires_grad_() for name, value in parameters_of(hmm).items()}
    exact = {name: value.double().clone().requires_grad_() for name, value in parameters_of(hmm).items()}
    got = with_tensors(hmm, leaves).scan(tokens, exact_carry=False).log_likelihood
    double = with_tensors(hmm.to(torch.float64), exact)
    want = HMM(*matrices_of(double), impl="naive").scan(tokens).log_likelihood
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)
    possible = want > -torch.inf
    found = torch.autograd.grad(got[possible].sum(), list(leaves.values()), materialize_grads=True, allow_unused=True)
    expected = torch.autograd.grad(
        want[possible].sum(), list(exact.values()), materialize_grads=True, allow_unused=True
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(
            a.double(), b.nan_to_num(0.0), rtol=2e-2, atol=2e-2 * float(b.nan_to_num(0.0).abs().max() + 1)
        )


def matrices_of(hmm: HMM) -> tuple[Tensor, Tensor, Tensor]:
    return hmm.log_start, hmm.transition.dense(), hmm.emission.dense()


# --- learning ---


def test_counts_are_the_gradient_by_log_probabilities(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=9)
    counts, given = hmm.expected_counts(TOKENS, LENGTHS), [value.clone().requires_grad_() for value in matrices(hmm)]
    total = torch.stack([Paths(given, own).total() for own in SEQUENCES]).sum()
    start, transition, emission = torch.autograd.grad(total, given)
    torch.testing.assert_close(counts.log_likelihood, total.detach())
    torch.testing.assert_close(counts.start, start)
    if isinstance(counts.transition, Tensor):
        found = counts.transition.to_dense() if counts.transition.is_sparse else counts.transition
        torch.testing.assert_close(found, transition)
    else:
        pairs = float((LENGTHS - 1).sum())
        for name, value in counts.transition.items():
            assert value.shape == hmm.transition.tensors()[name].shape
            torch.testing.assert_close(float(value.sum()), pairs)
    if hmm.emission.kind == "blocked":
        states = BLOCK_OF_WORD[:, None] * WIDTH + torch.arange(WIDTH)
        emission = emission[states, torch.arange(WORDS)[:, None]]
    torch.testing.assert_close(counts.emission, emission)


def test_impossible_sequences_are_named_and_not_counted(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=9)
    log_probs = hmm.emission.tensors()["log_probs"].clone()
    log_probs.select(1 if hmm.emission.kind == "categorical" else 0, 2).fill_(-torch.inf)
    hmm = with_tensors(hmm, {"emission.log_probs": log_probs})
    tokens, lengths = TOKENS[[1, 2, 0]], LENGTHS[[1, 2, 0]]  # the last two have the word 2, the longer one later
    for query in (hmm.posterior, hmm.viterbi, hmm.posterior_sample, hmm.entropy, hmm.infill, hmm.next_token):
        with pytest.raises(InputError, match=r"sequence 1 is impossible .* token 2 at position 0 "):
            query(tokens, lengths)
    counts, alone = hmm.expected_counts(tokens, lengths), hmm.expected_counts(tokens[:1])
    assert counts.log_likelihood == -torch.inf
    for got, want in zip(flat(counts[:3]), flat(alone[:3]), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sets", [False, True], ids=["states", "sets of states"])
def test_labels_leave_the_paths_that_they_allow(pair: tuple[str, str], sets: bool) -> None:
    hmm, states = make(*pair, seed=12), torch.arange(STATES)
    labels = torch.full_like(TOKENS, -1)
    best = hmm.viterbi(TOKENS, LENGTHS)[0]
    labels[0, 1], labels[1, 1:3], labels[2, 0] = best[0, 1], best[1, 1:3], best[2, 0]  # one of a missing token
    allowed = (labels < 0)[..., None] | (labels[..., None] == states)
    if sets:
        allowed |= states % 2 == 0
        labels = allowed
    posterior, (path, log_prob) = hmm.posterior(TOKENS, LENGTHS, labels), hmm.viterbi(TOKENS, LENGTHS, labels)
    log_likelihood = hmm.log_likelihood(TOKENS, LENGTHS, labels)
    for b, tokens in enumerate(SEQUENCES):
        own = Paths(matrices(hmm), tokens)
        inside = allowed[b, torch.arange(len(tokens)), own.states].all(1)
        own.joint = own.joint.masked_fill(~inside, -torch.inf)
        torch.testing.assert_close(log_likelihood[b], own.total())
        torch.testing.assert_close(posterior[b, : len(tokens)], own.posterior())
        torch.testing.assert_close(log_prob[b], own.joint.max())
        torch.testing.assert_close(own.joint_of(path[b, : len(tokens)]), own.joint.max())


def test_impossible_labels_are_named() -> None:
    hmm = HMM.from_probs([1, 0], [[0.5, 0.5], [0.5, 0.5]], [[1, 0], [0, 1]])
    for labels, message in (
        ([[0, 1], [0, 0]], r"sequence 1 is impossible .* token 1 with its label at position 1 "),
        ([[0, 1], [0, 2]], r"label 2 in sequence 1 at position 1 is no state: there are 0 to 1"),
        ([[[1, 0], [0, 1]], [[1, 0], [0, 0]]], r"labels allow no state in sequence 1 at position 1"),
        ([[0.0, 1.0], [0.0, 1.0]], r"labels must be integers \[2, 2\]"),
    ):
        given = torch.tensor(labels).bool() if isinstance(labels[0][0], list) else torch.tensor(labels)
        with pytest.raises(InputError, match=message):
            hmm.viterbi([[0, 1], [0, 1]], labels=given)


def test_baum_welch_raises_the_likelihood(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=10)
    tokens = hmm.sample(20, 9, torch.Generator().manual_seed(1))[0]
    start = make(*pair, seed=11)
    if isinstance(hmm.transition, Factored):
        with pytest.raises(Exception, match="gradients"):
            start.fit(tokens, iterations=2)
        return
    model, before = start, float(start.log_likelihood(tokens).sum())
    for _ in range(4):
        model = model.fit(tokens, iterations=1)
        model.validate()
        after = float(model.log_likelihood(tokens).sum())
        assert after > before - 1e-9
        before = after


# --- representation ---


def test_tensors_and_kinds_restore_the_model(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=12)
    assert set(kinds_of(hmm)) == {"transition.kind", "emission.kind"}
    again = HMM(*read_parts(hmm.tensors(), kinds_of(hmm)))
    for other in (again, hmm.detach(), copy.deepcopy(hmm), pickle.loads(pickle.dumps(hmm)), hmm.to(torch.float64)):
        torch.testing.assert_close(other.log_likelihood(TOKENS), hmm.log_likelihood(TOKENS), rtol=0, atol=0)
    assert hmm.to(torch.float32).log_likelihood(TOKENS).dtype == torch.float32
    assert kinds_of(HMM.from_probs(hmm.log_start.exp(), hmm.transition, hmm.emission)) == kinds_of(hmm)


def test_unions_are_mixtures_of_sequences(pair: tuple[str, str]) -> None:
    first, second = make(*pair, seed=13), make("dense", "categorical", seed=14)
    union = HMM.union([first, second], [0.25, 0.75])
    parts = torch.stack([0.25 * first.log_likelihood(TOKENS).exp(), 0.75 * second.log_likelihood(TOKENS).exp()])
    torch.testing.assert_close(union.log_likelihood(TOKENS).exp(), parts.sum(0))
    share = parts / parts.sum(0)
    want = torch.cat([p[:, None, None] * m.posterior(TOKENS) for p, m in zip(share, (first, second), strict=True)], 2)
    torch.testing.assert_close(union.posterior(TOKENS), want)
    again = HMM(*read_parts(union.tensors(), kinds_of(union)))
    torch.testing.assert_close(again.next_token(TOKENS), union.next_token(TOKENS))
    one = union.filter(TOKENS[:, :2])
    two = union.filter(TOKENS[:, 2:], carry=one.carry)
    torch.testing.assert_close(one.log_likelihood + two.log_likelihood, union.log_likelihood(TOKENS))


def test_guides_condition_on_an_automaton(pair: tuple[str, str]) -> None:
    hmm, length = make(*pair, seed=15), 3
    table = torch.zeros(2, WORDS, dtype=torch.long)
    table[0, 4] = table[1] = 1  # type: ignore[assignment]
    guide = Guide(hmm, Automaton(table, torch.tensor([False, True])), length)
    given = matrices(hmm)
    texts = [list(text) for text in itertools.product(range(WORDS), repeat=length) if 4 in text]
    total = torch.stack([Paths(given, text).total() for text in texts])
    by_word = torch.stack([total[[text[0] == v for text in texts]].logsumexp(0) for v in range(WORDS)])
    torch.testing.assert_close(guide.joint(guide.begin()), by_word)


@contextmanager
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: list[Callable[[], AbstractContextManager[Any]]] = [
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    default_float64,
]


def flat(found: Any) -> list[Tensor]:
    """Return the tensors of a result."""
    if isinstance(found, Tensor):
        return [found.to_dense()]
    values = found.values() if isinstance(found, dict) else found
    return [value for each in values if each is not None for value in flat(each)]


def ask_all(hmm: HMM, *batch: Any) -> dict[str, list[Tensor]]:
    """Return the tensors of the answers to all queries of a batch."""
    generator = torch.Generator().manual_seed(0)
    asked = ["log_likelihood", "filter", "token_log_probs", "expected_counts", "posterior", "viterbi", "next_token"]
    found = {name: flat(getattr(hmm, name)(*batch)) for name in [*asked, "entropy", "infill"]}
    found["posterior_sample"] = [hmm.posterior_sample(*batch, generator=generator)]
    found["infill_blanks"] = [hmm.infill_blanks([[1, -1, 2]], 0)]
    return found | {"advance": [hmm.advance(hmm.begin(), 1)], "sample": flat(hmm.sample(2, 3, generator))}


@pytest.mark.parametrize("parts", MODELS, ids=str)
def test_answers_do_not_depend_on_the_mode_of_torch(parts: list[tuple[str, str]]) -> None:
    def new() -> HMM:
        return make_union(parts, seed=16).to(torch.float32)

    hmm = new()
    want = ask_all(hmm, TOKENS, LENGTHS)
    for mode in MODES:
        with mode():
            inside = ask_all(hmm, TOKENS, LENGTHS)
            if torch.is_autocast_enabled("cpu"):
                inside["log_likelihood"] = want["log_likelihood"]  # its products have other operands
            torch.testing.assert_close(inside, want)
            made = new()
        torch.testing.assert_close(flat(made.filter(TOKENS, LENGTHS)), want["filter"])  # made there, used outside


def test_only_log_likelihoods_have_gradients(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=16)
    learned, want = with_gradients(hmm), ask_all(hmm, TOKENS, LENGTHS)
    for name, values in ask_all(learned, TOKENS, LENGTHS).items():
        differentiable = {"log_likelihood": 1, "filter": 1}.get(name, 0)
        assert [value.requires_grad for value in values] == [i < differentiable for i in range(len(values))], name
        torch.testing.assert_close([value.detach() for value in values], want[name])
    assert not any(value.requires_grad for values in want.values() for value in values)
    assert not learned.scan(TOKENS).carry.log_probs.requires_grad
    with torch.no_grad():
        assert not learned.log_likelihood(TOKENS).requires_grad


def test_lists_of_different_lengths_are_a_batch(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=16)
    tokens, lengths = padded(SEQUENCES)
    assert tokens.tolist()[2] == [2, 2, -1, -1] and torch.equal(lengths, LENGTHS)
    torch.testing.assert_close(ask_all(hmm, SEQUENCES), ask_all(hmm, tokens, lengths), rtol=0, atol=0)
    for form in (tuple, torch.tensor, np.array):
        found = hmm.log_likelihood([form(row) for row in SEQUENCES])
        assert torch.equal(found, hmm.log_likelihood(tokens, lengths))


def test_samples_follow_the_model(pair: tuple[str, str]) -> None:
    hmm, num = make(*pair, seed=17, zeros=0.3), 4000
    start, transition, emission = (p.exp() for p in matrices(hmm))

    def follow(values: Tensor, sizes: Sequence[int], want: Tensor) -> None:
        """Check the frequencies of rows [num, n] of numbers below `sizes`: five standard deviations at most."""
        index = sum(column * int(np.prod(sizes[i + 1 :])) for i, column in enumerate(values.t()))
        seen = torch.bincount(index, minlength=want.numel()) / num  # type: ignore[arg-type]
        assert ((seen - want.flatten()).abs() <= 5 * (want.flatten() / num).sqrt() + 1e-3 * (want.flatten() > 0)).all()

    tokens, states = hmm.sample(num, 3, torch.Generator().manual_seed(0))
    assert torch.equal(tokens, hmm.sample(num, 3, torch.Generator().manual_seed(0))[0])
    assert (joint_scan(hmm, tokens, states).log_likelihood > -torch.inf).all()
    second = start @ transition
    follow(states[:, :2], (STATES, STATES), start[:, None] * transition)
    follow(torch.stack([states[:, 1], tokens[:, 1]], 1), (STATES, WORDS), second[:, None] * emission)
    follow(states[:, 1:], (STATES, STATES), second[:, None] * transition)
    given, lengths = tokens[:3], torch.tensor([3, 2, 1])
    drawn = hmm.posterior_sample(given, lengths, num, torch.Generator().manual_seed(0))
    for row, n in enumerate(lengths.tolist()):
        own = Paths(matrices(hmm), given[row, :n].tolist())
        follow(drawn[:, row, :n], (STATES,) * n, own.joint.softmax(0))
        assert (drawn[:, row, n:] == -1).all()


def test_parts_of_different_sizes_are_refused(pair: tuple[str, str]) -> None:
    hmm = make(*pair)
    with pytest.raises(Exception, match="states"):
        HMM(hmm.log_start[:-1].log_softmax(0), hmm.transition, hmm.emission)
    with pytest.raises(Exception, match="dtype"):
        HMM(hmm.log_start.float(), hmm.transition, hmm.emission)
    assert isinstance(hmm.transition, Transition) and isinstance(hmm.emission, Emission)
