"""blocked_scan: the specification against enumeration of all paths, every implementation against the specification.

The Triton kernels run here in Triton's interpreter (tests/helpers/interpreter.py), in float32 only, since it has no
bfloat16 products; tests/gpu runs both on a GPU.
"""

from itertools import product
from typing import Any

import pytest
import torch
from helpers.blocked_scan import KERNEL_CASES, Case, assert_agrees, make_case, make_hmm, solve, two_regimes, weights
from helpers.interpreter import (
    implementations,
    needs_triton,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.oracle import Enumeration
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.ops.blocked_scan import Factors, api, blocked_scan, naive, scaled
from hmmlm.ops.blocked_scan.problem import lay_out

IMPLEMENTATIONS = implementations("scaled")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("size", "options"), KERNEL_CASES)
def test_agrees_with_the_specification(impl: str, size: tuple[int, ...], options: dict[str, Any]) -> None:
    assert_agrees(make_case(*size, **options, seed=3), impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tiles_of_a_few_steps_at_a_time(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = scaled
    if impl == "triton":
        from hmmlm.ops.blocked_scan import triton as module

        monkeypatch.setattr(module, "_PIECE", 2)  # segments of three positions and more are split
        monkeypatch.setattr(module, "_TILE_AT_ONCE", 0)  # tiles are read two rows at a time
        monkeypatch.setattr(module, "_IN_CHUNKS", {"chunk": 8, "warps": 4, "stages": 2})
    monkeypatch.setattr(module, "_TILE_BUDGET", 2 * 4 * 3 * 3)
    assert_agrees(make_case(2, 3, 4, 5, 2, 5, entered=True, ragged=True, restarts=True, seed=11), impl)


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
    only = blocked_scan(leaves.factors, leaves.tokens, entry=leaves.entry, impl="naive").log_likelihood
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
    factors = case.factors.to(torch.float32)._replace(block_of_word=torch.tensor([0, 0, 1, 1]))
    case = case._replace(factors=factors, tokens=torch.tensor([[0, 1, 2, 3], [2, 3, 3, 1]]))
    module = scaled
    if impl == "triton":
        from hmmlm.ops.blocked_scan import triton as module
    problem = lay_out(case.factors, case.tokens, None, None, None, torch.float32)
    assert module.forward(problem).suspect.tolist() == [True, False]
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
    factors = two_regimes(log_leak, -25.0).to(torch.float32)
    tokens = torch.tensor([[0] * 4 + [1] * 10, [0, 1] * 7, [0] * 14])
    assert_agrees(Case(tokens, factors), impl, tolerance=3e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_path_that_matters_only_later_is_left_out_of_a_graph(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph, which can inspect nothing, is simulated. The other sequence is as if alone."""
    monkeypatch.setattr(api, "capturing", lambda reference: True)
    case = Case(torch.tensor([[0] * 4 + [1] * 10, [0] * 14]), two_regimes(-90.0, -25.0).to(torch.float32))
    both = case.to("cpu", torch.float32)
    result = blocked_scan(both.factors, both.tokens, impl=impl)
    assert result.suspect is not None and result.suspect.tolist() == [True, False]
    assert result.log_likelihood[0] == -torch.inf and bool((result.carry.log_probs[0] == -torch.inf).all())
    alone = case._replace(tokens=case.tokens[1:]).to("cpu", torch.float32)
    want = blocked_scan(alone.factors, alone.tokens, impl="naive").log_likelihood
    torch.testing.assert_close(result.log_likelihood[1:], want)
    kept = torch.where(result.suspect, 0.0, result.log_likelihood).sum()
    got, expected = (
        torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
        for total, inputs in ((kept, both.inputs()), (want.sum(), alone.inputs()))
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_is_not_suspect_is_accurate(impl: str) -> None:
    """Inside a CUDA graph nothing is recomputed: there the bound alone has to find every sequence that lost mass."""
    module = scaled
    if impl == "triton":
        from hmmlm.ops.blocked_scan import triton as module
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.randint(2, (4, 12), generator=generator), torch.tensor([[0] * 6 + [1] * 6])])
    every = 2 if impl == "triton" else 1  # tests/gpu has all of them
    models = product((-5.0, -40.0, -60.0, -75.0, -90.0, -200.0)[::every], (-5.0, -15.0, -25.0, -40.0, -90.0)[::every])
    suspect = list[bool]()
    for log_leak, log_wrong in models:
        factors = two_regimes(log_leak, log_wrong)
        exact = naive.blocked_scan(factors, tokens, None, None, None).log_likelihood
        problem = lay_out(factors.to(torch.float32), tokens, None, None, None, torch.float32)
        result = module.forward(problem)
        trusted = ~result.suspect
        torch.testing.assert_close(result.log_likelihood[trusted].double(), exact[trusted], rtol=1e-5, atol=3e-5)
        suspect += result.suspect.tolist()
    assert 0 < sum(suspect) < len(suspect) / 2  # many models are too peaked for float32, but not all


@outside_interpreter
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"entered": True, "ragged": True, "restarts": True},
    ],
)
def test_steps_between_the_same_blocks_share_a_tile(
    blocks: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], scaled._make

    def recorded(*given: Any) -> Any:
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(scaled, "_WORTH_SHARING", 0)
    monkeypatch.setattr(scaled, "_make", recorded)
    case = make_case(blocks, 3, 4, 6, 4, 9, **options, seed=7)
    assert_agrees(case, "scaled")
    assert made and all(len(tiles.values) <= blocks**2 < case.tokens.numel() for tiles in made)


@outside_interpreter
def test_shared_tiles_are_summed_where_single_terms_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "_WORTH_SHARING", 0)
    u, w = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [-69.0]])  # the second state is hardly ever reached
    log_emission = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])  # and alone emits the second word
    start, block_of_word = torch.tensor([0.5, 0.5]).log(), torch.zeros(2, dtype=torch.long)
    factors = Factors(block_of_word, u, w, (u @ w.T).logsumexp(1), start, log_emission)
    case = Case(torch.tensor([0, 1] * 64).expand(8, -1), factors)
    gradients = []
    for impl in ("scaled", "naive"):
        leaves = case.to("cpu", torch.float32)
        result = blocked_scan(leaves.factors, leaves.tokens, impl=impl)  # type: ignore[arg-type]
        total = (1e7 * result.log_likelihood).sum()
        gradients.append(torch.autograd.grad(total, list(leaves.inputs().values())))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-2)


@outside_interpreter
@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_specification_agrees_with_enumeration(entered: bool, restarts: bool) -> None:
    case = make_case(3, 2, 3, 5, 2, 4, entered=entered, restarts=restarts, seed=2 * entered)
    case = case._replace(lengths=torch.tensor([4, 2]))
    result = solve(case, "naive")
    hmm = make_hmm(case.factors).dense()
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
        return blocked_scan(
            given.factors, given.tokens, entry=given.entry, restart=given.restart, impl="naive"
        ).log_likelihood

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
    blocks, kept, hidden, batch, steps = size
    assert_agrees(make_case(blocks, kept, hidden, blocks + 2, batch, steps, **options), "scaled")


@outside_interpreter
@pytest.mark.parametrize("impl", ["naive", "scaled"])
def test_two_windows_are_one(impl: Any) -> None:
    case = make_case(3, 4, 2, 7, 3, 6, seed=8)
    factors, tokens = case.factors, case.tokens
    whole = blocked_scan(factors, tokens, impl=impl)
    one = blocked_scan(factors, tokens[:, :4], impl=impl)
    left, entered = (factors.block_of_word[tokens[:, t]][:, None] * 4 + torch.arange(4) for t in (3, 4))
    moved = factors.u[left] @ factors.w[entered].mT - factors.log_normalizer[left][:, :, None]
    entry = (one.carry.log_probs[:, :, None] + moved).logsumexp(1)[:, None]
    two = blocked_scan(factors, tokens[:, 4:], entry=entry, impl=impl)
    torch.testing.assert_close(one.log_likelihood + two.log_likelihood, whole.log_likelihood)
    torch.testing.assert_close(two.carry.log_probs, whole.carry.log_probs)


@outside_interpreter
def test_expected_counts_add_up() -> None:
    """Every word is emitted once, every step leaves once, and there is one start."""
    case = make_case(3, 4, 2, 7, 1, 6, seed=9)._replace(tokens=torch.tensor([[0, 3, 3, 1, 0, 3]]))
    leaves = case.to("cpu", torch.float64)
    total = blocked_scan(leaves.factors, leaves.tokens).log_likelihood.sum()
    inputs = leaves.inputs()
    counts = dict(zip(inputs, torch.autograd.grad(total, list(inputs.values())), strict=True))
    words = torch.bincount(case.tokens[0], minlength=7).double()
    torch.testing.assert_close(counts["log_emission"].sum(1), words)
    assert counts["log_start"].sum().item() == pytest.approx(1)
    assert counts["log_normalizer"].sum().item() == pytest.approx(-5)


@outside_interpreter
def test_narrow_products_round_the_operands_only() -> None:
    case = make_case(3, 4, 8, 7, 3, 6, entered=True, seed=10)
    assert case.entry is not None
    case = case._replace(factors=case.factors.to(torch.float32), entry=case.entry.float())

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    factors = case.factors._replace(u=rounded(case.factors.u), w=rounded(case.factors.w))
    exact = case._replace(factors=factors)
    narrow, expected = solve(case, "scaled", product_dtype=torch.bfloat16), solve(exact, "naive")
    torch.testing.assert_close(narrow.scan.log_likelihood, expected.scan.log_likelihood, rtol=1e-5, atol=1e-5)
    for name, want in expected.gradients.items():
        assert (narrow.gradients[name] - want).norm() <= 1e-2 * want.norm()


@outside_interpreter
def test_words_beyond_the_length_are_ignored() -> None:
    case = make_case(2, 3, 2, 5, 2, 4, seed=2)
    padded = torch.cat([case.tokens, torch.full((2, 2), -1)], 1)
    one = blocked_scan(case.factors, padded, lengths=torch.tensor([4, 4]))
    two = blocked_scan(case.factors, case.tokens)
    torch.testing.assert_close(one.log_likelihood, two.log_likelihood)
    torch.testing.assert_close(one.carry.log_probs, two.carry.log_probs)


@outside_interpreter
@pytest.mark.parametrize(
    ("factors", "arguments", "message"),
    [
        ({"log_emission": torch.zeros(5, 4)}, {}, "6 states are not blocks of 4"),
        ({"w": torch.zeros(5, 2)}, {}, r"w is \[5, 2\], should be \[6, 2\]"),
        ({"log_start": torch.zeros(5)}, {}, r"log_start is \[5\], should be \[6\]"),
        ({"block_of_word": torch.zeros(4).long()}, {}, r"block_of_word is \[4\], should be \[5\]"),
        ({}, {"restart": torch.zeros(4).bool()}, r"restart is \[4\], should be \[2, 4\]"),
        ({}, {"entry": torch.ones(2, 3)}, r"entry is \[2, 3\], should be \[2, 1, 3\]"),
        ({}, {"tokens": torch.tensor([[0, 1], [2, -1]])}, r"token -1 at \[1, 1\] is not one of the 5 words"),
        ({}, {"tokens": torch.zeros(2, 0).long()}, r"tokens \[2, 0\] must be \[B, T\] with at least one"),
        ({}, {"tokens": torch.tensor([[0, 5]])}, r"token 5 at \[0, 1\]"),
        ({}, {"lengths": torch.tensor([4, 5])}, r"lengths \[4, 5\] are not all within 0 and 4"),
        ({}, {"impl": "cuda"}, "blocked_scan: unknown impl 'cuda': use auto, naive, scaled or triton"),
        ({}, {"product_dtype": torch.float16}, "float16 cannot represent probabilities: use bfloat16 or wider"),
    ],
)
def test_bad_input_is_named(factors: dict[str, Tensor], arguments: dict[str, Any], message: str) -> None:
    case = make_case(2, 3, 2, 5, 2, 4, seed=1)
    with pytest.raises(InputError, match=message):
        blocked_scan(case.factors._replace(**factors), **({"tokens": case.tokens} | arguments))


@outside_interpreter
@needs_triton
def test_float64_is_not_for_the_kernels() -> None:
    case = make_case(2, 3, 2, 5, 2, 4)
    with pytest.raises(InputError, match="do not support float64: use impl='scaled'"):
        blocked_scan(case.factors, case.tokens, impl="triton")


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)
