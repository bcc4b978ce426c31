"""AdamW on softmax emissions: the kernels against autograd and torch's optimizer in float64, on any device."""

from typing import Any

import torch
from torch import Tensor

from helpers.dense_scan import make_problem, scan
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.ops.softmax_adamw import GradientNorm, LogitGradient, Moments, Settings

SCANS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((17, 11, 5, 4), {}),
    ((1, 1, 1, 2), {}),
    ((33, 70, 3, 4), {"carried": True, "restarts": True}),
    ((40, 5000, 17, 2), {"sharpness": 4.0}),
    ((66, 3, 25, 4), {"carried": True}),
    ((20, 2, 40, 5), {"restarts": True}),
    ((9, 6, 4, 5), {"zeros": 0.4}),
]
"""Sizes (states, words, batch, steps) and options: words that fill several chunks of tokens, words that never occur."""

UPDATES = {
    "clipped": Settings((0.9, 0.95), 1e-4, 0.0, max_grad_norm=0.1),
    "not clipped": Settings((0.9, 0.95), 1e-4, 0.0, max_grad_norm=1e3),
    "any norm": Settings((0.9, 0.999), 1e-4, 0.0, max_grad_norm=0.0),
    "weight decay": Settings((0.8, 0.99), 1e-4, 0.3, max_grad_norm=0.2),
    "no memory": Settings((0.0, 0.0), 1e-2, 0.0, max_grad_norm=1.0),
}


def make_logits(
    size: tuple[int, int, int, int], device: torch.device | str, **options: Any
) -> tuple[Parameters, Evidence]:
    """Return logits in float32 whose rows are not normalized, and tokens of which some are missing."""
    parameters, evidence = make_problem(*size, **options)
    generator = torch.Generator().manual_seed(1)
    logits = (p + torch.randn(p.shape[:-1], generator=generator)[..., None] for p in parameters)
    moved = (None if value is None else value.to(device) for value in evidence)
    return Parameters(*(p.float().to(device) for p in logits)), Evidence(*moved)


def scan_exactly(logits: Parameters, evidence: Evidence, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return log-likelihoods and the gradients of the logits in float64, on the CPU."""
    leaves = [p.detach().double().cpu().requires_grad_() for p in logits]
    moved = Evidence(*(None if value is None else value.cpu() for value in evidence))
    log_likelihood = scan(Parameters(*(p.log_softmax(-1) for p in leaves)), moved, "scaled").log_likelihood
    return log_likelihood.detach(), torch.autograd.grad(log_likelihood, leaves, weight.double().cpu())


def scan_logits(
    logits: Parameters, evidence: Evidence, weight: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, LogitGradient], GradientNorm]:
    """Return log-likelihoods, the gradients of the logits and their norm as the kernels compute them."""
    from hmmlm.ops.scan.softmax import softmax_scan

    found = softmax_scan(logits, evidence)
    assert found is not None
    *gradients, norm = found.gradient(weight)
    return found.scan.log_likelihood, tuple(gradients), norm  # type: ignore[return-value]


def as_matrix(gradient: LogitGradient, logits: Tensor) -> Tensor:
    """Return the gradient [Z, V]."""
    begin, end = gradient.edges[:-1].long(), gradient.edges[1:]
    columns = gradient.sums.index_select(0, begin.clamp(max=len(gradient.words) - 1)).t()
    columns = torch.where(end > begin, columns, 0.0)
    return columns - (logits - gradient.log_normalizer[:, None]).exp() * gradient.total[:, None]


def check_scan(size: tuple[int, int, int, int], device: torch.device | str, **options: Any) -> None:
    """Compare likelihoods, gradients and the norm of the gradient."""
    from hmmlm.ops.softmax_adamw import triton as kernels

    logits, evidence = make_logits(size, device, **options)
    weight = torch.linspace(-1, 2, size[2], device=device)
    got, (start, transition, pending), parts = scan_logits(logits, evidence, weight)
    want, gradients = scan_exactly(logits, evidence, weight)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-5)
    for found, expected in zip((start, transition, as_matrix(pending, logits.log_emission)), gradients, strict=True):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-4, atol=2e-5 * weight.abs().sum().item())
    moments = Moments(*(torch.zeros((), device=device) for _ in range(3)))
    settings = Settings((0.9, 0.9), 1e-8, 0.0, max_grad_norm=1.0)
    norm, _ = kernels.plan_step(pending, parts, moments, settings, torch.ones((), device=device))
    exact = sum(gradient.square().sum() for gradient in gradients).sqrt()
    torch.testing.assert_close(norm.cpu().double(), exact, rtol=1e-4, atol=1e-5)


def check_updates(settings: Settings, device: torch.device | str, size: tuple[int, int, int, int]) -> None:
    """Compare some steps with those of torch's AdamW from the same gradients, as a matrix."""
    from hmmlm.ops.softmax_adamw import triton as kernels

    logits, evidence = make_logits(size, device)
    logits.log_emission[0, 0] = -torch.inf  # stays so
    ours = logits.log_emission.clone()
    moments = Moments(torch.zeros((), device=device), torch.zeros_like(ours), torch.zeros_like(ours))
    theirs, other = ours.cpu().double().requires_grad_(), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW(
        [theirs, other], lr=0.01, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    rate = torch.zeros((), device=device)
    for number in range(4):
        given = Parameters(logits.log_start, logits.log_transition, ours)
        evidence = evidence._replace(tokens=evidence.tokens.roll(1, 0))
        weight = torch.full((size[2],), -1.0 / evidence.tokens.numel(), device=device)
        _, (_, _, gradient), parts = scan_logits(given, evidence, weight)
        theirs.grad = as_matrix(gradient, ours).cpu().double()
        other.grad = torch.full_like(other, 0.05)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (number + 1)
        want = theirs.grad.norm().hypot(other.grad.norm())
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_([theirs, other], settings.max_grad_norm)
        optimizer.step()
        parts = parts._replace(others=torch.tensor([0.05], device=device))
        norm, plan = kernels.plan_step(gradient, parts, moments, settings, rate.fill_(0.01 * (number + 1)))
        kernels.update(ours, gradient, moments, settings, plan)
        if settings.max_grad_norm:
            torch.testing.assert_close(norm.cpu().double(), want, rtol=1e-5, atol=1e-7)
    assert moments.step.item() == 4
    for found, name in zip(moments[1:], ("exp_avg", "exp_avg_sq"), strict=True):
        torch.testing.assert_close(found.cpu().double(), optimizer.state[theirs][name], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(ours.cpu().double(), theirs.detach(), rtol=1e-5, atol=1e-5)
