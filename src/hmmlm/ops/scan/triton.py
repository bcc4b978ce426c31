"""GPU kernels for the scan: few launches per step, no table over the vocabulary.

The forward and backward recursions (kernels.py) are independent: each divides every step by its own sum, and their
product is normalized where they meet. Up to a thousand states, a step takes microseconds and most of that is latency,
so one kernel computes a step of both recursions (products, emissions, sums). With more states a library product is
faster; one kernel follows it. The launches are meant to be replayed from a CUDA graph. Only `doubtful` synchronizes
with the device. Sums are accumulated in a fixed order, so results are deterministic.

All sequences must have the same length and parameters must be float32; products are in bfloat16 or float32.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hmmlm.ops.common import FLOOR, NEG_INF, dot_precision, matmul
from hmmlm.ops.graph import side_by_side
from hmmlm.ops.scan import scaled
from hmmlm.ops.scan.kernels import (
    divide_kernel,
    finish_kernel,
    gather_kernel,
    meet_kernel,
    step_kernel,
    weigh_kernel,
)
from hmmlm.ops.scan.naive import Evidence, Parameters
from hmmlm.ops.scan.word_kernels import (
    expand_words_kernel,
    join_words_kernel,
    mark_words_kernel,
    normalizer_kernel,
    sum_words_kernel,
)
from hmmlm.ops.softmax_adamw import GradientNorm, LogitGradient
from hmmlm.ops.softmax_adamw.triton import square_norm

_FLOOR = FLOOR[torch.float32]
# Number of states from which products use the library. The fused kernel reads its operands Z/64 and B/128 times from
# the cache: 100 MB for a step of 200 sequences with 2,048 states, which takes longer than two additional launches.
_LIBRARY_STATES = 2048
_TILES = ((128, 64), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16))  # sequences × states per program
_PROGRAMS = 100  # enough to keep a GPU busy: `_tile` selects the largest tile with at least this many programs
_GATHER = {"BLOCK_Z": 64, "BLOCK_N": 32, "num_warps": 4}
_MEET = {"BLOCK_N": 4, "BLOCK_Z": 512, "num_warps": 4}
_FINISH = {"BLOCK_T": 32, "BLOCK_Z": 512, "num_warps": 4}
_WEIGH = {"BLOCK_B": 32, "BLOCK_Z": 128, "num_warps": 4}
_WEIGH_PARTS = 8  # of the sequences, at most
_NORMALIZE = 4096  # logits of a row that are read at once
_MARK = 128
_SUM = {"BLOCK_N": 64, "BLOCK_Z": 64, "num_warps": 4}
_EXPAND = {"BLOCK_Z": 32, "BLOCK_V": 64, "num_warps": 4}
_JOINED = 16  # chunks whose sums are added at once


class Normalizers(NamedTuple):
    """What is kept of logits; log-probabilities of emissions are not."""

    edges: Tensor  # [V+1] the places of a word among the sorted tokens are edges[word] up to edges[word + 1]
    log_normalizer: Tensor  # [Z]
    spread: Tensor  # [Z] Σ p² over the words that are not in the batch
    log_transition: Tensor  # [Z, Z]
    both: Tensor | None  # [2, Z, Z] the transition probabilities and their transpose, if `step_kernel` reads them


class KernelChain(NamedTuple):
    """A batch prepared for the recursions: time-major, in the given order."""

    start: Tensor  # [Z] probabilities
    transition: Tensor  # [Z, Z] probabilities, in the dtype of products
    scores: Tensor  # [T, B, Z] log p(x_t | z), 0 where x_t is missing
    log_peak: Tensor  # [T, B] maximum of scores over states
    words: Tensor  # [T·B] all tokens, sorted
    order: Tensor  # [T·B] position t·B + b of each
    initial: Tensor | None  # [B, Z]
    restart: Tensor | None  # [T, B] uint8; always set if `initial` is
    evidence: Evidence
    normalizers: Normalizers | None = None

    @property
    def flags(self) -> Tensor:
        """Return the restart flags, or a placeholder that kernels with RESTARTS=False do not read."""
        return self.start if self.restart is None else self.restart

    def sort(self, values: Tensor) -> Tensor:
        return values

    def unsort(self, values: Tensor) -> Tensor:
        """Return `values` unchanged: sequences keep their order."""
        return values


class KernelForward(NamedTuple):
    """Result of both recursions, or of the filter alone if nothing is kept."""

    predicted: Tensor  # [T, B, Z] p(z_t | x_1..t−1); [1, B, Z] if nothing is kept
    joint: Tensor  # [2, T+1, B, Z]: α_t at [0, t+1]; values proportional to p(x_t.. | z_t) at [1, t]
    agreement: Tensor  # [T, B] Σ_z predicted_t(z) joint[1, t](z)
    scale: Tensor  # [T, B] p(x_t | x_1..t−1) / peak of x_t
    log_likelihood: Tensor  # [B]
    final: Tensor  # [B, Z]
    meeting: Tensor  # [B] least agreement, relative to the mass before joint[1] was divided
    suspect: Tensor  # [B] as `scaled.suspicious`, or because `meeting` is too small


def make_chain(
    parameters: Parameters,
    evidence: Evidence,
    products: torch.dtype,
    transition: Tensor | None = None,
    normalized: bool = True,
) -> KernelChain:
    """Convert the batch to time-major order, sort its tokens and gather their emission scores.

    Args:
        transition: of `transition_probs`, if computed before.
        normalized: False if `parameters` are logits, whose rows become probabilities by a softmax.
    """
    log_start, log_transition, log_emission = (p.contiguous() for p in parameters)
    (batch, steps), (states, n_words) = evidence.tokens.shape, log_emission.shape
    narrow = torch.int16 if n_words + 1 < 2**15 else torch.int32  # half the radix sort passes
    tokens = evidence.tokens.t().to(narrow, memory_format=torch.contiguous_format).flatten()
    scores, log_peak = log_start.new_empty(steps, batch, states), log_start.new_empty(steps, batch)

    normalizers = None
    if normalized:
        words, order = tokens.sort(stable=True)
        start = log_start.exp()
        if transition is None:
            transition = transition_probs(log_transition, products)
    else:
        (words, order, edges), (log_normalizer, spread), (start, log_transition, transition, both) = side_by_side(
            log_start.device,
            lambda: _sort(tokens, n_words),
            lambda: _normalize(log_emission, tokens),
            lambda: _softmax(log_start, log_transition, products),
        )
        normalizers = Normalizers(edges, log_normalizer, spread, log_transition, both)
    gather_kernel[(triton.cdiv(len(words), _GATHER["BLOCK_N"]),)](
        log_emission,
        log_start if normalizers is None else normalizers.log_normalizer,
        words,
        order,
        scores,
        log_peak,
        len(words),
        n_words,
        NORMALIZED=normalized,
        STATES=states,
        **_GATHER,
    )
    initial = None if evidence.initial is None else evidence.initial.to(log_start.dtype)
    restart = None if evidence.restart is None else evidence.restart.t().contiguous().view(torch.uint8)
    if restart is None and initial is not None:  # as in a graph: all of its kernels must be compiled before
        restart = torch.zeros(steps, batch, dtype=torch.uint8, device=words.device)
    return KernelChain(start, transition, scores, log_peak, words, order, initial, restart, evidence, normalizers)


def _sort(tokens: Tensor, n_words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [N] in the order of words, the place of each before, and the edges of the words."""
    words, order = tokens.sort(stable=True)
    return words, order, _edges(words, n_words)


def _softmax(start: Tensor, transition: Tensor, products: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return start, log-transition and transition probabilities of logits, and `both` of `Normalizers`."""
    log_transition = transition.log_softmax(1)
    probs = transition_probs(log_transition, products)
    both = torch.stack((probs, probs.t())) if len(probs) < _LIBRARY_STATES else None
    return start.softmax(0), log_transition, probs, both


def _normalize(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log_normalizer and spread of `Normalizers` from logits [Z, V] and a batch of tokens [N]."""
    states, n_words = logits.shape
    log_normalizer, spread = logits.new_empty(states), logits.new_empty(states)
    absent = torch.ones(n_words, dtype=torch.uint8, device=logits.device)
    mark_words_kernel[(triton.cdiv(len(tokens), _MARK),)](tokens, absent, len(tokens), BLOCK=_MARK)
    block = min(_NORMALIZE, triton.next_power_of_2(n_words))
    normalizer_kernel[(states,)](
        logits,
        absent,
        log_normalizer,
        spread,
        n_words,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )
    return log_normalizer, spread


def transition_probs(log_transition: Tensor, products: torch.dtype) -> Tensor:
    """Return the transition probabilities [Z, Z] in the dtype of products."""
    probs = torch.empty(log_transition.shape, dtype=products, device=log_transition.device)
    return torch.exp(log_transition, out=probs)  # rounded in the same pass


def _tile(batch: int, states: int, directions: int, products: torch.dtype) -> dict[str, int]:
    """Return tile sizes of a step: the largest tile with enough programs, with a BLOCK_K that fits on the chip."""
    for rows, columns in _TILES:
        if triton.cdiv(batch, rows) * triton.cdiv(states, columns) * directions >= _PROGRAMS:
            break
    inner = (256 if rows < 64 else 64) // (2 if products == torch.float32 else 1)
    return {
        "BLOCK_B": rows,
        "BLOCK_Z": columns,
        "BLOCK_K": max(16, min(inner, triton.next_power_of_2(states))),
        "num_warps": 8 if rows == 128 else 4 if rows * columns >= 1024 else 2,
        "num_stages": 3 if rows < 64 else 4,
    }


def forward(chain: KernelChain, keep: bool = True) -> KernelForward:
    """Run both recursions if `keep` (for `accumulate`), else only the filter."""
    steps, batch, states = chain.scores.shape
    like, products, directions = chain.start, chain.transition.dtype, 2 if keep else 1
    joint = torch.empty(directions, steps + 1, batch, states, dtype=products, device=like.device)
    predicted = like.new_empty(steps if keep else 1, batch, states)
    if chain.initial is not None:
        joint[0, 0] = chain.initial
    divided = states >= _LIBRARY_STATES
    partial = (_with_library if divided else _with_kernel)(chain, joint, predicted)
    tiles = {"TILES": partial.shape[3], "TILES_WIDTH": triton.next_power_of_2(partial.shape[3])}
    scale, agreement = like.new_empty(steps, batch), like.new_empty(steps, batch)
    if keep:
        meet_kernel[(triton.cdiv(steps * batch, _MEET["BLOCK_N"]),)](
            predicted, joint, partial, agreement, steps, batch, DIVIDED=divided, STATES=states, **tiles, **_MEET
        )
    log_likelihood, meeting, final = like.new_empty(batch), like.new_empty(batch), like.new_empty(batch, states)
    suspect = torch.empty(batch, dtype=torch.uint8, device=like.device)
    least = scaled.least_mass(_FLOOR, states, like.dtype)
    finish_kernel[(batch,)](
        partial,
        chain.log_peak,
        chain.scores,
        predicted,
        agreement,
        scale,
        log_likelihood,
        final,
        meeting,
        suspect,
        steps,
        batch if keep else 0,
        batch,
        least * scaled.SURE_RATIO,
        least,
        KEPT=keep,
        DIVIDED=divided,
        STATES=states,
        **tiles,
        **_FINISH,
    )
    return KernelForward(predicted, joint, agreement, scale, log_likelihood, final, meeting, suspect.view(torch.bool))


def _with_kernel(chain: KernelChain, joint: Tensor, predicted: Tensor) -> Tensor:
    """Fill joint (not yet divided) and predicted; return the sums of joint per tile [directions, T, B, tiles]."""
    steps, batch, states = chain.scores.shape
    directions, products, overlaps = len(joint), joint.dtype, _can_overlap(joint.device)
    tile = _tile(batch, states, directions, products)
    tiles = triton.cdiv(states, tile["BLOCK_Z"])
    partial = chain.start.new_empty(directions, steps, batch, tiles)
    transition = chain.transition
    if directions > 1:
        both = None if chain.normalizers is None else chain.normalizers.both
        transition = torch.stack((transition, transition.t())) if both is None else both
    for t in range(steps):
        step_kernel[(tiles, triton.cdiv(batch, tile["BLOCK_B"]), directions)](
            joint,
            transition,
            chain.start,
            chain.scores,
            chain.log_peak,
            chain.flags,
            predicted,
            partial,
            t,
            steps,
            batch if len(predicted) > 1 else 0,
            batch,
            BEGINS=t == 0,
            CARRIED=chain.initial is not None,
            RESTARTS=chain.restart is not None,
            STATES=states,
            TILES=tiles,
            TILES_WIDTH=triton.next_power_of_2(tiles),
            PRECISION=dot_precision(products),
            OVERLAPS=overlaps,
            **({"launch_pdl": True} if overlaps and t else {}),  # the first one waits for all that is read
            **tile,
        )
    return partial


@cache
def _can_overlap(device: torch.device) -> bool:
    """Return whether a kernel can be launched while the one before still runs: from Hopper GPUs on."""
    return device.type == "cuda" and bool(torch.version.cuda) and torch.cuda.get_device_capability(device) >= (9, 0)


def _with_library(chain: KernelChain, joint: Tensor, predicted: Tensor) -> Tensor:
    """Fill joint and predicted; return the sums by which joint was divided [directions, T, B, 1].

    The recursions run side by side: one multiplies while the other divides.
    """
    steps, batch, _ = chain.scores.shape
    partial = chain.start.new_empty(len(joint), steps, batch, 1)
    if len(joint) == 1:
        _recursion(chain, joint, predicted, partial, 0)
        return partial
    guess = torch.empty_like(predicted[:1])
    side_by_side(
        joint.device,
        lambda: _recursion(chain, joint, predicted, partial, 0),
        lambda: _recursion(chain, joint, guess, partial, 1),
    )
    return partial


def _recursion(chain: KernelChain, joint: Tensor, guess: Tensor, partial: Tensor, back: int) -> None:
    """Fill joint[back] and partial[back], and guess [T, B, Z] or [1, B, Z] with the products before emissions."""
    steps, batch, states = chain.scores.shape
    width = triton.next_power_of_2(states)
    transition = chain.transition.t() if back else chain.transition
    kept = len(guess) > 1
    for t in reversed(range(steps)) if back else range(steps):
        begins = t == steps - 1 if back else t == 0 and chain.initial is None
        if not begins:
            _product(joint[back, t + back], transition, guess[t if kept else 0])
        divide_kernel[(batch,)](
            guess,
            chain.start,
            chain.scores,
            chain.log_peak,
            chain.flags,
            joint[back],
            partial[back],
            t,
            batch if kept else 0,
            batch,
            BACK=back,
            BEGINS=begins,
            RESTARTS=chain.restart is not None,
            STATES=states,
            BLOCK_Z=width,
            num_warps=min(16, max(4, width // 512)),
        )


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute out = a @ b, accumulated in float32."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def accumulate(chain: KernelChain, result: KernelForward, seed: Tensor, shape: torch.Size) -> tuple[Parameters, Tensor]:
    """Compute the expected counts; see `scaled.accumulate`."""
    start, transition, first = _state_counts(chain, result, seed)
    states, n_words = shape
    edges = _edges(chain.words, n_words)
    sums, _ = _word_sums(chain, result, seed, edges)
    emission = seed.new_empty(shape)
    expand_words_kernel[(triton.cdiv(n_words, _EXPAND["BLOCK_V"]), triton.cdiv(states, _EXPAND["BLOCK_Z"]))](
        edges, sums, emission, n_words, STATES=states, **_EXPAND
    )
    return Parameters(start, transition, emission), first


def accumulate_words(
    chain: KernelChain, result: KernelForward, seed: Tensor
) -> tuple[Tensor, Tensor, LogitGradient, GradientNorm]:
    """Compute the gradient of the logits of start [Z], transition [Z, Z] and emissions, and its norm."""
    assert chain.normalizers is not None
    edges, log_normalizer, spread, log_transition, _ = chain.normalizers
    norms = seed.new_empty(2)

    def of_words() -> tuple[LogitGradient, Tensor]:
        sums, total = _word_sums(chain, result, seed, edges)
        scores = chain.scores.view(sums.shape)
        gradient = LogitGradient(log_normalizer, spread, chain.words, chain.order, edges, scores, sums, total)
        return gradient, square_norm(gradient)

    def of_states() -> tuple[Tensor, Tensor]:
        weights, begun = _weights(chain, result, seed)

        def of_transition() -> Tensor:
            counts = _transition_counts(chain, result, weights)
            gradient = torch._log_softmax_backward_data(counts, log_transition, 1, counts.dtype)
            torch.linalg.vector_norm(gradient, out=norms[0])
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


def _state_counts(chain: KernelChain, result: KernelForward, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the expected counts of start [Z] and transition [Z, Z], and w times seed at position 0 [B, Z]."""
    weights, begun = _weights(chain, result, seed)
    return begun.sum(0) * chain.start, _transition_counts(chain, result, weights), weights[0]


def _weights(chain: KernelChain, result: KernelForward, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Compute w times seed [T, B, Z], and n parts [n, Z] of its sum over the positions where sequences begin."""
    steps, batch, states = chain.scores.shape
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


def _transition_counts(chain: KernelChain, result: KernelForward, weights: Tensor) -> Tensor:
    """Compute the expected counts of transitions [Z, Z] from `_weights`."""
    (steps, _, states), first = chain.scores.shape, int(chain.initial is None)
    alpha = result.joint[0]
    counts = matmul(alpha[first:steps].view(-1, states).t(), weights[first:].view(-1, states))
    return counts.mul_(chain.transition)


def _edges(words: Tensor, n_words: int) -> Tensor:
    """Return [V+1] int32: the places of word v in the sorted `words` are edges[v] up to edges[v + 1]."""
    every = torch.arange(n_words + 1, dtype=words.dtype, device=words.device)
    return torch.searchsorted(words, every, out_int32=True)


def _word_sums(chain: KernelChain, result: KernelForward, seed: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the expected counts of the words of the batch, weighted by seed [B].

    Returns:
        sums [T·B, Z]: those of a word at its first place in the order of `chain.words`, the rest undefined.
        total [Z]: the sum over words.
    """
    steps, batch, states = chain.scores.shape
    chunks, blocks = triton.cdiv(len(chain.words), _SUM["BLOCK_N"]), triton.cdiv(states, _SUM["BLOCK_Z"])
    sums, totals = seed.new_empty(steps * batch, states), seed.new_empty(chunks, states)
    sum_words_kernel[(chunks, blocks)](
        chain.words,
        chain.order,
        result.predicted,
        result.joint[1],
        result.agreement,
        seed.contiguous(),
        sums,
        totals,
        len(chain.words),
        batch,
        STATES=states,
        PARTS=3 if result.joint.dtype == torch.float32 else 2,
        **_SUM,
    )
    if chunks > 1:
        join_words_kernel[(chunks - 1, blocks)](chain.words, edges, sums, STATES=states, CHUNKS=_JOINED, **_SUM)
    return sums, totals.sum(0)


def suspicious(result: KernelForward) -> Tensor:
    """Return a mask [B]: as `scaled.suspicious`, or where past and future hardly agree (see `doubtful`)."""
    return result.suspect


def doubtful(parameters: Parameters, chain: KernelChain, result: KernelForward) -> Tensor:
    """Return a mask [B]: as `scaled.doubtful`, whose recursions also verify the suspect sequences.

    Also True where the states that explain the future are so unlikely given the past that the likely states were
    flushed to zero in the backward recursion. Each step loses at most _FLOOR per state from a sum over states, the
    `meeting`, so this test is a proof for any matrix.
    """
    least = scaled.least_mass(_FLOOR, len(chain.start), chain.start.dtype)
    apart = ~(result.meeting >= least) & (result.log_likelihood > NEG_INF)
    suspect = scaled.faint(parameters, result.scale, _FLOOR)
    if bool(suspect.any()):
        portable = scaled.make_chain(parameters, chain.evidence, chain.start.dtype)
        suspect &= scaled.doubtful(parameters, portable, scaled.forward(portable, keep=False))
    return suspect | apart
