"""Scans of blocked HMMs: the specification against enumeration of all paths, both implementations against it.

The Triton kernels run here in Triton's interpreter (tests/helpers/interpreter.py), in float32 only, since it has no
bfloat16 products; tests/gpu runs both on a GPU.
"""

from itertools import product
from typing import Any

import pytest
import torch
from helpers import naive_blocked
from helpers.blocked_scan import (
    IN_PIECES,
    KERNEL_CASES,
    Case,
    assert_agrees,
    make_case,
    scan,
    solve,
    two_regimes,
    weights,
)
from helpers.interpreter import (
    implementations,
    in_interpreter,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.oracle import Enumeration
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hmmlm.hmm import HMM
from hmmlm.models.base import from_factors
from hmmlm.ops import pieces
from hmmlm.ops.blocked_scan import Factors, blocked_scan
from hmmlm.ops.blocked_scan.problem import lay_out
from hmmlm.scan import steps
from hmmlm.scan.recursions import observe, sort_batch

IMPLEMENTATIONS = implementations("generic")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("size", "options"), KERNEL_CASES)
def test_agrees_with_the_specification(impl: str, size: tuple[int, ...], options: dict[str, Any]) -> None:
    assert_agrees(make_case(*size, **options, seed=3), impl)


@in_interpreter
@pytest.mark.parametrize("size", IN_PIECES)
def test_tiles_of_two_steps_at_a_time_by_triton(size: tuple[int, ...]) -> None:
    case = make_case(*size, entered=True, ragged=True, restarts=True, seed=11)
    with pieces.limit(2 * len(case.tokens) * size[1] ** 2):
        assert_agrees(case, "triton")


@outside_interpreter
def test_steps_without_the_tiles_of_the_batch() -> None:
    case = make_case(2, 3, 4, 5, 2, 5, entered=True, ragged=True, restarts=True, next_words=2, seed=11)
    with pieces.limit(8):  # less than a tile
        assert_agrees(case, "generic")


@pytest.mark.parametrize("impl", ["naive", *IMPLEMENTATIONS])
def test_impossible_sequences_have_no_gradient(impl: str) -> None:
    case = make_case(2, 3, 2, 5, 3, 4, entered=True, seed=5)
    case.factors.log_emission[4] = -torch.inf  # no state emits word 4
    case.factors.log_emission[3, 1:] = -torch.inf
    case.tokens[:] = torch.tensor([[0, 1, 4, 2], [3, 2, 3, 1], [4, 0, 1, 4]])
    result = solve(case, impl)
    assert result.scan.log_likelihood.isinf().tolist() == [True, False, True]
    assert (result.scan.carry.log_probs[[0, 2]] == -torch.inf).all()
    assert case.entry is not None
    alone = case._replace(tokens=case.tokens[1:2], entry=case.entry[1:2])
    leaves = alone.to("cpu", torch.float64)
    only = scan(leaves, "naive").log_likelihood
    inputs = leaves.inputs()
    expected = torch.autograd.grad(weights(3)[1] * only.sum(), list(inputs.values()), materialize_grads=True)
    for (name, got), want in zip(result.gradients.items(), expected, strict=True):
        if name == "entry":
            assert (got[[0, 2]] == 0).all()
            got = got[1:2]
        torch.testing.assert_close(got.double(), want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_sequences_whose_mass_underflows_are_recomputed(impl: str) -> None:
    """The second and third word of the first sequence follow only by transitions of probability e^−200."""
    case = make_case(2, 2, 2, 4, 2, 4, seed=6)
    case.factors.log_normalizer[:2] += 200
    factors = narrow(case.factors)._replace(block_of_word=torch.tensor([0, 0, 1, 1]))
    case = case._replace(factors=factors, tokens=torch.tensor([[0, 1, 2, 3], [2, 3, 3, 1]]))
    if impl == "triton":
        suspect = blocked_scan(case.factors, case.tokens).suspect
        assert suspect is not None and suspect.tolist() == [True, False]
    assert solve(case, impl).scan.log_likelihood[0] < -400
    assert_agrees(case, impl, tolerance=3e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_later_words_may_reverse_the_evidence_of_earlier_ones(impl: str) -> None:
    """Backward probabilities grow by e^60 per step here: the ratio of probabilities must not overflow."""
    double = {"dtype": torch.float64}
    factors = Factors(
        block_of_word=torch.zeros(2, dtype=torch.long),
        u=torch.eye(2, **double),
        w=torch.tensor([[0.0, -60.0], [-60.0, 0.0]], **double),
        log_normalizer=torch.zeros(2, **double),
        log_start=torch.tensor([0.0, -40.0], **double),
        log_emission=torch.tensor([[0.0, -30.0], [-25.0, 0.0]], **double),
    )
    assert_agrees(Case(torch.tensor([[0, 0, 1, 1]]), factors), impl)


@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "naive"])
@pytest.mark.parametrize("impossible", [0, 2])
def test_an_impossible_segment_leaves_no_gradient_of_the_others(impl: str, impossible: int) -> None:
    case = make_case(2, 2, 2, 4, 1, 4, seed=1)
    case.factors.log_emission[3] = -torch.inf
    tokens, restart = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[False, False, True, False]])
    tokens[0, impossible] = 3
    result = solve(case._replace(tokens=tokens, restart=restart), impl)
    assert result.scan.log_likelihood.item() == -torch.inf
    for gradient in result.gradients.values():
        assert bool((gradient == 0).all())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("log_leak", [-10.0, -90.0, -400.0])
def test_a_path_that_matters_only_later_is_not_lost(impl: str, log_leak: float) -> None:
    """After four words, the state of the later words is below the range of float32; every single mass is above it."""
    factors = narrow(two_regimes(log_leak, -25.0))
    tokens = torch.tensor([[0] * 4 + [1] * 10, [0, 1] * 7, [0] * 14])
    assert_agrees(Case(tokens, factors), impl, tolerance=3e-5)


@in_interpreter
def test_triton_reports_a_path_that_matters_only_later() -> None:
    """So it is in a graph, which can inspect nothing. The other sequence is as if alone."""
    case = Case(torch.tensor([[0] * 4 + [1] * 10, [0] * 14]), narrow(two_regimes(-90.0, -25.0)))
    both = case.to("cpu", torch.float32)
    result = blocked_scan(both.factors, both.tokens)
    assert result.suspect is not None and result.suspect.tolist() == [True, False]
    assert result.log_likelihood[0] == -torch.inf and bool((result.carry.log_probs[0] == -torch.inf).all())
    alone = case._replace(tokens=case.tokens[1:]).to("cpu", torch.float32)
    want = scan(alone, "naive").log_likelihood
    torch.testing.assert_close(result.log_likelihood[1:], want)
    kept = torch.where(result.suspect, 0.0, result.log_likelihood).sum()
    got, expected = (
        torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
        for total, inputs in ((kept, both.inputs()), (want.sum(), alone.inputs()))
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@in_interpreter
def test_what_is_not_suspect_is_accurate_by_triton() -> None:
    """Inside a CUDA graph nothing is recomputed: there the bound alone has to find every sequence that lost mass."""
    from hmmlm.ops.blocked_scan import triton as module

    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.randint(2, (4, 12), generator=generator), torch.tensor([[0] * 6 + [1] * 6])])
    models = product((-5.0, -60.0, -90.0), (-5.0, -25.0, -90.0))  # tests/gpu has more of them
    suspect = list[bool]()
    for log_leak, log_wrong in models:
        factors = two_regimes(log_leak, log_wrong)
        exact = naive_blocked.blocked_scan(factors, tokens, None, None, None).log_likelihood
        problem = lay_out(narrow(factors), tokens, None, None, None, torch.float32)
        result = module.forward(problem)
        trusted = ~result.suspect
        torch.testing.assert_close(result.log_likelihood[trusted].double(), exact[trusted], rtol=1e-5, atol=3e-5)
        suspect += result.suspect.tolist()
    assert 0 < sum(suspect) < len(suspect) / 2  # many models are too peaked for float32, but not all


def narrow(factors: Factors) -> Factors:
    """Return factors in float32."""
    return Factors(factors.block_of_word, *(value.float() for value in factors[1:]))


@outside_interpreter
@pytest.mark.parametrize("leak", [-90.0, -400.0])
def test_words_of_a_sequence_that_underflows_are_scored(leak: float) -> None:
    factors = narrow(two_regimes(leak, -25.0))
    tokens = torch.tensor([[0] * 4 + [1] * 10, [0] * 14])
    case = Case(tokens, factors, next_words=torch.stack([tokens, 1 - tokens], 2))
    assert_agrees(case, "generic", tolerance=3e-5)
    same = solve(case._replace(next_words=tokens[..., None]), "generic").scan
    assert same.next_word_score is not None
    torch.testing.assert_close(same.next_word_score, same.log_likelihood)


@outside_interpreter
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("options", [{}, {"entered": True, "ragged": True, "restarts": True}])
def test_steps_between_the_same_blocks_share_a_tile(blocks: int, options: dict[str, Any]) -> None:
    case = make_case(blocks, 3, 4, 6, 8, 9, **options, seed=7)
    assert_agrees(case, "generic")
    hmm = from_factors(case.factors)
    batch = sort_batch(hmm, case.tokens, case.lengths)
    shared = steps.between(hmm.transition, batch, observe(hmm, batch)[0])
    assert isinstance(shared, steps.TileSteps) and len(shared.tiles) <= blocks**2


@outside_interpreter
def test_shared_tiles_are_summed_where_single_terms_overflow() -> None:
    u, w = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [-69.0]])  # the second state is hardly ever reached
    log_emission = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])  # and alone emits the second word
    start, block_of_word = torch.tensor([0.5, 0.5]).log(), torch.zeros(2, dtype=torch.long)
    factors = Factors(block_of_word, u, w, (u @ w.T).logsumexp(1), start, log_emission)
    case = Case(torch.tensor([0, 1] * 64).expand(8, -1), factors)
    gradients = []
    for impl in ("generic", "naive"):
        leaves = case.to("cpu", torch.float32)
        total = (1e7 * scan(leaves, impl).log_likelihood).sum()
        gradients.append(torch.autograd.grad(total, list(leaves.inputs().values())))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-2)


@outside_interpreter
def test_the_score_of_words_has_a_gradient_without_that_of_the_text() -> None:
    case, gradients = make_case(2, 3, 4, 5, 2, 5, entered=True, next_words=2, seed=12), []
    for impl in ("generic", "naive"):
        leaves = case.to("cpu", torch.float64)
        score = scan(leaves, impl).next_word_score
        assert score is not None
        gradients.append(torch.autograd.grad(score.sum(), list(leaves.inputs().values()), materialize_grads=True))
    torch.testing.assert_close(*gradients)


@outside_interpreter
def test_impossible_words_in_place_of_tokens_count_as_zero() -> None:
    case = make_case(2, 3, 4, 5, 2, 4, next_words=1, seed=13)
    case.factors.log_emission[4] = -torch.inf  # no state emits word 4
    case, words = case._replace(tokens=case.tokens.clamp(max=3)), case.next_words
    assert words is not None
    words.clamp_(max=3)
    leaves = case.to("cpu", torch.float64)
    parts = [scan(leaves._replace(lengths=torch.tensor([n, n])), "naive").next_word_score for n in (1, 3, 4)]
    first, most, whole = (score for score in parts if score is not None)
    want = most[0] + whole[1] - first[1]
    words[0, 3], words[1, 0] = 4, 4
    score = scan(leaves._replace(next_words=words), "generic").next_word_score
    assert score is not None
    torch.testing.assert_close(score.sum(), want)
    got, expected = (
        torch.autograd.grad(total, list(leaves.inputs().values()), materialize_grads=True)
        for total in (score.sum(), want)
    )
    torch.testing.assert_close(got, expected)


@outside_interpreter
@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_specification_agrees_with_enumeration(entered: bool, restarts: bool) -> None:
    case = make_case(3, 2, 3, 5, 2, 4, entered=entered, restarts=restarts, seed=2 * entered)
    case = case._replace(lengths=torch.tensor([4, 2]))
    result = solve(case, "naive")
    hmm = from_factors(case.factors).dense()
    for row, size in enumerate((4, 2)):
        tokens = case.tokens[row, :size].tolist()
        starts = [False] * size if case.restart is None else case.restart[row, :size].tolist()
        reference = hmm
        if case.entry is not None and not starts[0]:  # the distribution that the first word is emitted from
            first_states = int(case.factors.block_of_word[tokens[0]]) * 2 + torch.arange(2)
            entered_at = torch.full_like(hmm.log_start, -torch.inf).index_copy(0, first_states, case.entry[row, 0])
            if not any(starts):
                reference = HMM(entered_at, hmm.transition, hmm.emission)
            else:  # restarts use the start distribution: enumerate the stretch before the first of them alone
                first = starts.index(True)
                before = Enumeration(HMM(entered_at, hmm.transition, hmm.emission), tokens[:first])
                after = Enumeration(hmm, tokens[first:], restart=starts[first:])
                expected = before.log_likelihood() + after.log_likelihood()
                torch.testing.assert_close(result.scan.log_likelihood[row], expected)
                assert_carry(case, result.scan.carry.log_probs[row].exp(), tokens[-1], after)
                continue
        oracle = Enumeration(reference, tokens, restart=starts)
        torch.testing.assert_close(result.scan.log_likelihood[row], oracle.log_likelihood())
        assert_carry(case, result.scan.carry.log_probs[row].exp(), tokens[-1], oracle)


def assert_carry(case: Case, probs: Tensor, word: int, oracle: Enumeration) -> None:
    """The carry is the posterior of the last state, over the block of the last word."""
    kept = case.factors.log_emission.shape[1]
    block = int(case.factors.block_of_word[word])
    torch.testing.assert_close(probs, oracle.posterior()[-1, block * kept : (block + 1) * kept])


@outside_interpreter
def test_gradients_of_the_specification_agree_with_finite_differences() -> None:
    case = make_case(2, 2, 2, 4, 2, 3, entered=True, restarts=True, seed=4).to("cpu", torch.float64)
    names = list(case.inputs())

    def log_likelihood(*values: Tensor) -> Tensor:
        given = case.with_inputs(dict(zip(names, values, strict=True)))
        return scan(given, "naive").log_likelihood

    assert torch.autograd.gradcheck(log_likelihood, tuple(case.inputs().values()))


@outside_interpreter
@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(*[st.integers(1, 4)] * 5),
    entered=st.booleans(),
    ragged=st.booleans(),
    restarts=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_size(size: tuple[int, int, int, int, int], **options: Any) -> None:
    blocks, kept, hidden, batch, length = size
    assert_agrees(make_case(blocks, kept, hidden, blocks + 2, batch, length, **options), "generic")


@outside_interpreter
@pytest.mark.parametrize("impl", ["naive", "generic"])
def test_two_windows_are_one(impl: str) -> None:
    case = make_case(3, 4, 2, 7, 3, 6, seed=8)
    factors, tokens = case.factors, case.tokens
    whole, one = scan(case, impl), scan(case._replace(tokens=tokens[:, :4]), impl)
    left, entered = (factors.block_of_word[tokens[:, t]][:, None] * 4 + torch.arange(4) for t in (3, 4))
    moved = factors.u[left] @ factors.w[entered].mT - factors.log_normalizer[left][:, :, None]
    entry = (one.carry.log_probs[:, :, None] + moved).logsumexp(1)[:, None]
    two = scan(case._replace(tokens=tokens[:, 4:], entry=entry), impl)
    torch.testing.assert_close(one.log_likelihood + two.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(two.carry.log_probs, whole.carry.log_probs)


@outside_interpreter
def test_expected_counts_add_up() -> None:
    """Every word is emitted once, every step leaves once, and there is one start."""
    case = make_case(3, 4, 2, 7, 1, 6, seed=9)._replace(tokens=torch.tensor([[0, 3, 3, 1, 0, 3]]))
    leaves = case.to("cpu", torch.float64)
    total = scan(leaves, "generic").log_likelihood.sum()
    inputs = leaves.inputs()
    counts = dict(zip(inputs, torch.autograd.grad(total, list(inputs.values())), strict=True))
    words = torch.bincount(case.tokens[0], minlength=7).double()
    torch.testing.assert_close(counts["log_emission"].sum(1), words)
    assert counts["log_start"].sum().item() == pytest.approx(1)
    assert counts["log_normalizer"].sum().item() == pytest.approx(-5)


@outside_interpreter
def test_words_beyond_the_length_are_ignored() -> None:
    case = make_case(2, 3, 2, 5, 2, 4, seed=2)
    padded = torch.cat([case.tokens, torch.full((2, 2), -1)], 1)
    one = scan(case._replace(tokens=padded, lengths=torch.tensor([4, 4])), "generic")
    two = scan(case, "generic")
    torch.testing.assert_close(one.log_likelihood, two.log_likelihood)
    torch.testing.assert_close(one.carry.log_probs, two.carry.log_probs)


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)
