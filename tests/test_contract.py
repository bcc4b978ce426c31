"""What every transition and emission has to do, for all pairs of them; a kind joins by an entry in helpers/kinds.py.

The reference is the enumeration of all paths over matrices that the entry writes out.
"""

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers.kinds import BLOCK_OF_WORD, EMISSIONS, STATES, TRANSITIONS, WIDTH, WORDS, Rows
from torch import Tensor

from hmmlm import HMM, Automaton, Guide
from hmmlm.emissions import Emission
from hmmlm.numerics.semirings import BOOLEAN, LOG, MAX_PLUS, PROBABILITY
from hmmlm.numerics.support import BlockSupport, Support
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
        lost = torch.rand(shape, generator=generator) < zeros
        lost[..., 0] = False
        return logits.masked_fill(lost, -torch.inf).log_softmax(-1)

    return draw


def make(transition: str, emission: str, seed: int = 0, scale: float = 1.0, zeros: float = 0.0) -> HMM:
    rows = rows_of(seed, scale, zeros)
    return HMM(rows(STATES), TRANSITIONS[transition].make(rows), EMISSIONS[emission].make(rows))


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


@pytest.mark.parametrize("kind", TRANSITIONS)
@pytest.mark.parametrize("source", SUPPORTS)
@pytest.mark.parametrize("target", SUPPORTS)
@pytest.mark.parametrize("ring", [LOG, MAX_PLUS, PROBABILITY, BOOLEAN], ids=lambda ring: type(ring).__name__)
def test_steps_are_products_in_every_semiring(kind: str, source: str, target: str, ring: object) -> None:
    transition = TRANSITIONS[kind].make(rows_of(2, scale=3.0, zeros=0.3))
    matrix = TRANSITIONS[kind].dense(transition)
    before, after = SUPPORTS[source](), SUPPORTS[target]()
    values = rows_of(3, zeros=0.3)(4, STATES)
    for forward in (True, False):
        inner, outer = (before, after) if forward else (after, before)
        given = values.masked_fill(~covered(inner), -torch.inf)
        sums = given[:, :, None] + (matrix if forward else matrix.t())
        want = sums.logsumexp(1) if ring is LOG or ring is PROBABILITY else sums.amax(1)
        narrow = inner is not None and not inner.wide  # type: ignore[union-attr]
        own = given.view(4, -1, WIDTH)[torch.arange(4), inner.blocks] if narrow else given  # type: ignore[union-attr]
        step = transition.forward_step if forward else transition.backward_step
        got = step(ring, ring.from_log(own), before, after)  # type: ignore[arg-type, attr-defined]
        want = ring.from_log(want)  # type: ignore[attr-defined]
        mask = covered(outer)
        if got.shape[1] == WIDTH:
            got, want = got.flatten(), want[mask]
        else:
            got, want = got[mask], want[mask]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


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


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_queries_are_those_of_all_paths(pair: tuple[str, str], dtype: torch.dtype, zeros: float) -> None:
    whole = make(*pair, seed=6, zeros=zeros)
    hmm, given = whole.to(dtype), matrices(whole)
    paths = [Paths(given, tokens) for tokens in SEQUENCES]
    possible = [b for b, own in enumerate(paths) if own.total() > -torch.inf]
    total = hmm.log_likelihood(TOKENS, LENGTHS)
    close = CLOSE[dtype]
    torch.testing.assert_close(total.double(), torch.stack([own.total() for own in paths]), **close)
    tokens, lengths = TOKENS[possible], LENGTHS[possible]
    posterior, entropy = hmm.posterior(tokens, lengths), hmm.entropy(tokens, lengths)
    infill, following = hmm.infill(tokens, lengths), hmm.next_token(tokens, lengths)
    best, log_prob = hmm.viterbi(tokens, lengths)
    stepwise = hmm.token_log_probs(tokens, lengths)
    for row, b in enumerate(possible):
        own, n = paths[b], len(SEQUENCES[b])
        weights = own.joint.softmax(0)
        torch.testing.assert_close(posterior[row, :n].double(), own.posterior(), **close)
        torch.testing.assert_close(entropy[row].double(), -torch.xlogy(weights, weights).sum(), rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(infill[row, :n].double(), own.infill(), **close)
        torch.testing.assert_close(following[row].double(), own.next_token(), **close)
        torch.testing.assert_close(log_prob[row].double(), own.joint.max(), **close)
        index = (own.states == best[row, :n]).all(1).nonzero().item()
        torch.testing.assert_close(own.joint[int(index)], own.joint.max(), **close)
        prefixes = torch.stack([Paths(given, SEQUENCES[b][: t + 1]).total() for t in range(n)])
        torch.testing.assert_close(stepwise[row, :n].double().cumsum(0), prefixes, **close)
        assert (posterior[row, n:] == 0).all() and (best[row, n:] == -1).all()
    for found in hmm.predictions(tokens, lengths):
        for b, t, probs in zip(found.sequence, found.step, found.probs, strict=True):
            if t < len(SEQUENCES[possible[int(b)]]):
                before = SEQUENCES[possible[int(b)]][: int(t)]
                want = Paths(given, before).next_token() if before else Paths(given, [-1]).infill()[0]
                torch.testing.assert_close(probs.double(), want.exp(), **close)


def test_gradients_are_those_of_all_paths(pair: tuple[str, str]) -> None:
    hmm, weights = make(*pair, seed=7, zeros=0.2), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in hmm.parameters().items()}
    model = hmm.with_tensors(leaves)
    got = model.scan(TOKENS, LENGTHS, restart=RESTART).log_likelihood
    given = matrices(model)
    want = torch.stack([Paths(given, own, row.tolist()).total() for own, row in zip(SEQUENCES, RESTART, strict=True)])
    torch.testing.assert_close(got, want)
    possible = want > -torch.inf
    found = torch.autograd.grad((got[possible] * weights[possible]).sum(), list(leaves.values()), retain_graph=True)
    expected = torch.autograd.grad((want[possible] * weights[possible]).sum(), list(leaves.values()))
    for name, a, b in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0), msg=lambda text, name=name: f"{name}: {text}")


def test_windows_equal_the_whole(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=8)
    whole = hmm.filter(TOKENS)
    first = hmm.filter(TOKENS[:, :1])
    second = hmm.filter(TOKENS[:, 1:], carry=first.carry)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(second.probs, whole.probs[:, 1:])
    torch.testing.assert_close(second.carry.log_probs, whole.carry.log_probs)
    steps = hmm.token_log_probs(TOKENS[:, 1:], carry=first.carry)
    torch.testing.assert_close(steps, hmm.token_log_probs(TOKENS)[:, 1:])
    for exact in (True, False):
        one = hmm.scan(TOKENS[:, :3], exact_carry=exact)
        two = hmm.scan(TOKENS[:, 3:], carry=one.carry, exact_carry=exact)
        torch.testing.assert_close(one.log_likelihood + two.log_likelihood, whole.log_likelihood)


@pytest.mark.parametrize("seed", range(6))
def test_peaked_models_agree_in_float32_and_float64(pair: tuple[str, str], seed: int) -> None:
    hmm = make(*pair, seed=seed, scale=40.0, zeros=0.2).to(torch.float32)
    tokens = hmm.sample(8, 30, torch.Generator().manual_seed(seed))[0]
    tokens[:4, ::7] = torch.randint(WORDS, tokens[:4, ::7].shape, generator=torch.Generator().manual_seed(seed))
    leaves = {name: value.clone().requires_grad_() for name, value in hmm.parameters().items()}
    exact = {name: value.double().clone().requires_grad_() for name, value in hmm.parameters().items()}
    got = hmm.with_tensors(leaves).scan(tokens, exact_carry=False).log_likelihood
    double = hmm.to(torch.float64).with_tensors(exact)
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
    assert set(hmm.kinds()) == {"transition.kind", "emission.kind"}
    again = HMM.from_tensors(hmm.tensors(), hmm.kinds())
    for other in (again, hmm.detach(), copy.deepcopy(hmm), pickle.loads(pickle.dumps(hmm)), hmm.to(torch.float64)):
        torch.testing.assert_close(other.log_likelihood(TOKENS), hmm.log_likelihood(TOKENS), rtol=0, atol=0)
    assert hmm.to(torch.float32).log_likelihood(TOKENS).dtype == torch.float32
    assert HMM.from_probs(hmm.log_start.exp(), hmm.transition, hmm.emission).kinds() == hmm.kinds()


def test_unions_are_mixtures_of_sequences(pair: tuple[str, str]) -> None:
    first, second = make(*pair, seed=13), make("dense", "categorical", seed=14)
    union = HMM.union([first, second], [0.25, 0.75])
    parts = torch.stack([0.25 * first.log_likelihood(TOKENS).exp(), 0.75 * second.log_likelihood(TOKENS).exp()])
    torch.testing.assert_close(union.log_likelihood(TOKENS).exp(), parts.sum(0))
    share = parts / parts.sum(0)
    want = torch.cat([p[:, None, None] * m.posterior(TOKENS) for p, m in zip(share, (first, second), strict=True)], 2)
    torch.testing.assert_close(union.posterior(TOKENS), want)
    again = HMM.from_tensors(union.tensors(), union.kinds())
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


def test_queries_work_in_any_mode_of_torch(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=16)
    want = hmm.log_likelihood(TOKENS), hmm.posterior(TOKENS)
    with torch.inference_mode():
        torch.testing.assert_close((hmm.log_likelihood(TOKENS), hmm.posterior(TOKENS)), want)
    with torch.autocast("cpu"):
        torch.testing.assert_close((hmm.log_likelihood(TOKENS), hmm.posterior(TOKENS)), want)


def test_samples_are_possible(pair: tuple[str, str]) -> None:
    hmm = make(*pair, seed=17, zeros=0.4)
    tokens, states = hmm.sample(30, 4, torch.Generator().manual_seed(0))
    assert (hmm.joint_scan(tokens, states).log_likelihood > -torch.inf).all()
    drawn = hmm.posterior_sample(tokens, num=3, generator=torch.Generator().manual_seed(0))
    assert (hmm.joint_scan(tokens.repeat(3, 1), drawn.flatten(0, 1)).log_likelihood > -torch.inf).all()


def test_parts_of_different_sizes_are_refused(pair: tuple[str, str]) -> None:
    hmm = make(*pair)
    with pytest.raises(Exception, match="states"):
        HMM(hmm.log_start[:-1].log_softmax(0), hmm.transition, hmm.emission)
    with pytest.raises(Exception, match="dtype"):
        HMM(hmm.log_start.float(), hmm.transition, hmm.emission)
    assert isinstance(hmm.transition, Transition) and isinstance(hmm.emission, Emission)
