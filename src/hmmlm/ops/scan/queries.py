"""The questions, and which implementation answers them; sequences that scaling cannot serve go to log space."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from hmmlm.ops.results import Counts, Scan
from hmmlm.ops.scan import naive
from hmmlm.ops.scan import torch as scaled
from hmmlm.ops.scan.function import differentiable_scan, in_log_space, run, wide_chunks
from hmmlm.ops.scan.naive import Evidence, Parameters
from hmmlm.ops.small import FLOOR

Impl = Literal["auto", "naive", "torch", "triton"]
"""`triton` is for `scan`; the other questions have no kernels, and torch answers them."""


def scan(
    log_start: Tensor, log_transition: Tensor, log_emission: Tensor, tokens: Tensor, lengths: Tensor | None = None,
    initial: Tensor | None = None, restart: Tensor | None = None, impl: Impl = "auto",
) -> Scan:
    """log p(x) [B], differentiable in the parameters and `initial`, and the final filtered distribution [B, Z]."""
    parameters = Parameters(log_start, log_transition, log_emission)
    evidence = Evidence(tokens, lengths, initial, restart)
    if impl == "naive":
        joint = naive.forward(parameters, evidence)[:, -1]
        return Scan(naive.logsumexp(joint, 1), torch.softmax(joint.detach(), 1).nan_to_num(0.0))
    return differentiable_scan(parameters, evidence, impl)


def rescue(
    values: Tensor, function: Callable[[Parameters, Evidence], Tensor], parameters: Parameters, evidence: Evidence,
    doubt: Tensor,
) -> Tensor:
    """`values` [B, ...] with the rows in `doubt` done again in log space."""
    if doubt.numel():
        values[doubt] = in_log_space(function, parameters, evidence, doubt).to(values.dtype)
    return values


@torch.no_grad()
def filter_states(parameters: Parameters, evidence: Evidence, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """log p(x) [B] and log p(z_t | x_1..t) [B, T, Z] (−inf beyond a length and after an impossible token)."""
    def exactly(p: Parameters, e: Evidence) -> Tensor:
        return torch.where(naive.active(e)[..., None], naive.filtered(p, e), naive.NEG_INF)

    if impl == "naive":
        return naive.log_likelihood(parameters, evidence), exactly(parameters, evidence)
    chain, result, doubt = run(parameters, evidence)
    assert result.alpha is not None
    log_filtered = chain.unsort(result.alpha, 1).transpose(0, 1).log()
    log_likelihood = chain.unsort(result.log_likelihood)
    return (
        rescue(log_likelihood, naive.log_likelihood, parameters, evidence, doubt),
        rescue(log_filtered, exactly, parameters, evidence, doubt),
    )


@torch.no_grad()
def posterior(parameters: Parameters, evidence: Evidence, impl: Impl = "auto") -> Tensor:
    """p(z_t | x) [B, T, Z]; zero beyond a length and for impossible sequences."""
    if impl == "naive":
        return naive.posterior(parameters, evidence)
    chain, result, doubt = run(parameters, evidence)
    assert result.predicted is not None
    marginal = scaled.backward(chain, result, possible(result)).mul_(result.predicted)
    marginal = chain.unsort(marginal, 1).transpose(0, 1).contiguous()
    return rescue(marginal, naive.posterior, parameters, evidence, doubt)


def possible(result: scaled.Forward) -> Tensor:
    """[B] one for sequences that can happen, else zero."""
    return (result.log_likelihood > naive.NEG_INF).to(result.log_likelihood.dtype)


@torch.no_grad()
def expected_counts(parameters: Parameters, evidence: Evidence, impl: Impl = "auto") -> Counts:
    """Expected counts summed over the batch; impossible sequences count for nothing but the likelihood."""
    weight = torch.ones(evidence.tokens.shape[0], dtype=parameters.log_start.dtype, device=evidence.tokens.device)
    if impl == "naive":
        return naive.expected_counts(parameters, evidence, weight)
    chain, result, doubt = run(parameters, evidence)
    trusted = chain.unsort(torch.ones_like(result.log_likelihood))
    trusted[doubt] = 0.0
    seed = chain.sort(trusted) * possible(result)
    counts, _ = scaled.accumulate(chain, result, seed, parameters.log_emission.shape)
    log_likelihood = chain.unsort(result.log_likelihood)
    log_likelihood = rescue(log_likelihood, naive.log_likelihood, parameters, evidence, doubt)
    start, transition, emission = counts.start, counts.transition, counts.emission
    if doubt.numel():
        wide, pieces = wide_chunks(parameters, evidence, doubt)
        for piece in pieces:
            more = naive.expected_counts(wide, piece, torch.ones_like(piece.tokens[:, 0], dtype=torch.float64))
            start, transition, emission = start + more.start, transition + more.transition, emission + more.emission
    dtype = weight.dtype
    return Counts(start.to(dtype), transition.to(dtype), emission.to(dtype), log_likelihood.sum())


@torch.no_grad()
def entropy(parameters: Parameters, evidence: Evidence, impl: Impl = "auto") -> Tensor:
    """Entropy of p(z_1..T | x) in nats [B].

    By the chain rule backwards in time, H = H(z_T | x) + Σ_t H(z_t | z_t+1, x_1..t): with f the filtered distribution,
    the entropy of f(i) A(i, j) normalised over i needs only the products of f and f log f with A and A log A.
    """
    if impl == "naive":
        return naive.entropy(parameters, evidence)
    chain, result, doubt = run(parameters, evidence)
    assert result.alpha is not None and result.predicted is not None
    transition, tiny = chain.transition, torch.finfo(chain.start.dtype).tiny
    marginal = scaled.backward(chain, result, possible(result)).mul_(result.predicted)
    past, norm = result.alpha[:-1], result.predicted[1:].clamp_min(tiny)
    past_log = torch.xlogy(past, past)
    conditional = norm.log() - (past_log @ transition + past @ torch.xlogy(transition, transition)) / norm
    if chain.restart is not None:  # the past is then independent of what follows
        conditional = torch.where(chain.restart[1:, :, None], -past_log.sum(2, keepdim=True), conditional)
    total = (conditional.clamp_min(0) * marginal[1:]).sum((0, 2))
    last = chain.unsort(marginal, 1).transpose(0, 1)
    last = torch.take_along_dim(last, evidence.last()[:, None, None], 1).squeeze(1)
    total = chain.unsort(total) - torch.xlogy(last, last).sum(1)
    return rescue(total, naive.entropy, parameters, evidence, doubt)


@torch.no_grad()
def surroundings(parameters: Parameters, evidence: Evidence, impl: Impl = "auto") -> Tensor:
    """log p(z_t | all tokens but x_t) [B, T, Z], what infilling needs."""
    def exactly(p: Parameters, e: Evidence) -> Tensor:
        log_filtered, scores = naive.filtered(p, e), naive.backward(p, e)
        previous = log_filtered[:, :-1, :, None] + p.log_transition
        predicted = naive.logsumexp(previous, 2)
        first = p.log_start.expand(e.tokens.shape[0], 1, -1)
        return torch.log_softmax(torch.cat([first, predicted], 1) + scores, 2)

    if impl == "naive":
        return exactly(parameters, evidence)
    chain, result, doubt = run(parameters, evidence)
    assert result.alpha is not None and result.predicted is not None
    floor, tiny = FLOOR[chain.start.dtype], torch.finfo(chain.start.dtype).tiny
    around, least = torch.zeros_like(result.alpha), torch.ones_like(result.log_likelihood)
    ahead, ending = torch.empty_like(result.alpha[0, :0]), torch.ones_like(result.alpha[0])
    # Not scaled.backward: its messages are dropped where x_t itself rules a state out, which is what is undone here.
    # These are scaled by their largest value instead, over the states that the past allows.
    for t in range(len(chain.active) - 1, -1, -1):
        rows = chain.active[t]
        predicted = result.predicted[t, :rows]
        beta = torch.cat([ahead, ending[: rows - ahead.shape[0]]])
        beta = torch.where(predicted < floor, 0.0, beta)
        weight = predicted * beta
        total = weight.sum(1, keepdim=True)
        least[:rows] = torch.minimum(least[:rows], total[:, 0])
        around[t, :rows] = weight / total.clamp_min(tiny)
        message = chain.emission.index_select(0, chain.words[t, :rows]).mul_(beta)
        ahead = scaled.move(message / message.amax(1, keepdim=True).clamp_min(tiny), chain.transition.t())
    faint = chain.unsort((least < floor**0.5) & (possible(result) > 0)).nonzero().squeeze(1)
    around = chain.unsort(around, 1).transpose(0, 1).log()
    return rescue(around, exactly, parameters, evidence, torch.cat([doubt, faint]).unique())
