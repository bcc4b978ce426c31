"""GPU kernels: few launches a step, no table over the vocabulary.

Both recursions (kernels.py) are independent of each other, each step divided by its own sum; where they meet, their
product is normalised. Up to a thousand states a step is over in microseconds, most of which go by in waiting; so what
belongs to a step of both (the products, the emissions, the sums) is one kernel. With more states a library's product
is faster, and one kernel follows it. The launches are for a CUDA graph to repeat. Nothing waits for the device except
`doubtful`. Sums are made in a fixed order: results repeat bit by bit.

All sequences must be of one length, the parameters in float32; products are in bfloat16 or float32.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hmmlm.ops.linear_logsumexp.precision import matmul
from hmmlm.ops.results import Counts
from hmmlm.ops.scan import torch as scaled
from hmmlm.ops.scan.kernels import (
    divide_kernel,
    emission_counts_kernel,
    finish_kernel,
    gather_kernel,
    meet_kernel,
    step_kernel,
    weigh_kernel,
)
from hmmlm.ops.scan.naive import NEG_INF, Evidence, Parameters
from hmmlm.ops.small import FLOOR

_FLOOR = FLOOR[torch.float32]
# States from which the product is the library's. The one kernel reads its operands Z/64 and B/128 times from the
# cache, 100 MB for a step of 200 sequences with 2,048 states: by then that takes longer than two launches more.
_LIBRARY_STATES = 2048
_TILES = ((128, 64), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16))  # sequences × states of a program
_PROGRAMS = 100  # enough to keep a GPU busy: the largest tile that leaves as many is taken
_GATHER = {"BLOCK_Z": 64, "BLOCK_N": 32, "num_warps": 4}
_MEET = {"BLOCK_N": 4, "BLOCK_Z": 512, "num_warps": 4}
_FINISH = {"BLOCK_T": 32, "BLOCK_Z": 512, "num_warps": 4}
_WEIGH = {"BLOCK_B": 32, "BLOCK_Z": 128, "num_warps": 4}
_COUNT = {"BLOCK_V": 64, "BLOCK_Z": 64, "BLOCK_N": 64, "num_warps": 4}


class Chain(NamedTuple):
    """A batch ready for the recursions: time-major."""

    start: Tensor  # [Z] probabilities
    transition: Tensor  # [Z, Z] probabilities, in the dtype the products are done in
    scores: Tensor  # [T, B, Z] log p(x_t | z), 0 where x_t is missing
    log_peak: Tensor  # [T, B] their maximum
    words: Tensor  # [T·B] all tokens, sorted
    order: Tensor  # [T·B] where each is, t·B + b
    initial: Tensor | None  # [B, Z]
    restart: Tensor | None  # [T, B] uint8; always there if `initial` is
    evidence: Evidence

    @property
    def flags(self) -> Tensor:
        """Where chains restart; or anything, which kernels that are told so do not look at."""
        return self.start if self.restart is None else self.restart

    def sort(self, values: Tensor) -> Tensor:
        return values

    def unsort(self, values: Tensor) -> Tensor:
        """Sequences are in the order in which they were given."""
        return values


class Forward(NamedTuple):
    """Both recursions; only the filter if nothing is kept."""

    predicted: Tensor  # [T, B, Z] p(z_t | x_1..t−1); [1, B, Z] if nothing is kept
    joint: Tensor  # [2, T+1, B, Z]: α_t at [0, t+1], and at [1, t] what is proportional to p(x_t.. | z_t)
    agreement: Tensor  # [T, B] Σ_z of predicted times the latter
    scale: Tensor  # [T, B] p(x_t | x_1..t−1) / peak of x_t
    log_likelihood: Tensor  # [B]
    final: Tensor  # [B, Z]
    meeting: Tensor  # [B] the least agreement, as a share of what was there before anything was lost
    suspect: Tensor  # [B] as `torch.suspicious`, or because of the meeting


def prepare(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> Chain:
    log_start, log_transition, log_emission = (p.contiguous() for p in parameters)
    (batch, steps), (states, n_words) = evidence.tokens.shape, log_emission.shape
    narrow = torch.int16 if n_words + _COUNT["BLOCK_V"] <= 2**15 else torch.int32  # half the passes of a radix sort
    tokens = evidence.tokens.t().to(narrow, memory_format=torch.contiguous_format)
    words, order = tokens.flatten().sort(stable=True)
    scores, log_peak = log_start.new_empty(steps, batch, states), log_start.new_empty(steps, batch)
    gather_kernel[(triton.cdiv(len(words), _GATHER["BLOCK_N"]),)](
        log_emission, words, order, scores, log_peak, len(words), n_words, STATES=states, **_GATHER
    )
    initial = None if evidence.initial is None else evidence.initial.to(log_start.dtype)
    restart = None if evidence.restart is None else evidence.restart.t().contiguous().view(torch.uint8)
    if restart is None and initial is not None:  # as in a graph, for which all kernels have to be compiled before
        restart = torch.zeros(steps, batch, dtype=torch.uint8, device=words.device)
    transition = torch.empty_like(log_transition, dtype=products)
    torch.exp(log_transition, out=transition)  # rounded in the same pass
    return Chain(log_start.exp(), transition, scores, log_peak, words, order, initial, restart, evidence)


def _tile(batch: int, states: int, directions: int, products: torch.dtype) -> dict[str, int]:
    """Of a step: as large as leaves enough programs, and as much of the product ahead as fits on the chip."""
    for rows, columns in _TILES:
        if triton.cdiv(batch, rows) * triton.cdiv(states, columns) * directions >= _PROGRAMS:
            break
    inner = (128 if rows < 64 else 64) // (2 if products == torch.float32 else 1)
    return {
        "BLOCK_B": rows, "BLOCK_Z": columns, "BLOCK_K": max(16, min(inner, triton.next_power_of_2(states))),
        "num_warps": 8 if rows == 128 else 4 if rows * columns >= 1024 else 2, "num_stages": 4,
    }  # fmt: skip


def _precision(products: torch.dtype) -> str:
    """Products of float32 are exact to its last bits, unless torch is told that they need not be."""
    return "tf32x3" if products == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def forward(chain: Chain, keep: bool = True) -> Forward:
    """Both recursions if kept, for `accumulate`; else the filter."""
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
        partial, chain.log_peak, chain.scores, predicted, agreement, scale, log_likelihood, final, meeting, suspect,
        steps, batch if keep else 0, batch, least * scaled.SURE_RATIO, least, KEPT=keep, DIVIDED=divided,
        STATES=states, **tiles, **_FINISH,
    )  # fmt: skip
    return Forward(predicted, joint, agreement, scale, log_likelihood, final, meeting, suspect.view(torch.bool))


def _with_kernel(chain: Chain, joint: Tensor, predicted: Tensor) -> Tensor:
    """Fills joint (not divided yet) and predicted; sums [directions, T, B, tiles] of the parts of joint."""
    steps, batch, states = chain.scores.shape
    directions, products = len(joint), joint.dtype
    tile = _tile(batch, states, directions, products)
    tiles = triton.cdiv(states, tile["BLOCK_Z"])
    partial = chain.start.new_empty(directions, steps, batch, tiles)
    transition = torch.stack((chain.transition, chain.transition.t())) if directions > 1 else chain.transition
    for t in range(steps):
        step_kernel[(tiles, triton.cdiv(batch, tile["BLOCK_B"]), directions)](
            joint, transition, chain.start, chain.scores, chain.log_peak, chain.flags, predicted, partial, t, steps,
            batch if len(predicted) > 1 else 0, batch, BEGINS=t == 0, CARRIED=chain.initial is not None,
            RESTARTS=chain.restart is not None, STATES=states, TILES=tiles, TILES_WIDTH=triton.next_power_of_2(tiles),
            PRECISION=_precision(products), **tile,
        )  # fmt: skip
    return partial


def _with_library(chain: Chain, joint: Tensor, predicted: Tensor) -> Tensor:
    """Fills joint and predicted; sums [directions, T, B, 1] of what was divided."""
    steps, batch, states = chain.scores.shape
    partial = chain.start.new_empty(len(joint), steps, batch, 1)
    width = triton.next_power_of_2(states)
    for back in range(len(joint)):
        transition = chain.transition.t() if back else chain.transition
        guess = torch.empty_like(predicted[:1]) if back else predicted
        kept = len(guess) > 1
        for t in reversed(range(steps)) if back else range(steps):
            begins = t == steps - 1 if back else t == 0 and chain.initial is None
            if not begins:
                _product(joint[back, t + back], transition, guess[t if kept else 0])
            divide_kernel[(batch,)](
                guess, chain.start, chain.scores, chain.log_peak, chain.flags, joint[back], partial[back], t,
                batch if kept else 0, batch, BACK=back, BEGINS=begins, RESTARTS=chain.restart is not None,
                STATES=states, BLOCK_Z=width, num_warps=min(16, max(4, width // 512)),
            )  # fmt: skip
    return partial


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, summed in float32."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def accumulate(chain: Chain, result: Forward, seed: Tensor, shape: torch.Size) -> tuple[Counts, Tensor]:
    """As `torch.accumulate`."""
    steps, batch, states = chain.scores.shape
    alpha, ahead = result.joint
    weights = torch.empty_like(ahead[:steps])
    begun, seed = seed.new_empty(steps, states), seed.contiguous()
    weigh_kernel[(triton.cdiv(states, _WEIGH["BLOCK_Z"]), steps)](
        ahead, result.agreement, seed, chain.flags, weights, begun, batch, CARRIED=chain.initial is not None,
        RESTARTS=chain.restart is not None, STATES=states, **_WEIGH,
    )  # fmt: skip
    first = int(chain.initial is None)
    transition = matmul(alpha[first:steps].view(-1, states).t(), weights[first:].view(-1, states))
    counts = Counts(begun.sum(0) * chain.start, transition.mul_(chain.transition),
                    _emission_counts(chain, result, seed, shape), result.log_likelihood.sum())  # fmt: skip
    return counts, weights[0]


def _emission_counts(chain: Chain, result: Forward, seed: Tensor, shape: torch.Size) -> Tensor:
    (states, n_words), width = shape, _COUNT["BLOCK_V"]
    firsts = torch.arange(0, n_words + width, width, dtype=chain.words.dtype, device=chain.words.device)
    edges = torch.searchsorted(chain.words, firsts, out_int32=True)
    counts = seed.new_empty(shape)
    emission_counts_kernel[(len(firsts) - 1, triton.cdiv(states, _COUNT["BLOCK_Z"]))](
        chain.words, chain.order, edges, result.predicted, result.joint[1], result.agreement, seed, counts, n_words,
        len(seed), STATES=states, PARTS=3 if result.joint.dtype == torch.float32 else 2, **_COUNT,
    )
    return counts


def suspicious(result: Forward) -> Tensor:
    """[B] as `torch.suspicious`, or because past and future hardly agree: see `doubtful`."""
    return result.suspect


def doubtful(parameters: Parameters, chain: Chain, result: Forward) -> Tensor:
    """[B] as `torch.doubtful`, whose recursions also do the second look.

    Or where the states that explain what is ahead are so unlikely after what came before that those which are likely
    were flushed to zero on the way back. At each step at most _FLOOR a state is lost, of a sum over states that is the
    `meeting`: a proof, whatever the matrix.
    """
    least = scaled.least_mass(_FLOOR, len(chain.start), chain.start.dtype)
    apart = ~(result.meeting >= least) & (result.log_likelihood > NEG_INF)
    suspect = scaled.faint(parameters, result.scale, _FLOOR)
    if bool(suspect.any()):
        portable = scaled.prepare(parameters, chain.evidence, chain.start.dtype)
        suspect &= scaled.doubtful(parameters, portable, scaled.forward(portable, keep=False))
    return suspect | apart
