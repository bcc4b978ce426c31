"""Unions of HMMs beyond the fuzz: windows, restarts, files, sizes; their queries are in test_fuzz.py."""

import itertools

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm, with_gradients

from hmmlm.emissions import UnionEmission
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.hmm.composition import layout
from hmmlm.hmm.union_scan import Segments
from hmmlm.transitions import BlockDiagonal

WORDS = 6


@pytest.fixture
def union() -> HMM:
    """Return two blocked models with different blocks and a dense one."""
    parts = [
        random_blocked_hmm(2, 3, WORDS, seed=1),
        random_blocked_hmm(3, 2, WORDS, seed=2),
        HMM.from_probs(*random_hmm(3, WORDS, seed=3)),
    ]
    return HMM.union(parts, [0.5, 0.2, 0.3])


def test_a_union_is_the_weighted_sum_of_its_components(union: HMM) -> None:
    tokens = torch.tensor(list(itertools.product(range(WORDS), repeat=3)))
    parts = torch.stack([component.log_likelihood(tokens).exp() for component in union.components])
    together = union.log_likelihood(tokens).exp()
    torch.testing.assert_close(together, torch.tensor([0.5, 0.2, 0.3]).double() @ parts)
    assert float(together.sum()) == pytest.approx(1)
    torch.testing.assert_close(union.dense().log_likelihood(tokens).exp(), together)


@pytest.mark.parametrize("resets", [False, True])
def test_windows_with_a_carry_score_as_the_whole(union: HMM, resets: bool) -> None:
    tokens = union.sample(4, 24, torch.Generator().manual_seed(0))[0]
    restart = torch.zeros_like(tokens, dtype=torch.bool)
    restart[:, 1:] = tokens[:, :-1] == 0
    assert restart.any()
    given = restart if resets else None
    carry, total = None, torch.zeros(4, dtype=torch.float64)
    for first in range(0, 24, 5):
        window = slice(first, first + 5)
        result = union.scan(tokens[:, window], None, carry, None if given is None else given[:, window])
        carry, total = result.carry, total + result.log_likelihood
    want = union.dense().scan(tokens, None, None, given)
    torch.testing.assert_close(total, want.log_likelihood)
    assert carry is not None and carry.states is not None
    spread = torch.zeros(4, union.states, dtype=torch.float64).scatter(1, carry.states, carry.log_probs.exp())
    torch.testing.assert_close(spread, want.carry.log_probs.exp())


def test_after_a_restart_a_component_is_chosen_again() -> None:
    only_a, only_b = (HMM.from_probs([1.0], [[1.0]], [emission]) for emission in ([1.0, 0.0], [0.0, 1.0]))
    union = HMM.union([only_a, only_b])
    tokens = torch.tensor([[0, 0, 1]])
    assert float(union.scan(tokens).log_likelihood) == -torch.inf
    again = torch.tensor([[False, False, True]])
    assert float(union.scan(tokens, restart=again).log_likelihood.exp()) == pytest.approx(0.25)


def test_the_carry_keeps_a_component_that_is_very_unlikely_so_far() -> None:
    parts = [HMM.from_probs([1.0], [[1.0]], [emission]) for emission in ([0.99, 0.01], [0.01, 0.99])]
    union, tokens = HMM.union(parts), torch.tensor([[0] * 30 + [1] * 30])
    first = union.scan(tokens[:, :30])
    second = union.scan(tokens[:, 30:], carry=first.carry)  # float32 would have lost the second component
    total = float(first.log_likelihood + second.log_likelihood)
    assert total == pytest.approx(float(union.log_likelihood(tokens)), rel=1e-5)


def test_a_window_with_missing_tokens_is_continued() -> None:
    """The carry of a blocked component is then over all of its states, not those of one block."""
    parts = [random_blocked_hmm(2, 2, WORDS, seed=1), random_blocked_hmm(2, 3, WORDS, seed=2)]
    union, tokens = HMM.union(parts), torch.tensor([[-1, -1, 1], [3, -1, 2], [0, 1, 5]])
    first = union.scan(tokens[:, :2])
    second = union.scan(tokens[:, 2:], carry=first.carry)
    torch.testing.assert_close(first.log_likelihood + second.log_likelihood, union.dense().log_likelihood(tokens))


def test_a_union_of_unions_is_flat(union: HMM) -> None:
    both = HMM.union([union, union.components[0]], [0.5, 0.5])
    assert len(both.components) == 4
    torch.testing.assert_close(both.log_weights.exp(), torch.tensor([0.25, 0.1, 0.15, 0.5]).double())


def test_components_and_weights_follow_from_the_start_distribution(union: HMM) -> None:
    torch.testing.assert_close(union.log_weights.exp(), torch.tensor([0.5, 0.2, 0.3]).double())
    single = union.components[2]
    assert single.components == (single,) and single.log_weights.tolist() == [pytest.approx(0.0)]
    for part in union.components:
        part.validate()
    pairs = zip(union.log_weights, union.components, strict=True)
    torch.testing.assert_close(torch.cat([weight + part.log_start for weight, part in pairs]), union.log_start)


def test_a_component_of_weight_zero_adds_nothing() -> None:
    parts = [random_blocked_hmm(2, 2, WORDS, seed=1), HMM.from_probs(*random_hmm(3, WORDS, seed=3))]
    union, tokens = HMM.union(parts, [1.0, 0.0]), torch.tensor([[0, 1, 2, 3]])
    union.validate()
    torch.testing.assert_close(union.log_likelihood(tokens), parts[0].log_likelihood(tokens))
    assert union.log_weights.tolist() == [pytest.approx(0.0), -torch.inf]
    leaves = with_gradients(union)
    for gradient in torch.autograd.grad(leaves.log_likelihood(tokens).sum(), list(leaves.parameters().values())):
        assert bool(gradient.isfinite().all())


def test_emission_counts_are_one_matrix_or_those_of_each_model() -> None:
    """Those of blocked models are [V, k], which do not make one matrix, even if all have the same shape."""
    blocked, dense = (
        [random_blocked_hmm(2, 3, WORDS, seed) for seed in (1, 2)],
        HMM.from_probs(*random_hmm(2, WORDS, 3)),
    )
    square = random_blocked_hmm(1, WORDS, WORDS, 4)  # as many states in a block as words
    tokens = torch.tensor([[0, 1, 2, 3], [2, 2, 5, 1]])
    assert HMM.union([dense, dense]).expected_counts(tokens).emission.shape == (4, WORDS)
    for parts in (blocked, [blocked[0], dense], [square, dense]):
        counts = HMM.union(parts).expected_counts(tokens).emission
        assert isinstance(counts, tuple)
        assert [own.shape for own in counts] == [part.emission.tensors()["log_probs"].shape for part in parts]
        assert float(sum(own.sum() for own in counts)) == pytest.approx(8)


def test_tensors_of_a_file(union: HMM) -> None:
    tensors, kinds = union.tensors(), union.kinds()
    dims, indices = layout(kinds)
    assert dims.keys() == tensors.keys()
    assert indices == ["emission.0.block_of_word", "emission.1.block_of_word"]
    again = HMM.from_tensors(tensors, kinds)
    again.validate()
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5]])
    assert torch.equal(again.log_likelihood(tokens), union.log_likelihood(tokens))
    blocked, dense = "factored × blocked", "dense × categorical"
    assert [part.kind for part in again.components] == [blocked, blocked, dense]


def test_mistakes(union: HMM) -> None:
    one, other = (HMM.from_probs(*random_hmm(2, words, seed=0)) for words in (3, 4))
    for error, parts, weights in [
        ("a union needs at least one model", [], []),
        ("component 1 has 4 words and component 0 3", [one, other], [0.5, 0.5]),
        ("weights sums to 0.9, not to one", [one, one], [0.5, 0.4]),
        ("3 weights for 2 models", [one, one], [0.5, 0.4, 0.1]),
        ("share one dtype", [one, one.to(torch.float32)], [0.5, 0.5]),
    ]:
        with pytest.raises(InputError, match=error):
            HMM.union(parts, weights)


def test_files_of_unions_that_are_wrong_are_named(union: HMM) -> None:
    tensors, kinds = union.tensors(), union.kinds()
    with pytest.raises(InputError, match=r"transition.0.kind is 'odd'; this hmmlm reads dense, factored"):
        layout(kinds | {"transition.0.kind": "odd"})
    with pytest.raises(InputError, match=r"emission.2.kind is 'odd'; this hmmlm reads categorical, blocked"):
        layout(kinds | {"emission.2.kind": "odd"})
    with pytest.raises(InputError, match=r"emission.kind is None; this hmmlm reads"):
        layout({name: kind for name, kind in kinds.items() if name.startswith("transition")})
    with pytest.raises(InputError, match=r"2 components with emission.kind, 3 with the other kind"):
        HMM.from_tensors(tensors, {name: kind for name, kind in kinds.items() if name != "emission.2.kind"})
    with pytest.raises(InputError, match=r"it needs the kinds of its components, transition\.0\.kind"):
        HMM.from_tensors(tensors, {name: kind for name, kind in kinds.items() if ".0." not in name})
    broken = tensors | {"emission.2.log_probs": tensors["emission.2.log_probs"] + 1}
    with pytest.raises(InputError, match=r"component 2: emission.log_probs row 0 sums to"):
        HMM.from_tensors(broken, kinds).validate()
    broken = tensors | {"log_start": tensors["log_start"] + 1}
    with pytest.raises(InputError, match="log_start sums to"):
        HMM.from_tensors(broken, kinds).validate()


def test_parts_that_do_not_fit_each_other_are_named() -> None:
    """The number of states in all fits, but not that of each component; or vocabularies differ."""
    large, small = (HMM.from_probs(*random_hmm(states, 3, seed=0)) for states in (3, 2))
    start = torch.full((5,), 0.2, dtype=torch.float64).log()
    crossed = UnionEmission([small.emission, large.emission])
    with pytest.raises(InputError, match="states"):
        HMM(start, BlockDiagonal([large.transition, small.transition]), crossed)
    with pytest.raises(InputError, match="union"):
        HMM(start, BlockDiagonal([large.transition, small.transition]), HMM.random(5, 3).to(torch.float64).emission)
    with pytest.raises(InputError, match="words"):
        UnionEmission([small.emission, HMM.random(2, 4).to(torch.float64).emission])


def test_nothing_of_the_size_of_all_transitions_is_made(union: HMM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocked components without a table: queries hold one row per sequence and state at most."""
    monkeypatch.setattr("hmmlm.transitions.tiled.TABLE_CELLS", 0)
    monkeypatch.setattr(HMM, "dense", lambda self: pytest.fail("a dense matrix"))
    blocked = HMM.union(union.components[:2])
    tokens = torch.tensor([[0, 1, 2, 3]])
    assert blocked.posterior(tokens).shape == (1, 4, 12)
    counts = blocked.expected_counts(tokens)
    assert counts.transition.is_sparse and [own.shape for own in counts.emission] == [(WORDS, 3), (WORDS, 2)]
    assert float(counts.transition.to_dense().sum()) == pytest.approx(3)


def test_segments_cut_at_restarts() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    restart = torch.tensor([[False, False, True, False], [True, False, False, True]])
    cut = Segments.of(tokens, torch.tensor([4, 3]), restart)
    assert cut.tokens.tolist() == [[1, 2, -1], [3, 4, -1], [5, 6, 7]]
    assert cut.lengths is not None and cut.lengths.tolist() == [2, 2, 3]
    assert cut.row.tolist() == [0, 0, 1] and cut.last.tolist() == [1, 2]
    assert cut.restart is not None and cut.restart[:, 0].tolist() == [False, True, True]
    assert not cut.restart[:, 1:].any()
