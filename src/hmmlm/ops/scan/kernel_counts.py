"""Expected counts from both recursions of the GPU kernels: the gradient of the scan."""

import torch
import triton
from torch import Tensor

from hmmlm.ops.common import matmul
from hmmlm.ops.graph import side_by_side
from hmmlm.ops.scan.kernel_chain import KernelChain, KernelForward, find_edges, row_blocks
from hmmlm.ops.scan.kernels import weigh_kernel
from hmmlm.ops.scan.problem import Parameters
from hmmlm.ops.scan.softmax_kernels import (
    expand_words_kernel,
    join_words_kernel,
    softmax_gradient_kernel,
    sum_words_kernel,
)
from hmmlm.ops.softmax_adamw import GradientNorm, LogitGradient
from hmmlm.ops.softmax_adamw.triton import square_norm

_WEIGH = {"BLOCK_B": 32, "BLOCK_Z": 128, "num_warps": 4}
_WEIGH_PARTS = 8  # of the sequences, at most
_SUM = {"BLOCK_N": 64, "BLOCK_Z": 64, "num_warps": 4}
_EXPAND = {"BLOCK_Z": 32, "BLOCK_V": 64, "num_warps": 4}
_JOINED = 16  # chunks whose sums are added at once


def accumulate(chain: KernelChain, result: KernelForward, seed: Tensor, shape: torch.Size) -> Parameters:
    """Compute the expected counts; see `scaled.accumulate`."""
    start, transition = _state_counts(chain, result, seed)
    assert chain.tokens is not None
    states, n_words = shape
    edges = find_edges(chain.tokens.words, n_words)
    sums, _ = _word_sums(chain, result, seed, edges)
    emission = seed.new_empty(shape)
    expand_words_kernel[(triton.cdiv(n_words, _EXPAND["BLOCK_V"]), triton.cdiv(states, _EXPAND["BLOCK_Z"]))](
        edges, sums, emission, n_words, STATES=states, **_EXPAND
    )
    return Parameters(start, transition, emission)


def accumulate_words(
    chain: KernelChain, result: KernelForward, seed: Tensor
) -> tuple[Tensor, Tensor, LogitGradient, GradientNorm]:
    """Compute the gradient of the logits of start [Z], transition [Z, Z] and emissions, and its norm."""
    assert chain.normalizers is not None and chain.tokens is not None
    tokens = chain.tokens
    edges, log_normalizer, spread, logits, log_sums, _ = chain.normalizers
    norms, row_norms = seed.new_empty(2), torch.empty_like(log_sums)

    def of_words() -> tuple[LogitGradient, Tensor]:
        sums, total = _word_sums(chain, result, seed, edges)
        scores = chain.scores.view(sums.shape)
        gradient = LogitGradient(log_normalizer, spread, *tokens, edges, scores, sums, total)
        return gradient, square_norm(gradient)

    def of_states() -> tuple[Tensor, Tensor]:
        weights, begun = _weights(chain, result, seed)

        def of_transition() -> Tensor:
            gradient, states = _pairs(chain, result, weights), len(logits)
            softmax_gradient_kernel[(states,)](gradient, logits, log_sums, row_norms, states, **row_blocks(states))
            torch.linalg.vector_norm(row_norms, out=norms[0])
            return gradient

        def of_start() -> Tensor:
            counts = begun.sum(0) * chain.start
            counts -= chain.start * counts.sum()
            torch.linalg.vector_norm(counts, out=norms[1])
            return counts

        transition, start = side_by_side(seed.device, of_transition, of_start)
        return start, transition

    (gradient, squares), (start, transition) = side_by_side(seed.device, of_words, of_states)
    return start, transition, gradient, GradientNorm(squares, norms)


def _state_counts(chain: KernelChain, result: KernelForward, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the expected counts of start [Z] and transition [Z, Z]."""
    weights, begun = _weights(chain, result, seed)
    return begun.sum(0) * chain.start, _pairs(chain, result, weights).mul_(chain.transition)


def _weights(chain: KernelChain, result: KernelForward, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute w times seed [T, B, Z], and n parts [n, Z] of its sum over the positions where sequences begin."""
    steps, batch, states = chain.shape
    ahead = result.joint[1]
    weights = torch.empty_like(ahead[:steps])
    parts = min(_WEIGH_PARTS, triton.cdiv(batch, _WEIGH["BLOCK_B"]))
    begun, seed = seed.new_empty(parts * steps, states), seed.contiguous()
    weigh_kernel[(triton.cdiv(states, _WEIGH["BLOCK_Z"]), steps, parts)](
        ahead,
        result.agreement,
        seed,
        chain.flags,
        weights,
        begun,
        batch,
        CARRIED=chain.initial is not None,
        RESTARTS=chain.restart is not None,
        STATES=states,
        **_WEIGH,
    )
    if chain.restart is None:  # all begin at the first step
        begun = begun.view(parts, steps, states)[:, 0]
    return weights, begun


def _pairs(chain: KernelChain, result: KernelForward, weights: Tensor) -> Tensor:
    """Compute the gradient of the transition probabilities [Z, Z] from `_weights`: expected counts divided by them."""
    (steps, _, states), first = chain.shape, int(chain.initial is None)
    alpha = result.joint[0]
    return matmul(alpha[first:steps].view(-1, states).t(), weights[first:].view(-1, states))


def _word_sums(chain: KernelChain, result: KernelForward, seed: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the expected counts of the words of the batch, weighted by seed [B].

    Returns:
        sums [T·B, Z]: those of a word at its first place in the order of `chain.tokens`, the rest undefined.
        total [Z]: the sum over words.
    """
    steps, batch, states = chain.shape
    assert chain.tokens is not None
    words, order = chain.tokens
    chunks, blocks = triton.cdiv(len(words), _SUM["BLOCK_N"]), triton.cdiv(states, _SUM["BLOCK_Z"])
    sums, totals = seed.new_empty(steps * batch, states), seed.new_empty(chunks, states)
    sum_words_kernel[(chunks, blocks)](
        words,
        order,
        result.predicted,
        result.joint[1],
        result.agreement,
        seed.contiguous(),
        sums,
        totals,
        len(words),
        batch,
        STATES=states,
        PARTS=3 if result.joint.dtype == torch.float32 else 2,
        **_SUM,
    )
    if chunks > 1:
        join_words_kernel[(chunks - 1, blocks)](words, edges, sums, STATES=states, CHUNKS=_JOINED, **_SUM)
    return sums, totals.sum(0)
