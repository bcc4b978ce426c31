"""blocked_scan: the specification against all paths of the dense HMM, every implementation against the specification.

The triton kernels run here in Triton's interpreter (tests/interpreter.py), in float32 only, since it has no bfloat16
products; benchmarks/gpu_blocked_ops.py checks both on a GPU.
"""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IMPLEMENTATIONS, INTERPRETING, STARTS, run_in_the_interpreter
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.ops.blocked_scan import BlockedScan, Initial, blocked_scan
from hmmlm.ops.blocked_scan import torch as portable


class Case(NamedTuple):
    tokens: Tensor
    block_of_word: Tensor
    parameters: list[Tensor]  # u, w, log_normalizer, log_start, log_emission
    carried: list[Tensor]  # filtered, u, log_normalizer of `Initial`; empty without one
    lengths: Tensor | None = None
    restart: Tensor | None = None


def make_case(
    blocks: int, kept: int, h: int, words: int, batch: int, time: int, then: int = 0, ragged: bool = False,
    restarts: bool = False, together: bool = False, seed: int = 0,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    u, w = normal(blocks * kept, h), normal(blocks * kept, h)
    parameters = [u, w, (u @ w.T).logsumexp(1), normal(blocks * kept).log_softmax(0), normal(words, kept) - 2]
    carried = []
    if then:
        u_then = normal(1 if together else batch, then, h)  # together: all stood on the same states
        carried = [normal(batch, then).softmax(1), u_then, (u_then @ w.T).logsumexp(2)]
    lengths = integers(time + 1, batch) if ragged else None
    restart = integers(3, batch, time) == 0 if restarts else None
    block_of_word = torch.cat([torch.arange(blocks), integers(blocks, words - blocks)])
    return Case(integers(words, batch, time), block_of_word, parameters, carried, lengths, restart)


def run(impl: str, case: Case, **options: object) -> tuple[BlockedScan, list[Tensor]]:
    """Result and gradients (zero where there is none), in float64; the triton kernels compute in float32."""
    dtype = torch.float32 if impl == "triton" else case.parameters[0].dtype
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (*case.parameters, *case.carried)]
    initial = Initial(*leaves[5:]) if case.carried else None
    result = blocked_scan(
        case.tokens, case.block_of_word, *leaves[:5], initial=initial, lengths=case.lengths, restart=case.restart,
        impl=impl, **options,
    )  # fmt: skip
    weight = torch.linspace(-1, 2, len(result.log_likelihood), dtype=result.log_likelihood.dtype)
    loss = torch.where(result.log_likelihood > -torch.inf, weight * result.log_likelihood, result.log_likelihood).sum()
    if loss.requires_grad:  # not if every sequence is empty
        loss.backward()
    assert not result.suspect.any() and not result.final.requires_grad
    return result, [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def assert_agrees(impl: str, case: Case, tolerance: float = 1e-10) -> None:
    tolerance = 3e-5 if impl == "triton" else tolerance
    (result, gradients), (expected, exact) = run(impl, case), run("naive", case)
    for got, want in zip([*result[:2], *gradients], [*expected[:2], *exact], strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def over_all_paths(case: Case, b: int) -> tuple[Tensor, Tensor]:
    """log p(x) and p(z_last | x) over all states of the equivalent dense HMM, by enumeration."""
    u, w, log_normalizer, log_start, log_emission = case.parameters
    states, kept = u.shape[0], log_emission.shape[1]
    log_transition = u @ w.T - log_normalizer[:, None]
    log_emissions = torch.full((states, len(case.block_of_word)), -torch.inf, dtype=u.dtype)
    for word, block in enumerate(case.block_of_word.tolist()):
        log_emissions[block * kept : (block + 1) * kept, word] = log_emission[word]
    first = log_start
    if case.carried and not (case.restart is not None and case.restart[b, 0]):
        filtered, u_then, normalizer_then = (x[b if len(x) > 1 else 0] for x in case.carried)
        first = (filtered[:, None] * (u_then @ w.T - normalizer_then[:, None]).exp()).sum(0).log()
    words = case.tokens[b, : case.tokens.shape[1] if case.lengths is None else int(case.lengths[b])].tolist()
    paths = torch.tensor(list(itertools.product(range(states), repeat=len(words))))
    score = first[paths[:, 0]] + log_emissions[paths[:, 0], words[0]]
    for t in range(1, len(words)):
        again = case.restart is not None and bool(case.restart[b, t])
        score = score + (log_start[paths[:, t]] if again else log_transition[paths[:, t - 1], paths[:, t]])
        score = score + log_emissions[paths[:, t], words[t]]
    ends = torch.stack([score[paths[:, -1] == z].logsumexp(0) for z in range(states)])
    last = int(case.block_of_word[words[-1]])
    return score.logsumexp(0), (ends - score.logsumexp(0)).exp()[last * kept : (last + 1) * kept]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("size", "ragged", "restarts"), [
    ((3, 4, 5, 9, 3, 4, 0), False, False), ((2, 5, 3, 6, 3, 3, 7), True, True), ((2, 3, 17, 6, 2, 3, 2), False, True),
    ((1, 1, 1, 2, 2, 3, 1), False, False), ((2, 2, 2, 4, 2, 3, 0), True, True),
])  # fmt: skip
def test_agrees_with_the_specification(impl: str, size: tuple[int, ...], ragged: bool, restarts: bool) -> None:
    assert_agrees(impl, make_case(*size, ragged, restarts, seed=3))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("blocks", [1, 2])
def test_steps_between_the_same_blocks_share_a_tile(impl: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], portable._make

    def recorded(*given: Any) -> Any:
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(portable, "_WORTH_SHARING", 0)
    monkeypatch.setattr(portable, "_make", recorded)
    for then, ragged, together in ((0, False, False), (4, True, True), (2, True, False), (3, False, True)):
        case = make_case(blocks, 3, 4, 6, 4, 9, then, ragged, ragged, together, seed=7)
        assert_agrees(impl, case)
        groups = blocks + (len(case.carried[1]) if then else 0)
        assert all(len(tiles.values) <= blocks * groups < case.tokens.numel() for tiles in made)
        made.clear()


def test_shared_tiles_are_summed_where_single_terms_are_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "_WORTH_SHARING", 0)
    u, w = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [-69.0]])  # the second state is hardly ever reached
    log_emission = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])  # and the second word is said by no other
    given = [u, w, (u @ w.T).logsumexp(1), torch.tensor([0.5, 0.5]).log(), log_emission]
    tokens = torch.tensor([0, 1] * 64).expand(8, -1)
    gradients = []
    for impl in ("torch", "naive"):
        leaves = [x.clone().requires_grad_() for x in given]
        result = blocked_scan(tokens, torch.zeros(2, dtype=torch.long), *leaves, impl=impl)  # type: ignore[arg-type]
        (1e7 * result.log_likelihood).sum().backward()
        gradients.append([x.grad for x in leaves])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tiles_of_a_few_steps_at_a_time(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(2, 3, 4, 5, 2, 5, 4, ragged=True, restarts=True, seed=11)
    module = portable
    if impl == "triton":
        from hmmlm.ops.blocked_scan import triton as module

        monkeypatch.setattr(module, "_PIECE", 2)  # segments of three positions and more are then in pieces
        monkeypatch.setattr(module, "_TILE_AT_ONCE", 0)  # and tiles are read two rows at a time
        monkeypatch.setattr(module, "_IN_CHUNKS", {"chunk": 8, "warps": 4, "stages": 2})
    monkeypatch.setattr(module, "_TILE_BUDGET", 2 * 4 * 3 * 3)
    assert_agrees(impl, case)


@pytest.mark.parametrize("impl", ["naive", *IMPLEMENTATIONS])
def test_impossible_sequences_have_no_gradient(impl: str) -> None:
    case = make_case(2, 3, 2, 5, 3, 4, 3, seed=5)
    case.parameters[4][4] = -torch.inf  # nobody says word 4
    case.parameters[4][3, 1:] = -torch.inf
    case.tokens[:] = torch.tensor([[0, 1, 4, 2], [3, 2, 3, 1], [4, 0, 1, 4]])
    result, gradients = run(impl, case)
    assert result.log_likelihood.isinf().tolist() == [True, False, True]
    assert (result.final[[0, 2]] == 0).all()
    alone = case._replace(tokens=case.tokens[1:2], carried=[x[1:2] for x in case.carried])
    leaves = [x.clone().requires_grad_() for x in (*alone.parameters, *alone.carried)]
    only = blocked_scan(alone.tokens, alone.block_of_word, *leaves[:5], initial=Initial(*leaves[5:]), impl="naive")
    (0.5 * only.log_likelihood).sum().backward()  # the weight of the second of three in `run`
    for k, (got, leaf) in enumerate(zip(gradients, leaves, strict=True)):
        want = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close((got[1:2] if k >= 5 else got).double(), want, rtol=3e-5, atol=3e-5)
        assert k < 5 or (got[[0, 2]] == 0).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_mass_that_vanishes_is_found_again_in_log_space(impl: str) -> None:
    """The second and third word of the first sequence can only follow by transitions of probability e^−200."""
    case = make_case(2, 2, 2, 4, 2, 4, seed=6)
    case.parameters[2][:2] += 200
    case = case._replace(
        parameters=[x.float() for x in case.parameters], block_of_word=torch.tensor([0, 0, 1, 1]),
        tokens=torch.tensor([[0, 1, 2, 3], [2, 3, 3, 1]]),
    )  # fmt: skip
    from hmmlm.ops.blocked_scan.problem import lay_out

    module = portable
    if impl == "triton":
        from hmmlm.ops.blocked_scan import triton as module
    problem = lay_out(case.tokens, case.block_of_word, *case.parameters, None, None, None, torch.float32)
    assert module.forward(problem).suspect.tolist() == [True, False]
    assert run(impl, case)[0].log_likelihood[0] < -400
    assert_agrees(impl, case, tolerance=3e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_follows_may_reverse_what_came_before(impl: str) -> None:
    """Backward probabilities here grow by e^60 a step: the ratio form must not overflow."""
    case = make_case(1, 2, 1, 2, 1, 4)
    log_stay = torch.tensor([[0.0, -60.0], [-60.0, 0.0]], dtype=torch.float64)
    u, w = torch.eye(2, dtype=torch.float64), log_stay.T.contiguous()
    emission = torch.tensor([[0.0, -30.0], [-25.0, 0.0]], dtype=torch.float64)
    start = torch.tensor([0.0, -40.0], dtype=torch.float64)
    case = case._replace(
        parameters=[u, w, torch.zeros(2, dtype=torch.float64), start, emission], tokens=torch.tensor([[0, 0, 1, 1]]),
        block_of_word=torch.zeros(2, dtype=torch.long),
    )  # fmt: skip
    assert_agrees(impl, case)


if not INTERPRETING:

    @pytest.mark.parametrize(("then", "restarts"), [(0, False), (3, False), (0, True), (2, True)])
    def test_specification_is_the_sum_over_all_paths(then: int, restarts: bool) -> None:
        case = make_case(3, 2, 3, 5, 2, 4, then, restarts=restarts, seed=then)
        case = case._replace(lengths=torch.tensor([4, 2]))
        result, gradients = run("naive", case)
        leaves = [x.clone().requires_grad_() for x in (*case.parameters, *case.carried)]
        alike = case._replace(parameters=leaves[:5], carried=leaves[5:])
        expected = [over_all_paths(alike, b) for b in range(2)]
        torch.testing.assert_close(result.log_likelihood, torch.stack([x for x, _ in expected]))
        torch.testing.assert_close(result.final, torch.stack([x for _, x in expected]))
        (-expected[0][0] + 2 * expected[1][0]).backward()  # the weights in `run`
        for got, leaf in zip(gradients, leaves, strict=True):
            torch.testing.assert_close(got, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def test_any_size(data: st.DataObject) -> None:
        blocks, kept, h, batch, time = (data.draw(st.integers(1, 4)) for _ in range(5))
        flags = [data.draw(st.booleans()) for _ in range(2)]
        then, seed = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 999))
        assert_agrees("torch", make_case(blocks, kept, h, blocks + 2, batch, time, then, *flags, seed=seed))

    def test_two_windows_are_one() -> None:
        case = make_case(3, 4, 2, 7, 3, 6, seed=8)
        u, _, log_normalizer, *_ = case.parameters
        whole = blocked_scan(case.tokens, case.block_of_word, *case.parameters)
        one = blocked_scan(case.tokens[:, :4], case.block_of_word, *case.parameters)
        rows = case.block_of_word[case.tokens[:, 3]][:, None] * 4 + torch.arange(4)
        carried = Initial(one.final, u[rows], log_normalizer[rows])
        two = blocked_scan(case.tokens[:, 4:], case.block_of_word, *case.parameters, initial=carried)
        torch.testing.assert_close(one.log_likelihood + two.log_likelihood, whole.log_likelihood)
        torch.testing.assert_close(two.final, whole.final)

    def test_expected_counts_add_up() -> None:
        """Every word is emitted once, every step leaves once, and the start happens once."""
        case = make_case(3, 4, 2, 7, 1, 6, seed=9)._replace(tokens=torch.tensor([[0, 3, 3, 1, 0, 3]]))
        leaves = [x.clone().requires_grad_() for x in case.parameters]
        blocked_scan(case.tokens, case.block_of_word, *leaves).log_likelihood.sum().backward()
        counts = torch.bincount(case.tokens[0], minlength=7).double()
        torch.testing.assert_close(leaves[4].grad.sum(1), counts)
        torch.testing.assert_close(leaves[3].grad.sum(), torch.tensor(1.0, dtype=torch.float64))
        torch.testing.assert_close(leaves[2].grad.sum(), torch.tensor(-5.0, dtype=torch.float64))

    def test_narrow_products_round_the_operands_and_nothing_else() -> None:
        case = make_case(3, 4, 8, 7, 3, 6, 3, seed=10)
        case = case._replace(parameters=[x.float() for x in case.parameters], carried=[x.float() for x in case.carried])
        rounded = case._replace(parameters=[*(x.bfloat16().float() for x in case.parameters[:2]), *case.parameters[2:]])
        rounded.carried[1] = rounded.carried[1].bfloat16().float()
        narrow, gradients = run("torch", case, product_dtype=torch.bfloat16)
        exact, expected = run("naive", rounded)
        torch.testing.assert_close(narrow.log_likelihood, exact.log_likelihood, rtol=1e-5, atol=1e-5)
        for got, want in zip(gradients, expected, strict=True):
            assert (got - want).norm() <= 1e-2 * want.norm()

    def bad(**changes: object) -> dict[str, object]:
        case = make_case(2, 3, 2, 5, 2, 4, seed=1)
        names = ("u", "w", "log_normalizer", "log_start", "log_emission")
        arguments = {"tokens": case.tokens, "block_of_word": case.block_of_word}
        return {**arguments, **dict(zip(names, case.parameters, strict=True)), **changes}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"log_emission": torch.zeros(5, 4)}, "6 states are not blocks of 4"),
            ({"w": torch.zeros(5, 2)}, r"w is \[5, 2\], should be \[6, 2\]"),
            ({"block_of_word": torch.zeros(4).long()}, r"block_of_word is \[4\], should be \[5\]"),
            ({"restart": torch.zeros(4).bool()}, r"restart is \[4\], should be \[2, 4\]"),
            ({"initial": Initial(*map(torch.ones, [(2, 3), (2, 3, 1), (2, 3)]))}, r"initial.u is \[2, 3, 1\]"),
            ({"tokens": torch.tensor([[0, 1], [2, -1]])}, r"token -1 at \[1, 1\] is not one of the 5 words"),
            ({"tokens": torch.zeros(2, 0).long()}, r"tokens \[2, 0\] must be \[B, T\] with at least one"),
            ({"tokens": torch.tensor([[0, 5]])}, r"token 5 at \[0, 1\]"),
            ({"lengths": torch.tensor([4, 5])}, r"lengths \[4, 5\] are not all within 0 and 4"),
            ({"impl": "cuda"}, "impl 'cuda' is unknown"),
            ({"impl": "triton"}, "no float64"),
        ],
    )
    def test_bad_input_is_named(changes: dict[str, object], message: str) -> None:
        with pytest.raises(InputError, match=message):
            blocked_scan(**bad(**changes))

    def test_words_beyond_the_length_are_not_looked_at() -> None:
        case = make_case(2, 3, 2, 5, 2, 4, seed=2)
        padded = torch.cat([case.tokens, torch.full((2, 2), -1)], 1)
        lengths = torch.tensor([4, 4])
        one = blocked_scan(padded, case.block_of_word, *case.parameters, lengths=lengths)
        two = blocked_scan(case.tokens, case.block_of_word, *case.parameters)
        torch.testing.assert_close(one[:2], two[:2])


if STARTS:

    def test_triton_kernels_in_the_interpreter() -> None:
        run_in_the_interpreter(__file__)
