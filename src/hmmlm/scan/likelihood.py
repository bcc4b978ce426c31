"""The likelihood of checked tokens, and the expected counts, by whatever computes them fastest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hmmlm.emissions import Blocked, Categorical
from hmmlm.ops.common import Carry, Scan, logsumexp
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.ops.scan import expected_counts as count_dense
from hmmlm.scan.blocked_counts import count_expected
from hmmlm.scan.composition import Composition, matrices, parameters_of, with_parts, with_tensors
from hmmlm.scan.implementations import Problem, choose, run
from hmmlm.scan.recursions import run_filter, run_messages, sort_batch
from hmmlm.scan.results import Counts
from hmmlm.transitions import BlockDiagonal, Dense, Factored


def log_likelihood(hmm: Composition, tokens: Tensor, lengths: Tensor | None, carry: Carry | None = None) -> Tensor:
    """Compute log p(x) [B], differentiable."""
    return run(Problem(hmm, _inside(tokens, lengths), lengths, carry, None, "none")).log_likelihood


def joint_scan(
    hmm: Composition,
    tokens: Tensor,
    states: Tensor,
    lengths: Tensor | None = None,
    carry: Carry | None = None,
    restart: Tensor | None = None,
) -> Scan:
    """Compute log P(O, S) = log π(s_1) + Σ log A(s_t−1, s_t) + Σ log O(s_t, o_t) [B] for tokens and states [B, T].

    Differentiable; nothing is checked. Positions with state −1 (beyond a length) add nothing. A carry continues
    from its most likely state; the returned carry has probability one at the last states.
    """
    known, to = states >= 0, states.clamp(min=0)
    first = torch.zeros_like(known) if restart is None else restart.clone()
    first[:, 0] |= carry is None
    origin = torch.cat([to[:, :1] if carry is None else carry.most_likely()[:, None], to[:, :-1]], 1)
    started = hmm.log_start.index_select(0, to.flatten()).view_as(states)
    moved = hmm.transition.log_entries(origin.flatten(), to.flatten()).view_as(states)
    emitted = hmm.emission.log_entries(to.flatten(), tokens.clamp(min=0).flatten()).view_as(states)
    entered = torch.where(first, started, moved)
    log_likelihood = (entered + emitted.masked_fill(tokens < 0, 0.0)).masked_fill(~known, 0.0).sum(1)
    last = torch.full_like(to[:, :1], to.shape[1] - 1) if lengths is None else lengths[:, None] - 1
    return Scan(log_likelihood, _carry_at(hmm, to.gather(1, last)[:, 0]))


def _carry_at(hmm: Composition, states: Tensor) -> Carry:
    """Return the carry of chains that are known to be in `states` [n]."""
    every = torch.arange(hmm.num_states, device=hmm.device)
    if isinstance(hmm.emission, Blocked):
        every = every.view(hmm.emission.num_blocks, -1)[states // hmm.emission.width]
        return Carry((every == states[:, None]).double().log(), every)
    return Carry((every == states[:, None]).double().log())


def _inside(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Return tokens that are missing beyond a sequence's end, where they must not matter."""
    if lengths is None:
        return tokens
    return tokens.masked_fill(torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None], -1)


@torch.no_grad()
def expected_counts(hmm: Composition, tokens: Tensor, lengths: Tensor | None, weights: Tensor | None = None) -> Counts:
    """Compute the expected counts; a sequence counts `weights` [B] times (None: once)."""
    model = hmm.detach()
    if isinstance(model.transition, BlockDiagonal):
        return _count_union(model, tokens, lengths, weights)
    if isinstance(model.transition, Factored) and isinstance(model.emission, Categorical):
        model = with_parts(model, model.log_start, Dense(model.transition.dense()), model.emission)
    if isinstance(model.transition, Factored):
        lattice = run_filter(model, sort_batch(model, tokens, lengths))
        return count_expected(model, lattice, run_messages(model, lattice), weights)
    parameters, tokens = matrices(model), _inside(tokens, lengths)
    start: Any
    chosen = choose(Problem(model, tokens, lengths, None, None, "none"))[0].name
    if parameters is not None and chosen not in ("naive", "parallel"):
        total, counts, suspect = count_dense(parameters, Evidence(tokens, lengths), weights, model.impl)
        total, (start, transition, emission) = _count_again(model, total, counts, suspect, tokens, lengths, weights)
    else:
        total, gradients = _differentiate(model, tokens, lengths, weights)
        start, transition, emission = (_of(gradients, prefix) for prefix in ("log_start", "transition.", "emission."))
    counted = total if weights is None else torch.where(weights > 0, weights * total, 0.0)
    return Counts(start, transition, emission, counted.sum())


def _count_again(
    hmm: Composition,
    total: Tensor,
    counts: Parameters,
    suspect: Tensor,
    tokens: Tensor,
    lengths: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Parameters]:
    """Return the log-likelihoods and counts of two matrices with those of suspect sequences [B], in float64."""
    if not bool(suspect.any()):
        return total, counts
    rows = suspect.nonzero()[:, 0]
    sizes, own = (None if value is None else value[rows] for value in (lengths, weights))
    found, more = _differentiate(hmm.to(torch.float64), tokens[rows], sizes, own)
    total = total.index_copy(0, rows, found.to(total.dtype))
    return total, Parameters(*((a + b).to(a.dtype) for a, b in zip(counts, more.values(), strict=True)))


def _differentiate(
    hmm: Composition, tokens: Tensor, lengths: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log p(x) [B] and the gradients of their weighted sum, which are counts of log-probabilities."""
    with torch.inference_mode(False), torch.enable_grad():  # copies, because tensors of inference have no gradient
        leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters_of(hmm).items()}
        tokens, lengths = tokens.clone(), None if lengths is None else lengths.clone()
        total = run(Problem(with_tensors(hmm, leaves), tokens, lengths, None, None, "kept")).log_likelihood
        seed = torch.ones_like(total) if weights is None else weights.to(total.dtype, copy=True)
        found = torch.autograd.grad(total, list(leaves.values()), seed)
    return total.detach(), dict(zip(leaves, found, strict=True))


def _of(gradients: dict[str, Tensor], prefix: str) -> Any:
    """Return the gradients of tensors with a prefix, by name; the gradient itself if there is one."""
    own = {name.removeprefix(prefix): value for name, value in gradients.items() if name.startswith(prefix)}
    return own if len(own) > 1 else next(iter(own.values()))


# --- unions ---


def _count_union(model: Composition, tokens: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Counts:
    """Compute the expected counts of a union: those of each model, by its share of each sequence."""
    likelihoods = torch.stack([log_likelihood(part, tokens, lengths) for part in model.components])
    log_joint = model.log_weights.double()[:, None] + likelihoods.double()  # models may be unlikely
    share = log_joint.softmax(0).nan_to_num(0.0).to(model.dtype)
    given = torch.ones_like(share[0]) if weights is None else weights
    parts = zip(model.components, share, strict=True)
    counts = [expected_counts(part, tokens, lengths, own * given) for part, own in parts]
    total, emissions = logsumexp(log_joint, 0).to(model.dtype), tuple(each.emission for each in counts)
    return Counts(
        torch.cat([each.start for each in counts]),
        _block_diagonal([each.transition for each in counts]),
        torch.cat(emissions) if all(isinstance(part.emission, Categorical) for part in model.components) else emissions,
        torch.where(given > 0, given * total, 0.0).sum(),
    )


def _block_diagonal(counts: Sequence[Any]) -> Any:
    """Return the transition counts of a union: one matrix, sparse if one of the blocks is, or those of each model."""
    if not all(isinstance(each, Tensor) for each in counts):
        return tuple(counts)
    if not any(each.is_sparse for each in counts):
        return torch.block_diag(*counts)
    blocks = [block.to_sparse().coalesce() for block in counts]
    *starts, states = accumulate((len(block) for block in blocks), initial=0)
    indices = torch.cat([block.indices() + start for block, start in zip(blocks, starts, strict=True)], 1)
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(indices, torch.cat([b.values() for b in blocks]), (states, states)).coalesce()
