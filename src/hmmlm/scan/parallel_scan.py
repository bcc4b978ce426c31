"""The likelihood of a few long sequences under two matrices of few states, by an associative reduction over the steps.

A sequence of T tokens is cut into chunks, which are computed side by side. First, p(chunk, state at its end | state
before it) for each state before it: a matrix [Z, Z] in log space and float64. Then a tree of products of these gives
what each chunk needs to know of the tokens before and after it. The gradient is that of the chunks, given both. The
work is O(T·Z³), the depth O(√T) up to √T = STEPS; other recursions take O(T·Z²) and T.
"""

from __future__ import annotations

from math import isqrt, log

import torch
from torch import Tensor
from torch.nn.functional import pad

from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.common import NEG_INF, Carry, Scan, finite, log_normalize, logsumexp
from hmmlm.ops.pieces import at_once
from hmmlm.ops.scan import Evidence, scan
from hmmlm.scan.composition import Composition, matrices
from hmmlm.scan.generic_scan import compute_again

STEPS = 256  # of a chunk, at most


def parallel_scan(hmm: Composition, evidence: Evidence) -> Scan:
    """Compute log p(x) [B], differentiable, and the carry, which is exact; see `HMM.scan`.

    The likelihood without a gradient is exact too. With one, sequences that underflow may have changed are suspect.
    """
    chunks, real, first = _cut(evidence, hmm.num_states)
    with torch.no_grad():
        products = _unit(hmm).repeat(*real.shape, 1, 1)
        products[real] = _multiply_steps(hmm.detach().to(torch.float64), chunks)
        before, after = _look_around(products, first, torch.zeros_like(first))
        last = LogMatrix(products[:, -1]).product(before[:, -1:])
    total, carry = logsumexp(last[:, 0], 1), Carry(log_normalize(last[:, 0]))
    if not (torch.is_grad_enabled() and hmm.requires_grad):
        return Scan(total.to(hmm.dtype), carry)
    parameters, sequence = matrices(hmm), real.nonzero()[:, 0]
    assert parameters is not None
    so_far = finite(logsumexp(torch.cat([before[:, 1:], last], 1), 2)) - finite(total)[:, None]
    given = chunks._replace(carry=log_normalize(before)[real], future=(after + so_far[..., None])[real])
    found = scan(parameters, given, "scaled", "none")
    assert found.suspect is not None
    sums = total.new_zeros(len(real)).index_add(0, sequence, found.log_likelihood.double())
    suspect = total.new_zeros(len(real)).index_add(0, sequence, found.suspect.double()) > 0
    # Where a chunk is impossible, the others have no gradient either.
    return Scan(torch.where(total == NEG_INF, NEG_INF, sums).to(hmm.dtype), carry, suspect)


def _cut(evidence: Evidence, states: int) -> tuple[Evidence, Tensor, Tensor]:
    """Cut sequences into chunks.

    Returns:
        chunks: N chunks with at least a token, in the order of `real`; without a carry.
        real: [B, C] bool: where a sequence has such a chunk; C is a power of two.
        first: [B, Z] log p(state before the first token); any state where the chain starts there.
    """
    tokens, lengths, carry, restart, _ = evidence
    batch, steps = tokens.shape
    size = max(1, min(STEPS, isqrt(steps)))
    count = 1 << (-(-steps // size) - 1).bit_length()
    given = tokens.new_full((batch,), steps) if lengths is None else lengths
    sizes = (given[:, None] - size * torch.arange(count, device=tokens.device)).clamp(0, size)
    starts = torch.zeros_like(tokens, dtype=torch.bool) if restart is None else restart.clone()
    starts[:, 0] |= carry is None
    any_state = tokens.new_full((batch, states), -log(states), dtype=torch.float64)
    first = any_state if carry is None else torch.where(starts[:, :1], any_state, carry)
    real, more = sizes > 0, (0, count * size - steps)
    rows, begins = (pad(values, more).view(batch, count, size)[real] for values in (tokens, starts))
    ragged = lengths is not None or steps % size > 0
    return Evidence(rows, sizes[real] if ragged else None, None, begins), real, first


def _multiply_steps(hmm: Composition, chunks: Evidence) -> Tensor:
    """Compute log p(chunk, state at its end | state before it) [N, Z, Z], of a model in float64."""
    parameters, found = matrices(hmm), list[Tensor]()
    assert parameters is not None
    for piece in torch.arange(len(chunks.tokens), device=hmm.device).split(at_once(hmm.num_states**2)):
        rows, before = piece.repeat_interleave(hmm.num_states), _unit(hmm).repeat(len(piece), 1)
        tokens, lengths, restart = (
            None if value is None else value[rows] for value in (chunks.tokens, chunks.lengths, chunks.restart)
        )
        assert tokens is not None
        result = scan(parameters, Evidence(tokens, lengths, before, restart), "auto", "exact")
        result = compute_again(result, lambda: hmm, tokens, lengths, Carry(before), restart, exact_carry=True)
        found.append((result.log_likelihood[:, None] + result.carry.log_probs).unflatten(0, (len(piece), -1)))
    return torch.cat(found)


def _unit(hmm: Composition) -> Tensor:
    """Return the logarithm of the unit matrix [Z, Z] in float64."""
    return torch.eye(hmm.num_states, dtype=torch.float64, device=hmm.device).log()


def _look_around(products: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return what comes before and after each of C matrices [B, C, Z, Z] in their product; all in log space.

    Returns:
        before: [B, C, Z] first [B, Z] times all matrices before it.
        after: [B, C, Z] all matrices after it times last [B, Z].
    """
    if products.shape[1] == 1:
        return first[:, None], last[:, None]
    left, right = LogMatrix(products[:, ::2]), LogMatrix(products[:, 1::2])
    before, after = _look_around(right.product(left.log_values), first, last)
    between = left.product(before[..., None, :])[..., 0, :]
    ahead = LogMatrix(right.log_values.mT).product(after[..., None, :])[..., 0, :]
    return torch.stack([before, between], 2).flatten(1, 2), torch.stack([ahead, after], 2).flatten(1, 2)
