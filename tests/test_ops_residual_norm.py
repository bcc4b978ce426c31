"""residual_norm: the kernels against the specification, the specification against the framework's modules.

The triton kernels run here in Triton's interpreter (tests/interpreter.py).
"""


import pytest
import torch
from interpreter import INTERPRETING, STARTS, run_in_the_interpreter
from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.ops.residual_norm import residual_norm
from hmmlm.parameterization.networks import Residual


def inputs(n: int, h: int, seed: int = 0) -> list[Tensor]:
    """embedding, w1, b1, w2, b2, gamma, beta in float64; about half of both ReLUs are open."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, h), (h, h), (h,), (h, h), (h,), (h,), (h,)]
    given = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [given[0], given[1] / h**0.5, given[2], given[3] / h**0.5, *given[4:]]


def run(impl: str, given: list[Tensor]) -> list[Tensor]:
    """Value and gradients, in float64; the triton kernels compute in float32."""
    leaves = [x.to(torch.float32 if impl == "triton" else x.dtype, copy=True).requires_grad_() for x in given]
    out = residual_norm(*leaves, impl=impl)
    weight = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype)))]


if INTERPRETING:

    @pytest.mark.parametrize(("n", "h"), [(1, 1), (40, 5), (70, 32), (33, 300), (5, 1024)])
    def test_triton_agrees_with_the_specification(n: int, h: int) -> None:
        """Rows fewer and more than a program's, a last program that is not full, rows narrower than their block."""
        given = inputs(n, h, seed=h)
        for got, expected in zip(run("triton", given), run("naive", given), strict=True):
            torch.testing.assert_close(got, expected, rtol=3e-5, atol=3e-5 * max(1.0, float(expected.abs().max())))

    def test_triton_under_autocast_is_as_near_as_the_composition() -> None:
        """What is summed in float32 is nearer; ReLUs that rounding shuts or opens set the rest."""
        given = inputs(70, 48, seed=3)
        exact = run("naive", given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mine, theirs = run("triton", given), run("naive", [x.float() for x in given])
        for got, other, expected in zip(mine, theirs, exact, strict=True):
            assert (got - expected).norm() < max(1.1 * (other - expected).norm(), 0.02 * expected.norm())

    def test_triton_is_the_same_every_time() -> None:
        given = inputs(100, 12)
        for first, second in zip(run("triton", given), run("triton", given), strict=True):
            assert torch.equal(first, second)

    def test_triton_without_rows() -> None:
        value, *gradients = run("triton", inputs(0, 6))
        assert value.shape == (0, 6) and all(bool((x == 0).all()) for x in gradients)

    def test_triton_keeps_leading_dimensions() -> None:
        given = inputs(6, 4)
        flat, folded = run("triton", given), run("triton", [given[0].view(2, 3, 4), *given[1:]])
        assert folded[0].shape == (2, 3, 4)
        for a, b in zip(flat, folded, strict=True):
            assert torch.equal(a, b.view(a.shape))

    def test_triton_does_not_hide_what_is_not_a_number() -> None:
        given = inputs(3, 4)
        given[2][1] = torch.nan
        assert run("triton", given)[0].isnan().all()

else:

    def test_specification_agrees_with_modules() -> None:
        given = inputs(7, 6)
        first, second, norm = nn.Linear(6, 6).double(), nn.Linear(6, 6).double(), nn.LayerNorm(6).double()
        with torch.no_grad():
            for to, value in zip((*first.parameters(), *second.parameters(), *norm.parameters()), given[1:],
                                 strict=True):
                to.copy_(value)
        inner = first(given[0]).relu()
        torch.testing.assert_close(residual_norm(*given), norm(second(inner).relu() + inner))

    def test_gradients() -> None:
        assert torch.autograd.gradcheck(residual_norm, [x.requires_grad_() for x in inputs(4, 3, seed=1)])

    def test_network_drops_in_training_only() -> None:
        network, embedding = Residual(16, dropout=0.5), torch.randn(20, 16)
        assert sum(parameter.numel() for parameter in network.parameters()) == 2 * (16 * 16 + 16) + 2 * 16
        assert not torch.equal(network(embedding), network(embedding))
        still = network.eval()(embedding)
        assert torch.equal(still, network(embedding))
        without = Residual(16)
        without.load_state_dict(network.state_dict())
        torch.testing.assert_close(still, without(embedding))

    @pytest.mark.parametrize(("change", "options", "message"), [
        ({}, {"impl": "cuda"}, "impl 'cuda' is unknown"),
        ({}, {"impl": "triton"}, "no dtype but float32"),
        ({}, {"impl": "triton", "dropout": 0.1}, "no dropout"),
        ({2: torch.ones(5)}, {}, r"for rows of 4 .* not \[4, 4\], \[5\]"),
    ])  # fmt: skip
    def test_bad_input_is_named(change: dict[int, Tensor], options: dict[str, object], message: str) -> None:
        given = inputs(3, 4)
        for index, value in change.items():
            given[index] = value
        with pytest.raises(InputError, match=message):
            residual_norm(*given, **options)

    def test_rows_that_do_not_fit_are_named() -> None:
        with pytest.raises(InputError, match="no rows over 1024"):
            residual_norm(*(x.float() for x in inputs(1, 1025)), impl="triton")


if STARTS:

    def test_triton_kernels_in_the_interpreter() -> None:
        run_in_the_interpreter(__file__)
