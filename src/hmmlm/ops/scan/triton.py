"""GPU kernels for the scan: few launches per step, no table over the vocabulary.

`make_chain` prepares a batch (kernel_chain.py), `forward` runs the recursions, `accumulate` and `accumulate_words`
compute their gradient (kernel_counts.py). The launches are meant to be replayed from a CUDA graph. Only `find_suspect`
synchronizes with the device. Sums are accumulated in a fixed order, so results are deterministic.

The forward and backward recursions (kernels.py) are independent: each divides every step by its own sum, and their
product is normalized where they meet. Up to a thousand states, a step takes microseconds and most of that is latency,
so one kernel computes a step of both recursions (products, emissions, sums). With more states a library product is
faster; one kernel follows it.

All sequences must have the same length and parameters must be float32; products are in bfloat16 or float32.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from hmmlm.ops.common import NEG_INF, dot_precision
from hmmlm.ops.graph import side_by_side
from hmmlm.ops.scan import scaled
from hmmlm.ops.scan.kernel_chain import LIBRARY_STATES, KernelChain, KernelForward, make_chain
from hmmlm.ops.scan.kernel_counts import accumulate, accumulate_words
from hmmlm.ops.scan.kernels import divide_kernel, finish_kernel, meet_kernel, step_kernel
from hmmlm.ops.scan.problem import Parameters
from hmmlm.ops.underflow import FLOOR, least_sum

__all__ = ["accumulate", "accumulate_words", "find_suspect", "forward", "guess_suspect", "make_chain"]

_FLOOR = FLOOR[torch.float32]
_TILES = ((128, 64), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16))  # sequences × states per program
_PROGRAMS = 100  # enough to keep a GPU busy: `_tile` selects the largest tile with at least this many programs
_MEET = {"BLOCK_N": 4, "BLOCK_Z": 512, "num_warps": 4}
_FINISH = {"BLOCK_T": 32, "BLOCK_Z": 512, "num_warps": 4}


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
    steps, batch, states = chain.shape
    like, products, directions = chain.start, chain.transition.dtype, 2 if keep else 1
    joint = torch.empty(directions, steps + 1, batch, states, dtype=products, device=like.device)
    predicted = like.new_empty(steps if keep else 1, batch, states)
    if chain.initial is not None:
        joint[0, 0] = chain.initial
    divided = states >= LIBRARY_STATES
    partial = (_with_library if divided else _with_kernel)(chain, joint, predicted)
    tiles = {"TILES": partial.shape[3], "TILES_WIDTH": triton.next_power_of_2(partial.shape[3])}
    scale, agreement = like.new_empty(steps, batch), like.new_empty(steps, batch)
    if keep:
        meet_kernel[(triton.cdiv(steps * batch, _MEET["BLOCK_N"]),)](
            predicted, joint, partial, agreement, steps, batch, DIVIDED=divided, STATES=states, **tiles, **_MEET
        )
    log_likelihood, meeting = like.new_empty(2, batch)
    carry = like.new_empty(batch, states, dtype=torch.float64)
    suspect = torch.empty(batch, dtype=torch.uint8, device=like.device)
    least = least_sum(states, like.dtype, _FLOOR)
    finish_kernel[(batch,)](
        partial,
        chain.log_peak,
        chain.scores,
        chain.rows,
        predicted,
        agreement,
        scale,
        log_likelihood,
        carry,
        meeting,
        suspect,
        steps,
        batch if keep else 0,
        batch,
        least * scaled.LARGEST_RATIO,
        least,
        INDEXED=chain.places is not None,
        KEPT=keep,
        DIVIDED=divided,
        STATES=states,
        **tiles,
        **_FINISH,
    )
    return KernelForward(predicted, joint, agreement, scale, log_likelihood, carry, meeting, suspect.view(torch.bool))


def _with_kernel(chain: KernelChain, joint: Tensor, predicted: Tensor) -> Tensor:
    """Fill joint (not yet divided) and predicted; return the sums of joint per tile [directions, T, B, tiles]."""
    steps, batch, states = chain.shape
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
            chain.rows,
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
            INDEXED=chain.places is not None,
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
    steps, batch, _ = chain.shape
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
    steps, batch, states = chain.shape
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
            chain.rows,
            chain.flags,
            joint[back],
            partial[back],
            t,
            batch if kept else 0,
            batch,
            BACK=back,
            BEGINS=begins,
            RESTARTS=chain.restart is not None,
            INDEXED=chain.places is not None,
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


def guess_suspect(result: KernelForward) -> Tensor:
    """Return a mask [B]: as `scaled.guess_suspect`, or where past and future hardly agree (see `find_suspect`)."""
    return result.suspect


def find_suspect(parameters: Parameters, chain: KernelChain, result: KernelForward) -> Tensor:
    """Return a mask [B]: as `scaled.find_suspect`, whose recursions also verify the suspect sequences.

    Also True where the states that explain the future are so unlikely given the past that the likely states were
    flushed to zero in the backward recursion. Each step loses at most _FLOOR per state from a sum over states, the
    `meeting`, so this test is a proof for any matrix.
    """
    least = least_sum(len(chain.start), chain.start.dtype, _FLOOR)
    apart = ~(result.meeting >= least) & (result.log_likelihood > NEG_INF)
    suspect = scaled.suspect_by_ratio(parameters, result.scale, _FLOOR)
    if bool(suspect.any()):
        portable = scaled.make_chain(parameters, chain.evidence, chain.start.dtype)
        suspect &= scaled.find_suspect(parameters, portable, scaled.forward(portable, keep=False))
    return suspect | apart
