"""What the blocked scan takes and returns, and the same laid out for the kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.linear_logsumexp.precision import wide

NOTHING, START = -2, -1  # sources of a position that is not a step from another: beyond the length, a start


class Initial(NamedTuple):
    """Where each sequence stood before the window, on the states kept then, which need not be those kept now.

    Where all stood on the same states, as where there is one block, one row of `u` and `log_normalizer` does for all.
    """

    filtered: Tensor  # [B, kept_then] p(z | all words before), zero in sum only if that was impossible
    u: Tensor  # [B or 1, kept_then, h] the rows of U of those states
    log_normalizer: Tensor  # [B or 1, kept_then] logsumexp of those rows against the W of now

    def of(self, sequences: Tensor, dtype: torch.dtype) -> "Initial":
        """The same of some sequences, in a dtype."""
        one = self.u.shape[0] == 1
        return Initial(*((x if one and i else x[sequences]).to(dtype) for i, x in enumerate(self)))


class BlockedScan(NamedTuple):
    """The forward recursion: how likely each sequence is and where it left the chain."""

    log_likelihood: Tensor  # [B] natural log; differentiable in the parameters and in `initial`
    final: Tensor  # [B, kept] p(z at the last word | all words), over the states of its block; detached
    suspect: Tensor  # [B] bool: mass vanished in scaled arithmetic, so −inf may be wrong; see `blocked_scan`


class Problem(NamedTuple):
    """A blocked scan in one shape for all its steps.

    Rows that a step comes from are in G groups of R = max(kept, kept_then): the M blocks, then `initial` as one group
    a sequence, or one for all. So the first step of a window is like every other.
    """

    word: Tensor  # [B, T] −1 beyond the length
    block: Tensor  # [B, T] of the word, likewise
    source: Tensor  # [B, T] the group the step comes from, or START, or NOTHING
    lengths: Tensor  # [B]
    u: Tensor  # [G, R, h] in the dtype of products; zero where a group has fewer rows
    w: Tensor  # [M, kept, h] likewise
    log_normalizer: Tensor  # [G, R] in the wide dtype, as everything below
    log_start: Tensor  # [M, kept]
    log_emission: Tensor  # [V, kept]
    initial: Tensor  # [B, R] zero without one

    def spans(self, budget: int) -> list[tuple[int, int]]:
        """Ranges of time [first, end) whose transition tiles are `budget` numbers at most together."""
        batch, time = self.word.shape
        span = max(1, budget // max(1, batch * self.u.shape[1] * self.w.shape[1]))
        return [(first, min(first + span, time)) for first in range(0, time, span)]


class State(NamedTuple):
    """What the backward pass needs of the forward pass."""

    log_likelihood: Tensor  # [B]
    filtered: Tensor  # [B, T + 1, R] entry t + 1 is p(z_t | x_0..t); entry 0 is `initial`
    predicted: Tensor  # [B, T, kept] p(z_t | x_0..t−1) for steps; unspecified elsewhere
    suspect: Tensor  # [B] bool


class Gradients(NamedTuple):
    """In the layout of `Problem`, in the wide dtype."""

    u: Tensor  # [G, R, h]
    w: Tensor  # [M, kept, h]
    log_normalizer: Tensor  # [G, R]
    log_start: Tensor  # [M, kept]
    log_emission: Tensor  # [V, kept]
    initial: Tensor  # [B, R]


def floors(dtype: torch.dtype) -> tuple[float, float]:
    """Below these a predicted probability is taken for zero, and the mass of a whole step for suspect.

    Together they bound the mass a step loses by kept · 1e-7 of what it keeps, and the ratios of the backward pass by
    the reciprocal of the first.
    """
    return (1e-34, 1e-27) if dtype == torch.float32 else (1e-290, 1e-270)


def lay_out(
    tokens: Tensor, block_of_word: Tensor, u: Tensor, w: Tensor, log_normalizer: Tensor, log_start: Tensor,
    log_emission: Tensor, initial: Initial | None, lengths: Tensor | None, restart: Tensor | None, dtype: torch.dtype,
) -> Problem:  # fmt: skip
    """Everything in shape, by operations that never wait for the device."""
    batch, time = tokens.shape
    kept, h = log_emission.shape[1], u.shape[1]
    blocks, exact = u.shape[0] // kept, wide(dtype)
    then = 0 if initial is None else initial.filtered.shape[1]
    rows = max(kept, then)

    if initial is None:
        first = torch.full((batch, 1), START, device=tokens.device)
    else:
        groups = torch.arange(blocks, blocks + initial.u.shape[0], device=tokens.device)
        first = groups.expand(batch)[:, None]
    if lengths is None:
        lengths = torch.full((batch,), time, device=tokens.device)
        word, block = tokens, block_of_word[tokens]
        source = torch.cat([first, block[:, :-1]], 1)
    else:
        outside = torch.arange(time, device=tokens.device) >= lengths[:, None]
        word = tokens.masked_fill(outside, -1)
        block = block_of_word[word.clamp_min(0)].masked_fill_(outside, -1)
        source = torch.cat([first, block[:, :-1]], 1).masked_fill_(outside, NOTHING)
    if restart is not None:
        source = source.masked_fill_(restart & (source != NOTHING), START)

    own_u, own_normalizer = u.detach().to(dtype).view(blocks, kept, h), log_normalizer.detach().to(exact).view(-1, kept)
    filtered = torch.zeros(batch, rows, dtype=exact, device=u.device)
    if initial is not None:
        pad_own, pad_then = rows - kept, rows - then
        own_u, own_normalizer = _pad(own_u, pad_own, 1), _pad(own_normalizer, pad_own, 1)
        own_u = torch.cat([own_u, _pad(initial.u.detach().to(dtype), pad_then, 1)])
        own_normalizer = torch.cat([own_normalizer, _pad(initial.log_normalizer.detach().to(exact), pad_then, 1)])
        filtered[:, :then] = initial.filtered.detach()
    return Problem(
        word=word.contiguous(), block=block.contiguous(), source=source.contiguous(), lengths=lengths,
        u=own_u.contiguous(), w=w.detach().to(dtype).contiguous().view(blocks, kept, h),
        log_normalizer=own_normalizer.contiguous(),
        log_start=log_start.detach().to(exact).contiguous().view(blocks, kept),
        log_emission=log_emission.detach().to(exact).contiguous(), initial=filtered,
    )  # fmt: skip


def _pad(x: Tensor, more: int, dim: int) -> Tensor:
    if not more:
        return x
    shape = list(x.shape)
    shape[dim] = more
    return torch.cat([x, x.new_zeros(shape)], dim)
