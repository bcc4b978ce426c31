"""The Triton kernels on a GPU against the specifications, which run on the CPU in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import blocked_scan, dense_scan, layers, naive_blocked, softmax_adamw
from helpers.oracle import NEG_INF
from torch import Tensor

from hmmlm.hmm import HMM
from hmmlm.ops import pieces
from hmmlm.ops.blocked_emission import blocked_emission, make_tiles
from hmmlm.ops.blocked_scan import Factors
from hmmlm.ops.blocked_scan.api import blocked_scan as blocked_scan_op
from hmmlm.ops.blocked_scan.problem import lay_out
from hmmlm.ops.common import find_kernels
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.ops.scan import Evidence, Parameters, scan

triton = pytest.importorskip("triton", reason="triton is not installed")


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return float((got - want).norm() / want.norm())


def test_the_kernels_are_chosen_for_cuda_tensors(device: torch.device) -> None:
    kernels = find_kernels("scan", device)
    assert kernels is not None and kernels.__name__ == "hmmlm.ops.scan.triton"
    assert find_kernels("scan", device, "float64") is None


# --- dense scan ---


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("size", "options"), dense_scan.KERNEL_CASES[::3])
def test_dense_scan_agrees_with_log_space(
    size: tuple[int, int, int, int], options: dict[str, Any], device: torch.device
) -> None:
    dense_scan.assert_agrees(*dense_scan.make_problem(*size, **options), "triton", device=device)


@pytest.mark.parametrize("size", [(512, 1000, 64, 12), (2080, 300, 32, 6)])
def test_dense_scan_of_training_size_agrees_with_float64(size: tuple[int, int, int, int], device: torch.device) -> None:
    problem = dense_scan.make_problem(*size, carried=True, restarts=True)
    got = dense_scan.solve(*problem, "triton", torch.float32, device)
    want = dense_scan.solve(*problem, "scaled", torch.float64, device)
    assert got.scan.suspect is None
    assert relative_error(got.scan.log_likelihood, want.scan.log_likelihood) < 1e-5
    assert relative_error(got.scan.carry.log_probs.exp(), want.scan.carry.log_probs.exp()) < 1e-4
    for name, expected in want.gradients.items():
        assert relative_error(got.gradients[name], expected) < 1e-4, name


@pytest.mark.parametrize("log_leak", [-50.0, NEG_INF])
def test_dense_sequences_whose_mass_underflows_are_recomputed(log_leak: float, device: torch.device) -> None:
    tokens = torch.tensor([[0] * 3 + [1] * 5, [0, 1] * 4, [0] * 8, [-1] * 8])
    close = {"device": device, "rtol": 1e-3, "atol": 1e-3}
    dense_scan.assert_agrees(dense_scan.sticky(log_leak, -30.0), Evidence(tokens), "triton", **close)
    excluded = Evidence(dense_scan.EXCLUDED_FUTURE)
    dense_scan.assert_agrees(dense_scan.only_first(log_leak), excluded, "triton", **close)


def test_dense_scan_with_bfloat16_products(device: torch.device) -> None:
    problem = dense_scan.make_problem(128, 200, 16, 8, carried=True, restarts=True, seed=5)
    want = dense_scan.solve(*problem, "naive")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = dense_scan.solve(*problem, "triton", torch.float32, device)
    assert relative_error(got.scan.log_likelihood, want.scan.log_likelihood) < 3e-3
    for name, expected in want.gradients.items():
        assert relative_error(got.gradients[name], expected) < 0.03, name
    single = dense_scan.solve(*problem, "triton", torch.float32, device)
    assert not torch.equal(single.scan.log_likelihood, got.scan.log_likelihood)  # it was bfloat16


def test_long_sequences_are_computed_in_parallel_chunks(device: torch.device) -> None:
    parameters, evidence = dense_scan.make_problem(16, 200, 2, 3000, ragged=True, sharpness=3.0)
    hmm = HMM(*(p.float().to(device) for p in parameters))
    assert hmm.implementation(evidence.tokens.to(device)).name == "parallel"
    got = dense_scan.solve(parameters, evidence, "parallel", torch.float32, device)
    want = dense_scan.solve(parameters, evidence, "scaled", torch.float64, "cpu")
    assert relative_error(got.scan.log_likelihood, want.scan.log_likelihood) < 1e-6
    assert relative_error(got.scan.carry.log_probs.exp(), want.scan.carry.log_probs.exp()) < 1e-6
    for name, expected in want.gradients.items():
        assert relative_error(got.gradients[name], expected) < 1e-4, name


def test_dense_scan_repeats_bit_by_bit(device: torch.device) -> None:
    problem = dense_scan.make_problem(128, 200, 16, 8, carried=True, restarts=True, seed=5)
    first, second = (dense_scan.solve(*problem, "triton", torch.float32, device) for _ in range(2))
    assert torch.equal(first.scan.log_likelihood, second.scan.log_likelihood)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name


def in_graph(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the result of a function that is captured in a CUDA graph and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    graph.replay()
    torch.cuda.synchronize()
    return result


def test_dense_scan_inside_a_graph_reports_suspect_sequences(device: torch.device) -> None:
    """The second sequence is impossible; the first has the likelihood and gradient that it has alone."""
    tokens = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]], device=device)
    inputs = Parameters(*(p.float().to(device).requires_grad_() for p in dense_scan.sticky(NEG_INF, NEG_INF)))

    def run() -> tuple[Tensor, ...]:
        result = scan(inputs, Evidence(tokens), "triton")
        assert result.suspect is not None
        kept = torch.where(result.suspect, 0.0, result.log_likelihood)
        return result.suspect, kept.detach(), result.carry.log_probs.exp(), *torch.autograd.grad(kept.sum(), inputs)

    suspect, kept, probs, *gradients = in_graph(run)
    assert suspect.tolist() == [False, True]
    assert probs.tolist() == [pytest.approx([1.0, 0.0]), pytest.approx([0.5, 0.5])]
    alone = dense_scan.solve(dense_scan.sticky(NEG_INF, NEG_INF), Evidence(tokens[:1].cpu()), "naive", torch.float32)
    torch.testing.assert_close(kept[:1].cpu(), alone.scan.log_likelihood.detach())
    # `solve` weights a single sequence by −1.
    for got, want in zip(gradients, alone.gradients.values(), strict=True):
        torch.testing.assert_close(got.double().cpu(), -want)


# --- blocked scan ---


@pytest.mark.parametrize(("size", "options"), blocked_scan.KERNEL_CASES[::2])
def test_blocked_scan_agrees_with_the_specification(
    size: tuple[int, ...], options: dict[str, Any], device: torch.device
) -> None:
    blocked_scan.assert_agrees(blocked_scan.make_case(*size, **options, seed=3), "triton", device)


@pytest.mark.parametrize("size", blocked_scan.IN_PIECES)
def test_blocked_scan_in_pieces_agrees_with_the_specification(size: tuple[int, ...], device: torch.device) -> None:
    case = blocked_scan.make_case(*size, entered=True, ragged=True, restarts=True, seed=11)
    with pieces.limit(2 * len(case.tokens) * size[1] ** 2):
        blocked_scan.assert_agrees(case, "triton", device)


@pytest.mark.parametrize("product_dtype", [torch.float32, torch.bfloat16])
def test_blocked_scan_of_training_size_agrees_with_float64(product_dtype: torch.dtype, device: torch.device) -> None:
    """Operands are rounded first, so that the error is that of the kernels."""
    case = blocked_scan.make_case(8, 64, 64, 200, 16, 12, entered=True, restarts=True, seed=4)

    def rounded(x: Tensor) -> Tensor:
        return (x / 4).to(product_dtype).double()

    u, w = rounded(case.factors.u), rounded(case.factors.w)
    factors = case.factors._replace(u=u, w=w, log_normalizer=(u @ w.T).logsumexp(1))
    case = case._replace(factors=factors)
    want = blocked_scan.solve(case, "generic", device).values()
    got = blocked_scan.solve(case, "triton", device, product_dtype=product_dtype).values()
    tolerance = 1e-4 if product_dtype == torch.float32 else 2e-2
    assert relative_error(got["log_likelihood"], want["log_likelihood"]) < (1e-5 if tolerance == 1e-4 else 1e-3)
    for name, expected in want.items():
        assert relative_error(got[name], expected) < tolerance, name


def test_blocked_scan_repeats_bit_by_bit(device: torch.device) -> None:
    case = blocked_scan.make_case(8, 64, 64, 200, 16, 12, entered=True, restarts=True, seed=4)
    first, second = (blocked_scan.solve(case, "triton", device).values() for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_blocked_sequences_whose_mass_underflows_are_recomputed(device: torch.device) -> None:
    case = blocked_scan.make_case(2, 2, 2, 4, 2, 4, seed=6)
    case.factors.log_normalizer[:2] += 200
    factors = case.factors._replace(block_of_word=torch.tensor([0, 0, 1, 1]))
    case = case._replace(factors=factors, tokens=torch.tensor([[0, 1, 2, 3], [2, 3, 3, 1]]))
    assert blocked_scan.solve(case, "triton", device).scan.log_likelihood[0] < -400
    blocked_scan.assert_agrees(case, "triton", device, tolerance=1e-4)


def test_blocked_scan_inside_a_graph_reports_what_it_would_recompute_outside(device: torch.device) -> None:
    """Models between mild and too peaked for float32: a sequence that is not suspect has the exact likelihood."""
    from hmmlm.ops.blocked_scan import triton as kernels

    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.randint(2, (4, 12), generator=generator), torch.tensor([[0] * 6 + [1] * 6])])
    given, counts = tokens.to(device), [0, 0]
    for log_leak in (-5.0, -60.0, -90.0):
        for log_wrong in (-5.0, -25.0, -40.0):
            exact = blocked_scan.two_regimes(log_leak, log_wrong)
            want = naive_blocked.blocked_scan(exact, tokens, None, None, None).log_likelihood
            factors = Factors(*(x.to(device, torch.float32 if x.is_floating_point() else None) for x in exact))
            problem = lay_out(factors, given, None, None, None, torch.float32)
            outside = kernels.forward(problem).suspect.cpu()

            def run(factors: Factors = factors) -> tuple[Tensor, ...]:
                result = blocked_scan_op(factors, given)
                assert result.suspect is not None
                return result.suspect, result.log_likelihood, result.carry.log_probs.exp()

            suspect, log_likelihood, probs = (x.cpu() for x in in_graph(run))
            assert torch.equal(suspect, outside)
            torch.testing.assert_close(log_likelihood[~suspect].double(), want[~suspect], rtol=1e-5, atol=3e-5)
            assert bool((log_likelihood[suspect] == NEG_INF).all()) and bool((probs[suspect] == 0).all())
            counts[0] += int(suspect.sum())
            counts[1] += int((~suspect).sum())
    assert min(counts) > 0


# --- layers ---


@pytest.mark.parametrize(("n", "m", "h", "with_bias"), layers.LINEAR_CASES[1:])
def test_linear_logsumexp_agrees_with_the_specification(
    n: int, m: int, h: int, with_bias: bool, device: torch.device
) -> None:
    layers.assert_linear_agrees("triton", layers.linear_inputs(n, m, h, with_bias, seed=n), device)


@pytest.mark.parametrize("states", [2**15, 2**17])
def test_normalizers_of_many_states_agree_with_float64(states: int, device: torch.device) -> None:
    """Scores of 3,000, three times those of a trained model; tensor cores sum products of this size to about 1e-3."""
    generator = torch.Generator(device).manual_seed(0)
    offset = 3 * torch.randn(256, device=device, generator=generator)
    u, w = (
        (3 * torch.randn(states, 256, device=device, generator=generator) + offset).bfloat16().float() for _ in range(2)
    )
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = linear_logsumexp(u, w)
    rows = torch.arange(0, states, states // 64, device=device)
    want = torch.cat([(u[i : i + 1].double() @ w.double().t()).logsumexp(1) for i in rows.tolist()])
    assert (got[rows] - want).abs().max() < 4e-3


def test_linear_logsumexp_with_bfloat16_products(device: torch.device) -> None:
    u, w = (x / 4 for x in layers.linear_inputs(300, 500, 64, False, seed=9))
    given = [x.bfloat16().double() for x in (u, w)]
    want = layers.solve_linear("naive", given)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = layers.solve_linear("triton", given, device=device)
    assert relative_error(got[0], want[0]) < 1e-5
    for gradient, expected in zip(got[1:], want[1:], strict=True):
        assert relative_error(gradient, expected) < 1e-2
    with torch.autocast("cuda", dtype=torch.bfloat16):
        by_autocast = linear_logsumexp(*(x.float().to(device) for x in given))
    assert relative_error(by_autocast, want[0]) < 1e-5


@pytest.mark.parametrize(("size", "with_bias"), layers.EMISSION_CASES[1:])
def test_blocked_emission_agrees_with_the_masked_matrix(
    size: tuple[int, int, int, int], with_bias: bool, device: torch.device
) -> None:
    layers.assert_emission_agrees("triton", *layers.emission_inputs(*size, with_bias, seed=1), device)


def test_blocked_emission_with_bfloat16_products(device: torch.device) -> None:
    block_of_word, given = layers.emission_inputs(3, 64, 100, 64, True, seed=5)
    given = [(x / 4).bfloat16().double() for x in given]
    want = layers.solve_emission("naive", block_of_word, given)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = layers.solve_emission("triton", block_of_word, given, device)
    assert relative_error(got[0], want[0]) < 1e-5
    for gradient, expected in zip(got[1:], want[1:], strict=True):
        assert relative_error(gradient, expected) < 3e-2
    tiles = make_tiles(block_of_word, 3).to(device)
    out = blocked_emission(*(x.float().to(device) for x in given), tiles)
    totals = torch.zeros(3, 64, device=device).index_add_(0, block_of_word.to(device), out.exp())
    torch.testing.assert_close(totals, torch.ones_like(totals), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "h"), layers.RESIDUAL_CASES[1::2])
def test_residual_norm_agrees_with_the_specification(n: int, h: int, device: torch.device) -> None:
    layers.assert_residual_agrees("triton", layers.residual_inputs(n, h, seed=h), device)


def test_residual_norm_under_autocast_is_as_exact_as_the_composition(device: torch.device) -> None:
    given = layers.residual_inputs(70, 48, seed=3)
    exact = layers.solve_residual("naive", given)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        mine = layers.solve_residual("triton", given, device)
        theirs = layers.solve_residual("naive", [x.float() for x in given], device)
    for got, other, expected in zip(mine, theirs, exact, strict=True):
        assert relative_error(got, expected) < max(1.1 * relative_error(other, expected), 0.02)


def test_an_hmm_on_the_gpu_uses_the_kernels_or_the_portable_scan(device: torch.device) -> None:
    """Ragged batches, float64 and single tokens are for the portable implementation."""
    parameters, evidence = dense_scan.make_problem(17, 11, 5, 4)
    exact = HMM(*parameters, impl="naive")
    hmm = HMM(*(p.float().to(device) for p in parameters))
    lengths = torch.tensor([4, 2, 1, 3, 4])
    for model, rtol in ((hmm, 1e-4), (exact.to(device), 1e-9)):
        model.impl = "auto"
        for given, sizes in ((evidence.tokens, None), (evidence.tokens, lengths), (evidence.tokens[:, :1], None)):
            got, want = model.log_likelihood(given, sizes), exact.log_likelihood(given, sizes)
            torch.testing.assert_close(got.double().cpu(), want, rtol=rtol, atol=rtol)


# --- M step ---


@pytest.mark.parametrize("size", [(1, 512), (512, 512), (64, 32_000), (3, 4097)])
@pytest.mark.parametrize(("pseudocount", "step"), [(0.0, 1.0), (1e-5, 0.1)])
def test_maximize_rows_agrees_with_tensor_operations(
    size: tuple[int, int], pseudocount: float, step: float, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    counts, log_probs = (torch.randn(size, generator=generator) for _ in range(2))
    counts, log_probs = counts.relu(), log_probs.mul(4).log_softmax(1)
    counts[0, 1:] = 0.0
    want = maximize_rows(counts.double(), log_probs.double(), pseudocount, step)
    got = maximize_rows(counts.to(device), log_probs.to(device), pseudocount, step)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


# --- AdamW on softmax emissions ---


@pytest.mark.parametrize(
    ("size", "options"),
    [
        *softmax_adamw.SCANS,
        ((66, 3, 25, 12), {"carried": True}),
        ((20, 2, 130, 20), {"restarts": True}),
        ((512, 1000, 200, 16), {}),
        ((96, 40_000, 64, 8), {"sharpness": 4.0}),
    ],
)
def test_gradients_of_logits_agree_with_float64(
    size: tuple[int, int, int, int], options: dict[str, Any], device: torch.device
) -> None:
    softmax_adamw.check_scan(size, device, **options)


@pytest.mark.parametrize("size", [(37, 150, 9, 8), (256, 3001, 40, 12)])
@pytest.mark.parametrize("name", softmax_adamw.UPDATES)
def test_updates_of_logits_agree_with_adamw_of_torch(
    name: str, size: tuple[int, int, int, int], device: torch.device
) -> None:
    softmax_adamw.check_updates(softmax_adamw.UPDATES[name], device, size)
