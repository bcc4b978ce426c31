"""Unions of HMMs beyond the fuzz: windows, restarts, files, sizes; their queries are in test_fuzz.py."""

import itertools

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm

from hmmlm.errors import InputError
from hmmlm.hmm import HMM, HiddenMarkovModel, UnionHMM
from hmmlm.hmm.union_scan import Segments

WORDS = 6


@pytest.fixture
def union() -> UnionHMM:
    """Return two blocked models with different blocks and a dense one."""
    parts: list[HiddenMarkovModel] = [
        random_blocked_hmm(2, 3, WORDS, seed=1),
        random_blocked_hmm(3, 2, WORDS, seed=2),
        HMM.from_probs(*random_hmm(3, WORDS, seed=3)),
    ]
    return UnionHMM.join(parts, [0.5, 0.2, 0.3])


def test_a_union_is_the_weighted_sum_of_its_components(union: UnionHMM) -> None:
    tokens = torch.tensor(list(itertools.product(range(WORDS), repeat=3)))
    parts = torch.stack([component.log_likelihood(tokens).exp() for component in union.components])
    together = union.log_likelihood(tokens).exp()
    torch.testing.assert_close(together, torch.tensor([0.5, 0.2, 0.3]).double() @ parts)
    assert float(together.sum()) == pytest.approx(1)
    torch.testing.assert_close(union.dense().log_likelihood(tokens).exp(), together)


@pytest.mark.parametrize("resets", [False, True])
def test_windows_with_a_carry_score_as_the_whole(union: UnionHMM, resets: bool) -> None:
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
    union = UnionHMM.join([only_a, only_b])
    tokens = torch.tensor([[0, 0, 1]])
    assert float(union.scan(tokens).log_likelihood) == -torch.inf
    again = torch.tensor([[False, False, True]])
    assert float(union.scan(tokens, restart=again).log_likelihood.exp()) == pytest.approx(0.25)


def test_the_carry_keeps_a_component_that_is_very_unlikely_so_far() -> None:
    parts = [HMM.from_probs([1.0], [[1.0]], [emission]) for emission in ([0.99, 0.01], [0.01, 0.99])]
    union, tokens = UnionHMM.join(parts), torch.tensor([[0] * 30 + [1] * 30])
    first = union.scan(tokens[:, :30])
    second = union.scan(tokens[:, 30:], carry=first.carry)  # float32 would have lost the second component
    total = float(first.log_likelihood + second.log_likelihood)
    assert total == pytest.approx(float(union.log_likelihood(tokens)), rel=1e-5)


def test_a_union_of_unions_is_flat(union: UnionHMM) -> None:
    both = UnionHMM.join([union, union.components[0]], [0.5, 0.5])
    assert len(both.components) == 4
    torch.testing.assert_close(both.log_weights.exp(), torch.tensor([0.25, 0.1, 0.15, 0.5]).double())


def test_tensors_of_a_file(union: UnionHMM) -> None:
    tensors = union.tensors()
    dims, indices = UnionHMM.layout(tensors)
    assert dims.keys() == tensors.keys()
    assert indices == ("components.0.blocked.block_of_word", "components.1.blocked.block_of_word")
    again = UnionHMM.from_tensors(tensors)
    again.validate()
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5]])
    assert torch.equal(again.log_likelihood(tokens), union.log_likelihood(tokens))
    assert [component.kind for component in again.components] == ["blocked", "blocked", "dense"]


def test_mistakes(union: UnionHMM) -> None:
    one, other = (HMM.from_probs(*random_hmm(2, words, seed=0)) for words in (3, 4))
    for error, parts, weights in [
        ("at least one HMM", [], []),
        ("component 1 has 4 words and component 0 3", [one, other], [0.5, 0.5]),
        ("weights sums to 0.9, not to one", [one, one], [0.5, 0.4]),
        ("3 weights for 2 models", [one, one], [0.5, 0.4, 0.1]),
        ("share one dtype", [one, one.to(torch.float32)], [0.5, 0.5]),
    ]:
        with pytest.raises(InputError, match=error):
            UnionHMM.join(parts, weights) if parts else UnionHMM(parts, torch.zeros(0))
    with pytest.raises(InputError, match="component 1 is a UnionHMM"):
        UnionHMM([union.components[0], union], torch.zeros(2).double())
    tensors = union.tensors()
    with pytest.raises(InputError, match="of kind 'odd'"):
        UnionHMM.layout(["components.0.odd.log_start"])
    with pytest.raises(InputError, match="not numbered"):
        UnionHMM.layout([name for name in tensors if not name.startswith("components.0")])
    broken = {**tensors, "components.2.dense.log_start": tensors["components.2.dense.log_start"] + 1}
    with pytest.raises(InputError, match="component 2: log_start sums to"):
        UnionHMM.from_tensors(broken).validate()


def test_nothing_of_the_size_of_all_transitions_is_made(union: UnionHMM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocked components without a table: queries hold one row per sequence and state at most."""
    monkeypatch.setattr("hmmlm.hmm.blocked._TABLE_CELLS", 0)
    monkeypatch.setattr(UnionHMM, "dense", lambda self: pytest.fail("a dense matrix"))
    blocked = UnionHMM.join(union.components[:2])
    tokens = torch.tensor([[0, 1, 2, 3]])
    assert blocked.posterior(tokens).shape == (1, 4, 12)
    counts = blocked.expected_counts(tokens)
    assert counts.transition.is_sparse and counts.emission.is_sparse
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
