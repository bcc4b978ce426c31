"""The Triton kernels of the dense scan against log space in float64, and the scan inside a CUDA graph.

The kernels run in Triton's interpreter (tests/helpers/interpreter.py); tests/gpu runs them on a GPU.
"""

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import compiled
from helpers.dense_scan import (
    EXCLUDED_FUTURE,
    KERNEL_CASES,
    assert_agrees,
    make_problem,
    only_first,
    scan,
    solve,
    sticky,
)
from helpers.interpreter import (
    INTERPRETING,
    multiply_bfloat16,
    needs_triton,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.oracle import matrices, random_hmm

from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.models.scalar import Scalar
from hmmlm.ops.common import Impl
from hmmlm.ops.scan import Evidence, Parameters, api, scaled
from hmmlm.scan import generic_scan

NEG_INF = -math.inf
IMPL: Impl = "triton" if INTERPRETING else "scaled"


both = pytest.mark.usefixtures("products")


def leaves(parameters: Parameters) -> Parameters:
    return Parameters(*(p.float().requires_grad_() for p in parameters))


if INTERPRETING:

    @pytest.fixture(autouse=True)
    def products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
        multiply_bfloat16(monkeypatch)

    @both
    @pytest.mark.parametrize(("size", "options"), KERNEL_CASES)
    def test_agrees_with_log_space(size: tuple[int, int, int, int], options: dict[str, Any]) -> None:
        assert_agrees(*make_problem(*size, **options), "triton")

    @pytest.mark.parametrize("tile", [(16, 32), (128, 64)])
    def test_agrees_for_every_tile(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        from hmmlm.ops.scan import triton

        monkeypatch.setattr(triton, "_TILES", (tile,))
        assert_agrees(*make_problem(75, 20, 18, 2, carried=True, restarts=True, seed=3), "triton")

    @pytest.mark.parametrize("options", [{"sharpness": 30.0}, {"sharpness": 8.0, "carried": True, "restarts": True}])
    def test_sharp_parameters_agree_with_log_space(options: dict[str, Any]) -> None:
        assert_agrees(*make_problem(12, 9, 4, 6, **options), "triton", rtol=2e-3, atol=2e-4)

    @both
    @pytest.mark.parametrize(("log_leak", "log_wrong"), [(-50.0, -30.0), (-120.0, -120.0), (NEG_INF, -30.0)])
    def test_sequences_whose_mass_underflows_are_recomputed(log_leak: float, log_wrong: float) -> None:
        """Evidence for one state, then more for the other: the paths that win were lost long before."""
        tokens = torch.tensor([[0] * 3 + [1] * 5, [0, 1] * 4, [0] * 8, [-1] * 8])
        assert_agrees(sticky(log_leak, log_wrong), Evidence(tokens), "triton", rtol=1e-3, atol=1e-3)

    @both
    @pytest.mark.parametrize("log_leak", [-200.0, NEG_INF])
    def test_a_future_that_only_excluded_states_explain(log_leak: float) -> None:
        """The filter loses nothing, but in the backward recursion the only possible state explains nothing."""
        assert_agrees(only_first(log_leak), Evidence(EXCLUDED_FUTURE), "triton", rtol=1e-3, atol=1e-3)

    @both
    def test_bfloat16_products() -> None:
        problem = make_problem(24, 20, 3, 4, carried=True, restarts=True, seed=5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = solve(*problem, "triton", torch.float32)
        want = solve(*problem, "naive")
        log_likelihood = got.scan.log_likelihood
        torch.testing.assert_close(log_likelihood.double(), want.scan.log_likelihood, rtol=3e-3, atol=1e-2)
        for name, expected in want.gradients.items():
            assert float((got.gradients[name] - expected).norm() / expected.norm()) < 0.02
        single = solve(*problem, "triton", torch.float32)
        assert not torch.equal(single.scan.log_likelihood, log_likelihood)  # it was bfloat16

    def test_two_backward_passes_give_the_same_gradients() -> None:
        parameters, evidence = make_problem(9, 6, 3, 5)
        inputs = leaves(parameters)
        total = scan(inputs, evidence, "triton").log_likelihood.sum()
        one = torch.autograd.grad(total, inputs, retain_graph=True)
        for a, b in zip(one, torch.autograd.grad(total, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    @both
    def test_windows_add_up_without_gradients() -> None:
        parameters, evidence = make_problem(20, 7, 4, 9)
        narrow, tokens = Parameters(*(p.float() for p in parameters)), evidence.tokens
        whole = scan(narrow, Evidence(tokens), "triton")
        first = scan(narrow, Evidence(tokens[:, :4]), "triton")
        second = scan(narrow, Evidence(tokens[:, 4:], carry=first.carry.log_probs), "triton")
        torch.testing.assert_close(first.log_likelihood + second.log_likelihood, whole.log_likelihood)
        torch.testing.assert_close(second.carry.log_probs.exp(), whole.carry.log_probs.exp())


# --- inside a CUDA graph, where nothing may be inspected: simulated, by the check that the functions make ---


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (api, scaled, generic_scan):
        monkeypatch.setattr(module, "capturing", lambda reference: True)


@both
@pytest.mark.usefixtures("capturing")
def test_suspect_sequences_have_no_gradient() -> None:
    tokens = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]])  # the second is impossible
    inputs = leaves(sticky(NEG_INF, NEG_INF))
    result = scan(inputs, Evidence(tokens), IMPL)
    assert result.suspect is not None and result.suspect.tolist() == [False, True]
    carried = result.carry.log_probs.exp().tolist()
    assert carried == [pytest.approx([1.0, 0.0]), pytest.approx([0.5, 0.5])]  # the second starts again
    got = torch.autograd.grad(torch.where(result.suspect, 0.0, result.log_likelihood).sum(), inputs)
    alone = leaves(sticky(NEG_INF, NEG_INF))
    want = torch.autograd.grad(scan(alone, Evidence(tokens[:1]), "naive").log_likelihood.sum(), alone)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@both
@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("log_leak", [-50.0, NEG_INF])
def test_a_future_that_only_excluded_states_explain_in_a_graph(log_leak: float) -> None:
    """Without a leak the kernels report the sequence as suspect; sequences that are not suspect are exact."""
    inputs = leaves(only_first(log_leak))
    result = scan(inputs, Evidence(EXCLUDED_FUTURE), IMPL)
    expected = [IMPL == "triton" and log_leak == NEG_INF, False]
    assert result.suspect is not None and result.suspect.tolist() == expected
    got = torch.autograd.grad(result.log_likelihood.sum(), inputs)
    alone = leaves(only_first(log_leak))
    want = scan(alone, Evidence(EXCLUDED_FUTURE[~result.suspect]), "naive").log_likelihood.sum()
    for a, b in zip(got, torch.autograd.grad(want, alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_text_of_the_model_itself_is_not_suspect(sharpness: float) -> None:
    hmm = HMM(*(p.log().float() for p in random_hmm(24, 30, 1, sharpness)))
    tokens, _ = hmm.sample(5, 6, torch.Generator().manual_seed(0))
    result = scan(matrices(hmm), Evidence(tokens), IMPL)
    assert result.suspect is not None and not result.suspect.any()
    expected = scan(matrices(hmm), Evidence(tokens), "naive")
    torch.testing.assert_close(result.log_likelihood, expected.log_likelihood, rtol=1e-4, atol=1e-4)


@both
@pytest.mark.usefixtures("capturing")
def test_gradients_stay_finite_where_nothing_explains_a_word() -> None:
    """Logits with a standard deviation of 60."""
    model = Scalar(13, 10, scale=60.0, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 10, (5, 6), generator=torch.Generator().manual_seed(1))
    hmm = model()
    hmm.impl = IMPL
    model.forward = lambda: hmm  # type: ignore[method-assign]
    result = model.scan(tokens)
    assert result.suspect is not None
    assert int(model.skipped) == int(result.suspect.sum()) > 0
    assert result.log_likelihood.isfinite().all() and result.carry.log_probs.exp().isfinite().all()
    torch.testing.assert_close(result.carry.log_probs.exp().sum(1), torch.ones(5, dtype=torch.float64))
    result.log_likelihood.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()
    exact = scan(matrices(hmm.detach().to(torch.float64)), Evidence(tokens), "naive")
    kept = ~result.suspect
    torch.testing.assert_close(result.log_likelihood[kept].double(), exact.log_likelihood[kept], rtol=1e-4, atol=1e-3)


@outside_interpreter
def test_a_sequence_that_is_not_suspect_is_not_doubtful() -> None:
    """Where no column of the transition matrix varies by more than LARGEST_RATIO."""
    generator, tested = torch.Generator().manual_seed(0), 0
    for _ in range(20):
        seed = int(torch.randint(999, (), generator=generator))
        hmm = HMM(*(p.log().float() for p in random_hmm(5, 4, seed, 6)))
        evidence = Evidence(torch.randint(4, (9, 30), generator=generator))
        chain = scaled.make_chain(matrices(hmm), evidence, torch.float32)
        result = scaled.forward(chain)
        ratio = (hmm.transition.log_probs.amax(0) - hmm.transition.log_probs.amin(0)).amax()
        if ratio < math.log(scaled.LARGEST_RATIO):
            tested += 1
            trusted = ~scaled.guess_suspect(result)
            assert not (scaled.find_suspect(matrices(hmm), chain, result) & trusted).any()
    assert tested


@outside_interpreter
@needs_triton
def test_problems_that_the_kernels_do_not_support_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    parameters, evidence = make_problem(4, 3, 2, 5)
    narrow = Parameters(*(p.float() for p in parameters))
    with pytest.raises(InputError, match=r"scan: .* does not support ragged lengths: use impl='scaled'"):
        scan(narrow, Evidence(evidence.tokens, torch.tensor([5, 2])), "triton")
    with pytest.raises(InputError, match=r"scan: .* does not support parameters in torch.float64: use impl='scaled'"):
        scan(parameters, evidence, "triton")
    with pytest.raises(InputError, match=r"scan: .* does not support windows of a single token"):
        scan(narrow, Evidence(evidence.tokens[:, :1]), "triton")


@outside_interpreter
def test_the_benchmark_of_a_step_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "dense_step.py"
    out = tmp_path / "step.json"
    sizes = ["--states", "6", "--batch", "3", "--length", "5", "--vocab", "12", "--steps", "1"]
    options = ["--compare", "--profile", "--precision", "32-true", "--out", str(out)]
    runpy.run_path(str(script))["main"]([*sizes, *options])
    found = json.loads(out.read_text())
    assert max(found["errors"].values()) < 1e-5
    assert [(row["model"], row["impl"]) for row in found["rows"]] == [
        (model, impl) for model in ("scalar", "linear", "em") for impl in ("auto", "scaled")
    ]
    profiles = out.with_suffix(".txt").read_text().split("\n\n")
    for kind, text in zip(("scalar", "linear", "em"), profiles, strict=False):
        heading, columns, *lines = text.splitlines()
        spent = [float(line.split()[0]) for line in lines]
        assert heading == f"{kind}, 6 states" and columns.split()[1] == "count"
        assert len(spent) > 10 and spent == sorted(spent, reverse=True) and max(map(len, lines)) <= 89
    assert all(row["tokens_per_second"] == pytest.approx(15 / row["ms"] * 1e3) for row in found["rows"])


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("states", [1024, 1984])
def test_compiled_loops_wait_for_their_products(states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, with the tiles that 200 sequences have there."""
    from hmmlm.ops.scan import kernel_chain, kernel_counts, triton

    launches = compiled.record(monkeypatch, triton, kernel_chain, kernel_counts)
    monkeypatch.setattr(triton, "_can_overlap", lambda device: True)
    parameters = Parameters(torch.zeros(states), torch.zeros(states, states), torch.zeros(states, 64))
    chain = triton.make_chain(parameters, Evidence(torch.zeros(200, 3, dtype=torch.long)), torch.bfloat16)
    triton.accumulate(chain, triton.forward(chain), torch.ones(200), torch.Size((states, 64)))
    last = {launch[0].__name__: launch for launch in launches}  # the first step has no product
    compiled.check(list(last.values()), "step_kernel", "sum_words_kernel")
    assert compiled.ptx(*last["step_kernel"]).index("griddepcontrol.wait") < compiled.ptx(*last["step_kernel"]).index(
        "mma"
    )
