"""product: exact without autocast, narrow operands and wide results with it."""

import torch

from hmmlm.ops.product import product


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, 7, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for n in (5, 9))  # type: ignore[return-value]


def test_values_and_gradients() -> None:
    a, b = factors(torch.float64)
    assert torch.autograd.gradcheck(product, (a, b))
    torch.testing.assert_close(product(a, b), a @ b.T)


def test_under_autocast_only_the_operands_are_rounded() -> None:
    a, b = factors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = product(a, b)
    seen = a.detach().bfloat16().double(), b.detach().bfloat16().double()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), seen[0] @ seen[1].T, rtol=1e-6, atol=1e-6)
    weight = torch.sin(torch.arange(45.0)).view(5, 9)
    grad_a, grad_b = torch.autograd.grad(result, (a, b), weight)
    assert grad_a.dtype == grad_b.dtype == torch.float32
    torch.testing.assert_close(grad_a.double(), weight.bfloat16().double() @ seen[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_b.double(), weight.bfloat16().double().T @ seen[0], rtol=1e-5, atol=1e-5)
