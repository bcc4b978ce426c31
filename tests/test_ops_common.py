"""What all operations share: the choice of an implementation, sums in log space, products of rounded operands."""

import pytest
import torch
from helpers.interpreter import needs_triton

from hmmlm.errors import InputError
from hmmlm.ops import common
from hmmlm.ops.common import Carry, factor_logits, find_kernels, kernel_refusal, logsumexp, product_dtype
from hmmlm.ops.underflow import FLOOR, exp

CPU = torch.device("cpu")


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 7, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for n in (5, 9))
    return a, b


def test_factor_logits_and_their_gradients() -> None:
    a, b = factors(torch.float64)
    assert torch.autograd.gradcheck(factor_logits, (a, b))
    torch.testing.assert_close(factor_logits(a, b), a @ b.T)


def test_under_autocast_only_the_operands_are_rounded() -> None:
    a, b = factors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = factor_logits(a, b)
    rounded = a.detach().bfloat16().double(), b.detach().bfloat16().double()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), rounded[0] @ rounded[1].T, rtol=1e-6, atol=1e-6)
    weight = torch.sin(torch.arange(45.0)).view(5, 9)
    grad_a, grad_b = torch.autograd.grad(result, (a, b), weight)
    assert grad_a.dtype == grad_b.dtype == torch.float32
    torch.testing.assert_close(grad_a.double(), weight.bfloat16().double() @ rounded[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_b.double(), weight.bfloat16().double().T @ rounded[0], rtol=1e-5, atol=1e-5)


def test_the_dtype_of_products() -> None:
    assert product_dtype(torch.zeros(1)) == torch.float32
    assert product_dtype(torch.zeros(1).double()) == torch.float64
    assert product_dtype(torch.zeros(1), torch.bfloat16) == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product_dtype(torch.zeros(1)) == torch.bfloat16
        assert product_dtype(torch.zeros(1).double()) == torch.float64
    with torch.autocast("cpu", dtype=torch.float16):  # lacks the range of probabilities
        assert product_dtype(torch.zeros(1)) == torch.float32
    with pytest.raises(InputError, match="float16 cannot represent probabilities"):
        product_dtype(torch.zeros(1), torch.float16)


def test_logsumexp_of_nothing_but_minus_infinity_has_no_gradient() -> None:
    scores = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf], [-torch.inf, 2.0]], requires_grad=True)
    result = logsumexp(scores, 1)
    torch.testing.assert_close(result.detach(), torch.logsumexp(scores.detach(), 1))
    (gradient,) = torch.autograd.grad(result.sum(), [scores])
    expected = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf], [-torch.inf, 2.0]]).softmax(1).nan_to_num(0.0)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_has_no_denormal_numbers(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.0, -1.0, -100.0, -720.0, -torch.inf], dtype=dtype)
    result = exp(scores)
    floor = FLOOR[dtype]
    assert bool(((result == 0) | (result >= floor)).all())
    torch.testing.assert_close(result, torch.where(scores.exp() < floor, 0.0, scores.exp()))


@needs_triton
def test_kernels_are_for_gpus_the_interpreter_and_what_they_support(monkeypatch: pytest.MonkeyPatch) -> None:
    from hmmlm.ops.scan import triton  # kernels that are first imported with that variable are never compiled

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_kernels("scan", CPU) is triton
    assert find_kernels("scan", CPU, "float64") is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert find_kernels("scan", CPU) is None
    assert kernel_refusal(CPU) == "needs tensors on a GPU, not on cpu"


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "installed", lambda name: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel_refusal(CPU) == "needs the package triton, which is not installed"
    assert find_kernels("scan", CPU) is None


def test_a_carry_has_rows_and_a_most_likely_state() -> None:
    probs = torch.tensor([[0.2, 0.8], [0.9, 0.1]])
    over_all, over_some = Carry(probs), Carry(probs, torch.tensor([[4, 5], [2, 3]]))
    assert over_all.most_likely().tolist() == [1, 0] and over_some.most_likely().tolist() == [5, 2]
    assert over_some.take(slice(1)).states.tolist() == [[4, 5]] and over_all.take(slice(1)).states is None
    assert sorted(over_all.tensors()) == ["log_probs"] and sorted(over_some.tensors()) == ["log_probs", "states"]
    copy = over_some.clone()
    copy.log_probs.zero_()
    assert torch.equal(over_some.log_probs, probs)
