"""An emission for very many states: each emits the words of one block."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hmmlm.arguments import check_type, describe
from hmmlm.emissions.base import Emission
from hmmlm.emissions.columns import log_group_sums
from hmmlm.errors import InputError
from hmmlm.numerics.distributions import check_totals
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.numerics.support import BlockSupport, Support
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.ops.pieces import at_once
from hmmlm.ops.underflow import exp, least_sum


class Blocked(Emission):
    """log_probs [V, k] has a row for each word, over the k states of its block, and block_of_word [V] names the block.

    There are M blocks; state m·k + i is state i of block m. The probabilities of a state sum to one over the words of
    its block.

    Args:
        num_blocks: M; None: one more than the largest block of a word.
    """

    kind = "blocked"
    TENSORS: ClassVar[dict[str, str]] = {"log_probs": "words, states per block", "block_of_word": "words"}
    INDICES: ClassVar[tuple[str, ...]] = ("block_of_word",)

    def __init__(self, log_probs: Tensor, block_of_word: Tensor, num_blocks: int | None = None) -> None:
        self.log_probs, self.block_of_word = log_probs, block_of_word
        if not isinstance(block_of_word, Tensor) or block_of_word.dtype not in (torch.int32, torch.int64):
            raise InputError("emission.block_of_word must be an integer tensor: the block of each word")
        self._check()
        check_type("num_blocks", num_blocks, int | None)
        self.num_blocks = int(block_of_word.max()) + 1 if num_blocks is None else num_blocks
        if not 0 < self.num_blocks < 2**31:
            raise InputError(f"num_blocks must be at least 1 and below 2^31, not {describe(num_blocks)}")
        if bool((block_of_word < 0).any()) or bool((block_of_word >= self.num_blocks).any()):
            raise InputError(
                f"emission.block_of_word must be between 0 and {self.num_blocks - 1}, the number of blocks minus one"
            )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], states: int) -> Blocked:
        width = tensors["log_probs"].shape[1]
        if states % width:
            raise InputError(f"{states} states do not divide into blocks of {width}, the width of emission.log_probs")
        return cls(**tensors, num_blocks=states // width)

    def replace(self, tensors: Mapping[str, Tensor]) -> Blocked:
        return Blocked(**self.tensors() | dict(tensors), num_blocks=self.num_blocks)

    @property
    def width(self) -> int:
        """Number of states of a block."""
        return self.log_probs.shape[1]

    @property
    def num_parameters(self) -> int:
        return self.log_probs.numel() - self.num_states

    @property
    def num_states(self) -> int:
        return self.num_blocks * self.width

    @property
    def vocab_size(self) -> int:
        return self.log_probs.shape[0]

    def validate(self) -> None:
        log_probs = self.log_probs.detach()
        tolerance = 1e-4 if self.dtype == torch.float32 else 1e-6
        totals = log_probs.new_zeros(self.num_blocks, self.width)
        totals.index_add_(0, self.block_of_word, log_probs.clamp(min=-80).exp_())
        check_totals(totals.flatten(), tolerance, lambda state: f"{self._name('log_probs')} of state {state}")

    @cached_property
    def _by_state(self) -> LogMatrix:
        """log p(word | z) [k, V], relative to the largest of each word."""
        return LogMatrix(self.log_probs.t())

    @cached_property
    def words_of_block(self) -> Tensor:
        """The words of each block [M, W]; −1 beyond their number."""
        order, counts = self.block_of_word.argsort(stable=True), self.block_of_word.bincount(minlength=self.num_blocks)
        return pad_sequence(order.split(counts.tolist()), batch_first=True, padding_value=-1)

    def score(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        words = tokens.clamp(min=0)
        support, scores = BlockSupport(self.block_of_word[words], self.width), self.log_probs[words]
        if missing:
            explained = scores.new_zeros(()) if log_missing is None else log_missing
            every = support.spread(scores, self.num_states, NEG_INF)
            scores = torch.where((tokens < 0)[:, None], explained, every)
            support = BlockSupport(torch.where(tokens < 0, -1, support.blocks), self.width, wide=True)
        return support, scores

    def word_log_probs(self, log_states: Tensor, words: Tensor | None = None) -> Tensor:
        """See `Emission`; in products relative to the largest entries, recomputed in log space where they underflow."""
        chosen = slice(None) if words is None else words
        blocks, scores = self.block_of_word[chosen], self.log_probs[chosen]
        peak, scaled = self._by_state.peak[chosen], self._by_state.scaled.t()[chosen]
        least = least_sum(self.width, self.dtype)
        flat = log_states.reshape(-1, self.num_states)
        emitted = []
        for piece in flat.split(at_once(scores.numel())):
            top = piece.amax(1, keepdim=True).clamp_min(torch.finfo(self.dtype).min)
            weights = exp(piece - top).unflatten(1, (self.num_blocks, -1))
            relative = torch.einsum("bvk,vk->bv", weights[:, blocks], scaled)
            result = relative.log().add_(peak).add_(top)
            rows, columns = (relative < least).nonzero(as_tuple=True)
            exact = piece.unflatten(1, (self.num_blocks, -1))[rows, blocks[columns]] + scores[columns]
            result[rows, columns] = torch.logsumexp(exact, 1)
            emitted.append(result)
        return torch.cat(emitted).view(*log_states.shape[:-1], -1)

    def group_log_probs(self, group_of_word: Tensor, groups: int) -> Tensor:
        group = group_of_word * self.num_blocks + self.block_of_word
        return log_group_sums(self.log_probs, group, groups * self.num_blocks).view(groups, -1)

    def log_rows(self, states: Tensor) -> tuple[Tensor, Tensor]:
        words = self.words_of_block[states // self.width]
        log_probs = self.log_probs[words.clamp(min=0), (states % self.width)[:, None]]
        return words, log_probs.masked_fill(words < 0, NEG_INF)

    def log_entries(self, states: Tensor, words: Tensor) -> Tensor:
        values = self.log_probs.flatten().index_select(0, words * self.width + states % self.width)
        return values.masked_fill(states // self.width != self.block_of_word.index_select(0, words), NEG_INF)

    def dense(self) -> Tensor:
        words = torch.arange(self.vocab_size, device=self.device)
        states = self.block_of_word[:, None] * self.width + torch.arange(self.width, device=self.device)
        whole = torch.full((self.num_states, self.vocab_size), NEG_INF, dtype=self.dtype, device=self.device)
        return whole.index_put((states, words[:, None].expand_as(states)), self.log_probs)

    def gradient(self, tokens: Tensor, posterior: Tensor, support: Support) -> dict[str, Tensor]:
        if posterior.shape[1] == self.num_states:
            posterior = BlockSupport(self.block_of_word[tokens], self.width).restrict(posterior)
        return {"log_probs": torch.zeros_like(self.log_probs).index_add_(0, tokens, posterior)}

    def maximize(self, counts: dict[str, Tensor], pseudocount: float = 0.0) -> Blocked:
        given = counts["log_probs"]
        seen = given.new_zeros(self.num_blocks, self.width)
        seen.index_add_(0, self.block_of_word, given)
        given = given + torch.where(seen > 0, pseudocount, 0.0)[self.block_of_word]
        words = self.words_of_block  # by state and word of its block; places beyond their number have no count
        found, before = (
            values[words.clamp(min=0)].masked_fill((words < 0)[..., None], fill).transpose(1, 2).flatten(0, 1)
            for values, fill in ((given, 0.0), (self.log_probs, NEG_INF))
        )
        by_state = maximize_rows(found, before).unflatten(0, (self.num_blocks, -1)).transpose(1, 2)  # [M, W, k]
        inside = words >= 0
        return self.replace({"log_probs": torch.empty_like(given).index_copy(0, words[inside], by_state[inside])})
