"""One logit a probability, with blocked emissions and state dropout: the scalar ablation of Chiu & Rush 2020."""

import torch
from torch import Tensor, nn

from hmmlm.hmm import BlockedHMM, Carry
from hmmlm.hmm.blocked import BlockedScan, restart_lost
from hmmlm.ops.blocked_scan import Initial, blocked_scan
from hmmlm.parameterization.blocked_base import Blocked
from hmmlm.structure.blocks import Blocks
from hmmlm.structure.dropout import global_states, sample_states


class BlockedScalar(Blocked):
    """Logits start [Z], transition [Z, Z] and emission [V, k] (a word's row is over the states of its block)."""

    def __init__(
        self, blocks: Blocks, dropout: float = 0.5, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(blocks, dropout)

        def logits(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        self.start = logits(blocks.states)
        self.transition = logits(blocks.states, blocks.states)
        self.emission = logits(blocks.vocab_size, blocks.states_per_block)

    def log_emission(self) -> Tensor:
        """log p(word | state i of its block) [V, k]; dropout leaves emissions as they are."""
        blocks = self.blocks
        rows = blocks.block_of_word[:, None].expand_as(self.emission)
        peak = self.emission.new_full((blocks.num_blocks, blocks.states_per_block), float("-inf"))
        peak = peak.scatter_reduce(0, rows, self.emission.detach(), "amax")
        shifted = self.emission - peak.index_select(0, blocks.block_of_word)
        total = torch.zeros_like(peak).index_add(0, blocks.block_of_word, shifted.exp())
        return shifted - total.log().index_select(0, blocks.block_of_word)

    def forward(self) -> BlockedHMM:
        """All states. The transition is not factored: as u it is Z × Z, and w the identity."""
        one = torch.eye(self.states, device=self.start.device)
        zero = torch.zeros_like(self.start)
        return BlockedHMM(
            self.blocks.block_of_word, self.transition.log_softmax(1), one, zero, self.start.log_softmax(0),
            self.log_emission(),
        )

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, initial: Carry | None = None,
        restart: Tensor | None = None,
    ) -> BlockedScan:
        """The likelihood of a batch under a fresh sample of states.

        Every position is made a block of its own, whose factor u is the tile that leads on to the next position and
        whose w is the identity: so the blocked scan serves for a transition without factors.
        """
        batch, steps = tokens.shape
        sample = sample_states(self.blocks, self.dropout)
        kept = global_states(self.blocks, sample)
        size = sample.shape[1]
        words = tokens.clamp(min=0)
        block = self.blocks.block_of_word.index_select(0, words.flatten()).view(batch, steps)
        columns = self.transition.index_select(1, kept)  # [Z, M·kept]
        tiles = columns.index_select(0, kept).log_softmax(1).view(-1, size, len(sample), size)
        tiles = tiles.transpose(1, 2)  # [from block, to block, from state, to state]
        following = block.roll(-1, 1)  # the last position leads nowhere: any tile does
        leading = tiles[block.flatten(), following.flatten()]
        before = None
        if initial is not None:
            carried = columns.index_select(0, initial.states.flatten()).log_softmax(1)
            carried = carried.view(batch, -1, len(sample), size)
            entering = carried[torch.arange(batch, device=tokens.device), :, block[:, 0]]
            before = Initial(initial.probs, entering, torch.zeros_like(initial.probs))
        positions = torch.arange(batch * steps, device=tokens.device).view(batch, steps)
        picked = sample.index_select(0, block.flatten())
        log_emission = self.log_emission().index_select(0, words.flatten()).gather(1, picked)
        log_start = self.start.index_select(0, kept).log_softmax(0).view(-1, size).index_select(0, block.flatten())
        identity = torch.eye(size, device=tokens.device).repeat(batch * steps, 1)
        result = blocked_scan(
            positions, positions.flatten(), leading.reshape(-1, size), identity,
            torch.zeros_like(log_start).flatten(), log_start.flatten(), log_emission, initial=before, lengths=lengths,
            restart=restart_lost(restart, initial, tokens), product_dtype=self.start.dtype,
        )
        return self.finished(result.final, self.trusted(result), tokens, lengths, kept.view(sample.shape))
