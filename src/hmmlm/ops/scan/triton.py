"""GPU kernels: one launch a step in each direction, and no table over the vocabulary.

At a few hundred states a step is over in microseconds, most of which go by in waiting; so what belongs to a step (the
product, the emissions, its normalisation) is one kernel, and the launches are for a CUDA graph to repeat. Nothing waits
for the device except `doubtful`. Sums are made in a fixed order: results repeat bit by bit.

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
    backward_kernel,
    emission_counts_kernel,
    emission_kernel,
    finish_kernel,
    forward_kernel,
)
from hmmlm.ops.scan.naive import Evidence, Parameters

_TILES = ((128, 64), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16))  # sequences × states of a program
_PROGRAMS = 100  # enough to keep a GPU busy: the largest tile that leaves as many is taken
_GATHER = {"BLOCK_Z": 64, "BLOCK_N": 32, "num_warps": 4}
_FINISH = {"BLOCK_T": 32, "BLOCK_Z": 512, "num_warps": 4}
_COUNT = {"BLOCK_V": 64, "BLOCK_Z": 64, "BLOCK_N": 64, "num_warps": 4}


class Chain(NamedTuple):
    """A batch ready for the recursions: time-major."""

    start: Tensor  # [Z] probabilities
    transition: Tensor  # [Z, Z] probabilities, in the dtype the products are done in
    emission: Tensor  # [T, B, Z] p(x_t | z) / max_z p(x_t | z)
    log_peak: Tensor  # [T, B] the log of that maximum
    words: Tensor  # [T·B] all tokens, sorted
    order: Tensor  # [T·B] where each is, t·B + b
    initial: Tensor | None  # [B, Z]
    restart: Tensor | None  # [T, B] uint8; always there if `initial` is
    evidence: Evidence

    def sort(self, values: Tensor) -> Tensor:
        return values

    def unsort(self, values: Tensor) -> Tensor:
        """Sequences are in the order in which they were given."""
        return values


def prepare(parameters: Parameters, evidence: Evidence, products: torch.dtype) -> Chain:
    log_start, log_transition, log_emission = (p.contiguous() for p in parameters)
    (batch, steps), (states, n_words) = evidence.tokens.shape, log_emission.shape
    narrow = torch.int16 if n_words + _COUNT["BLOCK_V"] <= 2**15 else torch.int32  # half the passes of a radix sort
    tokens = evidence.tokens.t().to(narrow, memory_format=torch.contiguous_format)
    words, order = tokens.flatten().sort(stable=True)
    emission, log_peak = log_start.new_empty(steps, batch, states), log_start.new_empty(steps, batch)
    emission_kernel[(triton.cdiv(len(words), _GATHER["BLOCK_N"]),)](
        log_emission, words, order, emission, log_peak, len(words), n_words, STATES=states, **_GATHER
    )
    initial = None if evidence.initial is None else evidence.initial.to(log_start.dtype)
    restart = None if evidence.restart is None else evidence.restart.t().contiguous().view(torch.uint8)
    if restart is None and initial is not None:  # as in a graph, for which all kernels have to be compiled before
        restart = torch.zeros(steps, batch, dtype=torch.uint8, device=words.device)
    transition = log_transition.exp().to(products)
    return Chain(log_start.exp(), transition, emission, log_peak, words, order, initial, restart, evidence)


def _tile(batch: int, states: int, products: torch.dtype) -> dict[str, int]:
    """Of a step: as large as leaves enough programs, and as much of the product ahead as fits on the chip."""
    for rows, columns in _TILES:
        if triton.cdiv(batch, rows) * triton.cdiv(states, columns) >= _PROGRAMS:
            break
    inner = (128 if rows < 64 else 64) // (2 if products == torch.float32 else 1)
    return {
        "BLOCK_B": rows, "BLOCK_Z": columns, "BLOCK_K": max(16, min(inner, triton.next_power_of_2(states))),
        "num_warps": 8 if rows == 128 else 4 if rows * columns >= 1024 else 2, "num_stages": 4,
    }  # fmt: skip


def _precision(products: torch.dtype) -> str:
    """Products of float32 are exact to its last bits, unless torch is told that they need not be."""
    return "tf32x3" if products == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"


def forward(chain: Chain, keep: bool = True) -> scaled.Forward:
    """Filter; `predicted` only if kept, `alpha` never: the backward pass makes it as it goes."""
    steps, batch, states = chain.emission.shape
    like, products = chain.start, chain.transition.dtype
    tile = _tile(batch, states, products)
    tiles = triton.cdiv(states, tile["BLOCK_Z"])
    joint = torch.empty(steps + 1, batch, states, dtype=products, device=like.device)  # [t] is what step t starts from
    predicted, step = like.new_empty(steps if keep else 1, batch, states), batch if keep else 0  # rows a step goes on
    partial = like.new_empty(steps, batch, tiles)
    if chain.initial is not None:
        joint[0] = chain.initial
    for t in range(steps):
        forward_kernel[(tiles, triton.cdiv(batch, tile["BLOCK_B"]))](
            joint, chain.transition, chain.start, chain.emission, like if chain.restart is None else chain.restart,
            predicted, partial, t, step, batch, BEGINS=t == 0 and chain.initial is None,
            RESTARTS=chain.restart is not None, STATES=states, TILES=tiles, TILES_WIDTH=triton.next_power_of_2(tiles),
            PRECISION=_precision(products), **tile,
        )
    scale, log_likelihood, final = (like.new_empty(shape) for shape in ((steps, batch), batch, (batch, states)))
    finish_kernel[(batch,)](
        partial, chain.log_peak, chain.emission, predicted, scale, log_likelihood, final, steps, step, batch,
        STATES=states, TILES=tiles, TILES_WIDTH=triton.next_power_of_2(tiles), **_FINISH,
    )  # fmt: skip
    return scaled.Forward(
        None, predicted if keep else None, scale, log_likelihood, final, scaled.FLOOR[torch.float32]
    )


def accumulate(chain: Chain, result: scaled.Forward, seed: Tensor, shape: torch.Size) -> tuple[Counts, Tensor]:
    """As `torch.accumulate`."""
    assert result.predicted is not None
    steps, batch, states = chain.emission.shape
    products = chain.transition.dtype
    tile = _tile(batch, states, products)
    weights = torch.empty(steps, batch, states, dtype=products, device=seed.device)
    alpha, posterior = weights.new_empty(steps + 1, batch, states), torch.empty_like(chain.emission)
    if chain.initial is not None:
        alpha[0] = chain.initial
    for t in reversed(range(steps)):
        backward_kernel[(triton.cdiv(states, tile["BLOCK_Z"]), triton.cdiv(batch, tile["BLOCK_B"]))](
            weights, chain.transition, chain.emission, result.predicted, result.scale, seed,
            seed if chain.restart is None else chain.restart, alpha, posterior, t, result.floor, batch,
            LAST=t == steps - 1, RESTARTS=chain.restart is not None, STATES=states, PRECISION=_precision(products),
            **tile,
        )
    first = int(chain.initial is None)
    before, after = alpha[first:steps].view(-1, states), weights[first:].view(-1, states)
    transition = matmul(before.t(), after) * chain.transition
    counts = Counts(_start_counts(chain, posterior), transition, _emission_counts(chain, posterior, shape),
                    result.log_likelihood.sum())  # fmt: skip
    return counts, weights[0].float()


def _start_counts(chain: Chain, posterior: Tensor) -> Tensor:
    """[Z] the posterior wherever the chain begins."""
    if chain.restart is None:
        return posterior[0].sum(0)
    begins = chain.restart.to(posterior.dtype)
    if chain.initial is None:
        begins[0] = 1.0
    with torch.autocast(posterior.device.type, enabled=False):
        return posterior.flatten(0, 1).t() @ begins.flatten()


def _emission_counts(chain: Chain, posterior: Tensor, shape: torch.Size) -> Tensor:
    (states, n_words), width = shape, _COUNT["BLOCK_V"]
    firsts = torch.arange(0, n_words + width, width, dtype=chain.words.dtype, device=chain.words.device)
    edges = torch.searchsorted(chain.words, firsts, out_int32=True)
    counts = posterior.new_empty(shape)
    emission_counts_kernel[(len(firsts) - 1, triton.cdiv(states, _COUNT["BLOCK_Z"]))](
        chain.words, chain.order, edges, posterior, counts, n_words, STATES=states, **_COUNT
    )
    return counts


def doubtful(parameters: Parameters, chain: Chain, result: scaled.Forward) -> Tensor:
    """[B] as `torch.doubtful`, whose recursions also do the second look."""
    suspect = scaled.faint(parameters, result)
    if not bool(suspect.any()):
        return suspect
    portable = scaled.prepare(parameters, chain.evidence, chain.start.dtype)
    return suspect & scaled.doubtful(parameters, portable, scaled.forward(portable, keep=False))
