"""Unions of HMMs beyond the contract and the fuzz: their parts, files, sizes and messages."""

import pytest
import torch
from helpers.oracle import random_blocked_hmm, random_hmm, with_gradients

from hmmlm.emissions import UnionEmission
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.ops import pieces
from hmmlm.scan.composition import kinds_of, layout, parameters_of, read_parts
from hmmlm.scan.union_scan import Segments
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


def test_tensors_of_a_file(union: HMM) -> None:
    tensors, kinds = union.tensors(), kinds_of(union)
    dims, indices = layout(kinds)
    assert dims.keys() == tensors.keys()
    assert indices == ["emission.0.block_of_word", "emission.1.block_of_word"]
    again = HMM(*read_parts(tensors, kinds))
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
    tensors, kinds = union.tensors(), kinds_of(union)
    with pytest.raises(InputError, match=r"transition.0.kind is 'odd'; this hmmlm reads dense, factored"):
        layout(kinds | {"transition.0.kind": "odd"})
    with pytest.raises(InputError, match=r"emission.2.kind is 'odd'; this hmmlm reads categorical, blocked"):
        layout(kinds | {"emission.2.kind": "odd"})
    with pytest.raises(InputError, match=r"emission.kind is None; this hmmlm reads"):
        layout({name: kind for name, kind in kinds.items() if name.startswith("transition")})
    with pytest.raises(InputError, match=r"2 components with emission.kind, 3 with the other kind"):
        HMM(*read_parts(tensors, {name: kind for name, kind in kinds.items() if name != "emission.2.kind"}))
    with pytest.raises(InputError, match=r"it needs the kinds of its components, transition\.0\.kind"):
        HMM(*read_parts(tensors, {name: kind for name, kind in kinds.items() if ".0." not in name}))
    broken = tensors | {"emission.2.log_probs": tensors["emission.2.log_probs"] + 1}
    with pytest.raises(InputError, match=r"component 2: emission.log_probs row 0 sums to"):
        HMM(*read_parts(broken, kinds)).validate()
    broken = tensors | {"log_start": tensors["log_start"] + 1}
    with pytest.raises(InputError, match="log_start sums to"):
        HMM(*read_parts(broken, kinds)).validate()


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
    monkeypatch.setattr(HMM, "dense", lambda self: pytest.fail("a dense matrix"))
    blocked = HMM.union(union.components[:2])
    tokens = torch.tensor([[0, 1, 2, 3]])
    with pieces.limit(0):
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


@pytest.mark.parametrize("impossible", [0, 2])
def test_an_impossible_segment_leaves_no_gradient_of_the_others(impossible: int) -> None:
    emission = torch.tensor([[0.3, 0.7, 0.0], [0.6, 0.4, 0.0]], dtype=torch.float64)  # no state emits word 2
    start, transition, _ = random_hmm(2, 3, seed=0)
    union = with_gradients(HMM.union([HMM.from_probs(start, transition, p) for p in (emission, emission.flip(0))]))
    tokens = torch.tensor([[0, 1, 0, 1]])
    tokens[0, impossible] = 2
    total = union.scan(tokens, restart=torch.tensor([[False, False, True, False]])).log_likelihood
    assert total.item() == -torch.inf
    for gradient in torch.autograd.grad(total.sum(), list(parameters_of(union).values()), materialize_grads=True):
        assert bool((gradient == 0).all())
