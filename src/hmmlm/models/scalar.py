"""One logit per probability: the classic multinomial HMM, dense or with blocked emissions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry, Scan
from hmmlm.models.base import BlockedConfig, BlockedModel, Model, TableModel, enter, restart_lost, scan_factors
from hmmlm.ops.blocked_scan import Factors
from hmmlm.ops.blocked_scan import refusal as blocked_refusal
from hmmlm.scan.generic_scan import generic_scan
from hmmlm.section import ModelSize, Scale
from hmmlm.structure.blocks import Blocks
from hmmlm.structure.dropout import global_states, sample_states
from hmmlm.transitions import Dense


class ScalarConfig(BlockedConfig):
    """One logit per probability."""

    kind: Literal["scalar"] = "scalar"
    scale: Scale = 1.0
    """Standard deviation of the initial logits."""

    # A high rate with a high eps: where gradients are smaller than eps, AdamW is gradient descent with momentum. With
    # eps 1e-8 it moves the logit of a word that a state never meets as fast as any other, and overfits.
    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 1.0, "eps": 3e-5, "weight_decay": 0.0}

    @property
    def assignable(self) -> bool:
        return not self.blocks

    @property
    def counts_suffice(self) -> bool:
        return not self.blocks

    def size(self, words: int) -> ModelSize:
        words_of_state = words // max(1, self.blocks)
        return ModelSize(self.num_states * (self.num_states + words_of_state), super().size(words).probabilities)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        generator, words = torch.Generator().manual_seed(seed), vocabulary.vocab_size
        if block_of_word is None:
            return Scalar(self.num_states, words, self.scale, generator)
        blocks = Blocks.from_clusters(block_of_word, self.num_states, vocab_size=words)
        return BlockedScalar(blocks, self.dropout, self.scale, generator)


class Scalar(TableModel):
    """Logits start [Z], transition [Z, Z] and emission [Z, V]."""

    start: nn.Parameter
    transition: nn.Parameter
    emission: nn.Parameter

    def __init__(
        self, states: int, vocab_size: int, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        shapes = {"start": (states,), "transition": (states, states), "emission": (states, vocab_size)}
        super().__init__(vocab_size, shapes, scale, generator)

    def make_hmm(self, log_probs: Mapping[str, Tensor]) -> HMM:
        return HMM(log_probs["start"], log_probs["transition"], log_probs["emission"])

    @torch.no_grad()
    def assign(self, hmm: HMM) -> None:
        """Copy log-probabilities: they are logits whose log-sum-exp is zero; zero probabilities become −inf."""
        if (hmm.num_states, hmm.vocab_size) != (self.num_states, self.vocab_size):
            raise InputError(
                f"an HMM of {hmm.num_states} states and {hmm.vocab_size} words cannot be assigned to a model of "
                f"{self.num_states} states and {self.vocab_size} words"
            )
        for logits, log_probs in zip(self.logits.values(), hmm.tensors().values(), strict=True):
            logits.copy_(log_probs)


class BlockedScalar(BlockedModel):
    """Logits start [Z], transition [Z, Z] and emission [V, k] (a word's row is over the states of its block).

    The scalar ablation of Chiu & Rush 2020, with blocked emissions and state dropout.
    """

    def __init__(
        self, blocks: Blocks, dropout: float = 0.5, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(blocks, dropout)

        def logits(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        self.start = logits(blocks.num_states)
        self.transition = logits(blocks.num_states, blocks.num_states)
        self.emission = logits(blocks.vocab_size, blocks.states_per_block)

    def log_emission(self) -> Tensor:
        """Return log p(word | state i of its block) [V, k]; dropout does not change emissions."""
        return log_softmax_in_blocks(self.emission, self.blocks)

    def forward(self) -> HMM:
        """Return the HMM over all states."""
        transition = Dense(self.transition.log_softmax(1))
        return HMM(self.start.log_softmax(0), transition, self.blocked(self.log_emission()))

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, carry: Carry | None = None, restart: Tensor | None = None
    ) -> Scan:
        """Compute the likelihood of a batch under a fresh sample of states."""
        sample, block_of_word = sample_states(self.blocks, self.dropout), self.blocks.block_of_word
        kept, size, batch = global_states(self.blocks, sample), sample.shape[1], len(tokens)
        columns = self.transition.index_select(1, kept)  # [Z, M·kept]
        log_transition = columns.index_select(0, kept).log_softmax(1)
        log_start = self.start.index_select(0, kept).log_softmax(0)
        entry = None
        if carry is not None:
            assert carry.states is not None  # of this family's own scan
            rows = columns.index_select(0, carry.states.flatten()).log_softmax(1).view(batch, -1, len(sample), size)
            first = block_of_word.index_select(0, tokens[:, 0].clamp(min=0))
            entry = enter(carry, rows[torch.arange(batch, device=tokens.device), :, first])[:, None]
        restart = restart_lost(restart, carry, tokens)
        if blocked_refusal(tokens.device, log_start.dtype):
            log_emission = self.log_emission().gather(1, sample.index_select(0, block_of_word))
            hmm = HMM(log_start, Dense(log_transition), self.blocked(log_emission))
            result = generic_scan(hmm, tokens, lengths, None, restart, entry=entry)
        else:
            factors = self._factors(tokens, sample, log_start, log_transition)
            positions, dtype = factors.block_of_word.view_as(tokens), self.start.dtype
            result = scan_factors(factors, positions, lengths, entry, restart, product_dtype=dtype)
        return self.finish(result, tokens, lengths, kept.view(sample.shape), block_of_word)

    def _factors(self, tokens: Tensor, sample: Tensor, log_start: Tensor, log_transition: Tensor) -> Factors:
        """Return factors of the kept states where every position is a word in a block of its own.

        Its u is the tile that leads to the next position, and its w the identity: so the blocked scan serves for a
        transition without factors.
        """
        size, words = sample.shape[1], tokens.clamp(min=0).flatten()
        block = self.blocks.block_of_word.index_select(0, words)
        following = block.view_as(tokens).roll(-1, 1).flatten()  # the last position leads nowhere: any tile does
        tiles = log_transition.view(-1, size, len(sample), size).transpose(1, 2)
        starts = log_start.view(-1, size).index_select(0, block).flatten()
        return Factors(
            block_of_word=torch.arange(len(words), device=tokens.device),
            u=tiles[block, following].reshape(-1, size),
            w=torch.eye(size, device=tokens.device).repeat(len(words), 1),
            log_normalizer=torch.zeros_like(starts),
            log_start=starts,
            log_emission=self.log_emission().index_select(0, words).gather(1, sample.index_select(0, block)),
        )


def log_softmax_in_blocks(logits: Tensor, blocks: Blocks) -> Tensor:
    """Return log p(word | state i of its block) [V, k] from logits [V, k]: over the words of each block."""
    rows = blocks.block_of_word[:, None].expand_as(logits)
    peak = logits.new_full((blocks.num_blocks, blocks.states_per_block), float("-inf"))
    peak = peak.scatter_reduce(0, rows, logits.detach(), "amax")
    shifted = logits - peak.index_select(0, blocks.block_of_word)
    total = torch.zeros_like(peak).index_add(0, blocks.block_of_word, shifted.exp())
    return shifted - total.log().index_select(0, blocks.block_of_word)
