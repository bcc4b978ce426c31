"""The triton kernels of the dense scan against log space in float64, and what happens where nothing can be looked at.

The kernels run in Triton's interpreter, in a process of their own (it has to be chosen before Triton is first
imported); benchmarks/dense_step.py runs them on a GPU. Where Triton is not installed they are not covered.
"""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import test_ops_compiled as compiled
import torch
from interpreter import INTERPRETING, STARTS, run_in_the_interpreter
from oracle import random_hmm
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.ops import scan as ops
from hmmlm.ops.scan import Evidence, Parameters, function
from hmmlm.ops.scan import torch as scaled
from hmmlm.parameterization import Scalar

NEG_INF = -math.inf


def problem(
    states: int, words: int, batch: int, steps: int, *, carried: bool = False, restarts: bool = False,
    sharpness: float = 1.0, zeros: float = 0.0, seed: int = 0,
) -> tuple[Parameters, Evidence]:
    """Parameters in float64 whose float32 is what the kernels see, and tokens of which some are missing."""
    generator = torch.Generator().manual_seed(seed)
    parameters = Parameters(*(p.log().float().double() for p in random_hmm(states, words, seed, sharpness, zeros)))
    tokens = torch.randint(-1, words, (batch, steps), generator=generator)
    initial = torch.rand(batch, states, generator=generator, dtype=torch.float64) if carried else None
    if initial is not None:
        initial = (initial / initial.sum(1, keepdim=True)).float().double()
    restart = torch.rand(batch, steps, generator=generator) < 0.3 if restarts else None
    return parameters, Evidence(tokens, None, initial, restart)


def solve(parameters: Parameters, evidence: Evidence, impl: Any, dtype: torch.dtype) -> tuple[ops.Scan, list[Tensor]]:
    """Scan and gradients of a weighted sum over sequences, in float64; impossible sequences weigh nothing."""
    initial = None if evidence.initial is None else evidence.initial.to(dtype).requires_grad_()
    inputs = [p.to(dtype, copy=True).requires_grad_() for p in parameters]
    result = ops.scan(*inputs, *evidence._replace(initial=initial), impl=impl)
    weight = torch.linspace(-1, 2, evidence.tokens.shape[0], dtype=dtype)
    weight = torch.where(result.log_likelihood == NEG_INF, 0.0, weight)
    inputs += [] if initial is None else [initial]
    gradients = torch.autograd.grad(result.log_likelihood, inputs, weight, allow_unused=True, materialize_grads=True)
    return result, [g.double() for g in gradients]


def assert_agrees(parameters: Parameters, evidence: Evidence, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    got, gradients = solve(parameters, evidence, "triton", torch.float32)
    want, expected = solve(parameters, evidence, "naive", torch.float64)
    assert got.suspect is not None and not got.suspect.any()  # none outside of a graph
    torch.testing.assert_close(got.log_likelihood.double(), want.log_likelihood, rtol=rtol, atol=atol)
    possible = want.log_likelihood > NEG_INF
    torch.testing.assert_close(got.final.double()[possible], want.final[possible], rtol=rtol, atol=atol)
    for name, a, b in zip(("start", "transition", "emission", "initial"), gradients, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def sticky(log_leak: float, log_wrong: float) -> Parameters:
    """Two states that hardly ever change, each with its own word, hardly ever emitting the other's."""
    stay, right = math.log1p(-math.exp(log_leak)), math.log1p(-math.exp(log_wrong))
    transition = torch.tensor([[stay, log_leak], [log_leak, stay]], dtype=torch.float64)
    emission = torch.tensor([[right, log_wrong], [log_wrong, right]], dtype=torch.float64)
    return Parameters(torch.tensor([0.5, 0.5], dtype=torch.float64).log(), transition, emission)


@pytest.fixture(params=["kernel", "library"] if INTERPRETING else ["torch"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as few states have them, all in a kernel, and as many have them, products by the library."""
    if INTERPRETING:
        from hmmlm.ops.scan import triton as fast

        monkeypatch.setattr(fast, "_LIBRARY_STATES", 1 if request.param == "library" else 2**20)


both = pytest.mark.usefixtures("products")


UNLIKELY_FUTURE = torch.tensor([[0] * 4 + [1] * 10, [0] * 14])


def only_first(log_leak: float) -> Parameters:
    """`sticky`, but starting in the first state."""
    return sticky(log_leak, -30.0)._replace(log_start=torch.tensor([0.0, NEG_INF], dtype=torch.float64))


if INTERPRETING:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    @pytest.fixture(autouse=True)
    def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter keeps bfloat16 as integers, and multiplies those: make it multiply the numbers."""
        inner = InterpreterBuilder.create_dot

        def number(x: Any) -> Any:
            import triton.language as tl

            if x.dtype.scalar != tl.bfloat16:
                return x
            return TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

        def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
            return inner(self, number(a), number(b), *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

    @both
    @pytest.mark.parametrize(
        ("size", "options"),
        [
            ((17, 11, 5, 7), {}),
            ((17, 11, 4, 5), {"carried": True}),
            ((16, 8, 9, 5), {"restarts": True}),
            ((33, 70, 3, 6), {"carried": True, "restarts": True}),
            ((1, 1, 1, 2), {"carried": True}),
            ((40, 130, 17, 2), {"zeros": 0.4}),
            ((70, 12, 2, 4), {"carried": True, "zeros": 0.4, "restarts": True}),
        ],
    )
    def test_agrees_with_log_space(size: tuple[int, int, int, int], options: dict[str, Any]) -> None:
        assert_agrees(*problem(*size, **options))

    @pytest.mark.parametrize("tile", [(16, 32), (128, 64)])
    def test_agrees_whatever_the_tile(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        from hmmlm.ops.scan import triton as fast

        monkeypatch.setattr(fast, "_TILES", (tile,))
        assert_agrees(*problem(75, 20, 18, 3, carried=True, restarts=True, seed=3))

    @both
    @pytest.mark.parametrize(("seed", "sharpness"), [(0, 30.0), (1, 30.0), (2, 8.0)])
    def test_peaked_parameters_agree_with_log_space(seed: int, sharpness: float) -> None:
        parameters, evidence = problem(12, 9, 4, 10, sharpness=sharpness, carried=seed == 1, restarts=seed == 2,
                                       seed=seed)
        assert_agrees(parameters, evidence, rtol=2e-3, atol=2e-4)

    @both
    @pytest.mark.parametrize(("log_leak", "log_wrong"), [(-50.0, -30.0), (-120.0, -120.0), (NEG_INF, -30.0)])
    def test_mass_that_underflows_is_noticed(log_leak: float, log_wrong: float) -> None:
        """Evidence for one state, then more for the other: the paths that win were lost long before."""
        tokens = torch.tensor([[0] * 5 + [1] * 9, [0, 1] * 7, [0] * 14, [-1] * 14])
        assert_agrees(sticky(log_leak, log_wrong), Evidence(tokens), rtol=1e-3, atol=1e-3)

    @both
    @pytest.mark.parametrize("log_leak", [-200.0, NEG_INF])
    def test_a_future_for_states_that_the_past_excludes(log_leak: float) -> None:
        """The filter loses nothing, but seen from the end the only state there is explains nothing."""
        assert_agrees(only_first(log_leak), Evidence(UNLIKELY_FUTURE), rtol=1e-3, atol=1e-3)

    @both
    def test_bfloat16_products() -> None:
        parameters, evidence = problem(24, 20, 3, 6, carried=True, restarts=True, seed=5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, gradients = solve(parameters, evidence, "triton", torch.float32)
        want, expected = solve(parameters, evidence, "naive", torch.float64)
        torch.testing.assert_close(got.log_likelihood.double(), want.log_likelihood, rtol=3e-3, atol=1e-2)
        for a, b in zip(gradients, expected, strict=True):
            assert float((a - b).norm() / b.norm()) < 0.02
        single, _ = solve(parameters, evidence, "triton", torch.float32)
        assert not torch.equal(single.log_likelihood, got.log_likelihood)  # it was bfloat16

    @both
    def test_twice_through_the_same_graph() -> None:
        parameters, evidence = problem(9, 6, 3, 5)
        leaves = [p.float().requires_grad_() for p in parameters]
        total = ops.scan(*leaves, *evidence, impl="triton").log_likelihood.sum()
        one = torch.autograd.grad(total, leaves, retain_graph=True)
        for a, b in zip(one, torch.autograd.grad(total, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    @both
    def test_without_gradients_windows_add_up() -> None:
        parameters, evidence = problem(20, 7, 4, 9)
        narrow = [p.float() for p in parameters]
        whole = ops.scan(*narrow, evidence.tokens, impl="triton")
        first = ops.scan(*narrow, evidence.tokens[:, :4], impl="triton")
        second = ops.scan(*narrow, evidence.tokens[:, 4:], initial=first.final, impl="triton")
        torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
        torch.testing.assert_close(second.final, whole.final)

    def test_what_the_kernels_lack_is_said() -> None:
        parameters, evidence = problem(4, 3, 2, 5)
        with pytest.raises(InputError, match="no ragged lengths: use impl='torch'"):
            narrow = [p.float() for p in parameters]
            ops.scan(*narrow, evidence.tokens, torch.tensor([5, 2]), impl="triton")
        with pytest.raises(InputError, match="no float64"):
            ops.scan(*parameters, evidence.tokens, impl="triton")


# Inside a CUDA graph, where nothing may be looked at on the way: pretended, which is what the functions can tell.

IMPL: Any = "triton" if INTERPRETING else "torch"


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "capturing", lambda reference: True)


def leaves(parameters: Parameters) -> list[Tensor]:
    return [p.float().requires_grad_() for p in parameters]


@both
def test_suspects_have_no_gradient_and_the_others_theirs(capturing: None) -> None:
    tokens = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]])  # in the second, mass is lost that no state has again
    inputs = leaves(sticky(NEG_INF, NEG_INF))
    result = ops.scan(*inputs, tokens, impl=IMPL)
    assert result.suspect is not None and result.suspect.tolist() == [False, True]
    torch.testing.assert_close(result.final, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    got = torch.autograd.grad(torch.where(result.suspect, 0.0, result.log_likelihood).sum(), inputs)
    alone = leaves(sticky(NEG_INF, NEG_INF))
    want = torch.autograd.grad(ops.scan(*alone, tokens[:1], impl="naive").log_likelihood.sum(), alone)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@both
@pytest.mark.parametrize("log_leak", [-50.0, NEG_INF])
def test_a_future_for_excluded_states_in_a_graph(log_leak: float, capturing: None) -> None:
    """Without a leak the kernels cannot tell: suspect, and no gradient. What they trust is right."""
    inputs = leaves(only_first(log_leak))
    result = ops.scan(*inputs, UNLIKELY_FUTURE, impl=IMPL)
    suspects = [IMPL == "triton" and log_leak == NEG_INF, False]
    assert result.suspect is not None and result.suspect.tolist() == suspects
    got = torch.autograd.grad(result.log_likelihood.sum(), inputs)
    alone = leaves(only_first(log_leak))
    want = ops.scan(*alone, UNLIKELY_FUTURE[~result.suspect], impl="naive").log_likelihood.sum()
    for a, b in zip(got, torch.autograd.grad(want, alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@both
@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_ordinary_and_peaked_models_are_not_suspected(sharpness: float, capturing: None) -> None:
    """Text of the model itself, as it is during training."""
    hmm = HMM(*(p.log().float() for p in random_hmm(24, 30, 1, sharpness)))
    tokens, _ = hmm.sample(5, 9, torch.Generator().manual_seed(0))
    result = ops.scan(*hmm.parameters, tokens, impl=IMPL)
    assert result.suspect is not None and not result.suspect.any()
    torch.testing.assert_close(result.log_likelihood, hmm.log_likelihood(tokens), rtol=1e-4, atol=1e-4)


@both
@pytest.mark.parametrize("seed", range(2))
def test_nothing_that_is_not_finite_reaches_a_parameter(seed: int, capturing: None) -> None:
    """Logits of a standard deviation of 60, and words that nothing explains."""
    model = Scalar(13, 10, scale=60.0, generator=torch.Generator().manual_seed(seed))
    tokens = torch.randint(0, 10, (5, 9), generator=torch.Generator().manual_seed(seed))
    hmm = model()
    hmm.impl = IMPL
    model.forward = lambda: hmm  # type: ignore[method-assign]
    result = model.scan(tokens)
    suspects = int(result.suspect.sum())
    assert int(model.skipped) == suspects > 0
    assert result.log_likelihood.isfinite().all() and result.final.isfinite().all()
    torch.testing.assert_close(result.final.sum(1), torch.ones(5))
    result.log_likelihood.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()
    exactly = hmm.detach().to(torch.float64)
    exactly.impl = "naive"
    kept = ~result.suspect
    torch.testing.assert_close(
        result.log_likelihood[kept].double(), exactly.log_likelihood(tokens)[kept], rtol=1e-4, atol=1e-3
    )


if not INTERPRETING:

    def test_a_margin_wide_enough_for_the_proof() -> None:
        """Up to SURE_RATIO, what is not suspected is not doubtful either."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            hmm = HMM(*(p.log().float() for p in random_hmm(5, 4, int(torch.randint(999, (), generator=generator)), 6)))
            chain = scaled.prepare(hmm.parameters, Evidence(torch.randint(4, (9, 30), generator=generator)),
                                   torch.float32)
            result = scaled.forward(chain)
            ratio = (hmm.log_transition.amax(0) - hmm.log_transition.amin(0)).amax()
            if ratio < math.log(scaled.SURE_RATIO):
                trusted = ~scaled.suspicious(result)
                assert not (scaled.doubtful(hmm.parameters, chain, result) & trusted).any()


    def test_the_benchmark_of_a_step_runs(tmp_path: Path) -> None:
        script = Path(__file__).parents[1] / "benchmarks" / "dense_step.py"
        out = tmp_path / "step.json"
        sizes = ["--states", "6", "--batch", "3", "--length", "5", "--vocab", "12", "--steps", "1"]
        options = ["--compare", "--profile", "--precision", "32-true", "--out", str(out)]
        runpy.run_path(str(script))["main"]([*sizes, *options])
        found = json.loads(out.read_text())
        assert max(found["errors"].values()) < 1e-5
        assert [(row["model"], row["impl"]) for row in found["rows"]] == [
            (model, impl) for model in ("scalar", "linear", "em") for impl in ("auto", "torch")]  # fmt: skip
        profiles = out.with_suffix(".txt").read_text().split("\n\n")
        for kind, text in zip(("scalar", "linear", "em"), profiles, strict=False):
            heading, columns, *lines = text.splitlines()
            spent = [float(line.split()[0]) for line in lines]
            assert heading == f"{kind}, 6 states" and columns.split()[1] == "count"
            assert len(spent) > 10 and spent == sorted(spent, reverse=True) and max(map(len, lines)) <= 89
        assert all(row["tokens_per_second"] == pytest.approx(15 / row["ms"] * 1e3) for row in found["rows"])


if STARTS:

    def test_triton_kernels_in_the_interpreter() -> None:
        """Everything above but the last, with triton."""
        run_in_the_interpreter(__file__)

    @pytest.mark.parametrize("states", [1024, 1984])
    def test_products_are_waited_for(states: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a Hopper GPU, with the tiles that 200 sequences have there."""
        from hmmlm.ops.scan import triton as fast

        for dtype, name in ((torch.int16, "*i16"), (torch.uint8, "*u8")):
            monkeypatch.setitem(compiled.TYPES, dtype, name)
        launches = compiled.record(monkeypatch, fast)
        parameters = Parameters(torch.zeros(states), torch.zeros(states, states), torch.zeros(states, 64))
        chain = fast.prepare(parameters, Evidence(torch.zeros(200, 3, dtype=torch.long)), torch.bfloat16)
        fast.accumulate(chain, fast.forward(chain), torch.ones(200), torch.Size((states, 64)))
        last = {launch[0].__name__: launch for launch in launches}  # the first step has no product
        compiled.check(list(last.values()), "step_kernel", "emission_counts_kernel")
