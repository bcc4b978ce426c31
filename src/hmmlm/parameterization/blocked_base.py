"""What the blocked parameterizations share: blocks of words, state dropout, and a scan over the states kept."""

from abc import abstractmethod

from torch import Tensor

from hmmlm.hmm import BlockedHMM, Carry
from hmmlm.hmm.blocked import BlockedScan, last_states, restart_lost
from hmmlm.ops.blocked_emission import make_tiles
from hmmlm.ops.blocked_scan import Initial, blocked_scan
from hmmlm.ops.linear_logsumexp.precision import resolve
from hmmlm.parameterization.base import Parameterization
from hmmlm.structure.blocks import Blocks
from hmmlm.structure.dropout import global_states, sample_states, states_kept


class Blocked(Parameterization):
    """States in blocks that emit the words of one cluster each."""

    def __init__(self, blocks: Blocks, dropout: float) -> None:
        super().__init__(blocks.states, blocks.vocab_size)
        states_kept(blocks.states_per_block, dropout)  # says what is wrong before any work
        self.blocks, self.dropout = blocks, dropout
        self.tiles = make_tiles(blocks.block_of_word, blocks.num_blocks)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move the structure along with the parameters."""
        result = super()._apply(fn, recurse)
        self.blocks, self.tiles = self.blocks.to(self.skipped.device), self.tiles.to(self.skipped.device)
        return result

    def finished(
        self, final: Tensor, log_likelihood: Tensor, tokens: Tensor, lengths: Tensor | None, states: Tensor
    ) -> BlockedScan:
        """The result of a scan over `states` [M, kept], which are what the filtered distributions `final` are over."""
        ended = last_states(tokens, lengths, self.blocks.block_of_word, states)
        return BlockedScan(log_likelihood, Carry(final, ended))


class FromFactors(Blocked):
    """Those whose transition is softmax(U Wᵀ): `parts` makes the factors of any sample of states."""

    @abstractmethod
    def parts(self, states: Tensor | None, carried: Tensor | None = None) -> tuple[Tensor, ...]:
        """u, w, log_normalizer, log_start [M·kept, …] and log_emission [V, kept] over `states` [M·kept] (or all).

        With `carried` [n], states that are left but not entered, u and log_normalizer of those follow.
        """

    def forward(self) -> BlockedHMM:
        """All states, no dropout: what is evaluated, saved and queried.

        Under autocast the factors are those that the products see, rounded: in whatever precision they are multiplied
        later, they fit the normaliser.
        """
        u, w, log_normalizer, log_start, log_emission = self.parts(None)
        seen = resolve(u, None)
        u, w = u.to(seen).to(log_start.dtype), w.to(seen).to(log_start.dtype)
        return BlockedHMM(self.blocks.block_of_word, u, w, log_normalizer, log_start, log_emission)

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, initial: Carry | None = None,
        restart: Tensor | None = None,
    ) -> BlockedScan:
        """The likelihood of a batch under a fresh sample of states: those not kept cost nothing.

        Carried mass sits on the previous batch's sample; transitions out of it are normalised over the current one.
        """
        sample = sample_states(self.blocks, self.dropout)
        kept = global_states(self.blocks, sample)
        carried = None if initial is None else initial.distinct_states(self.blocks.num_blocks).flatten()
        u, w, log_normalizer, log_start, log_emission, *left = self.parts(kept, carried)
        before = None
        if initial is not None:
            before = Initial(initial.probs, *(x.unflatten(0, (-1, initial.states.shape[1])) for x in left))
        result = blocked_scan(
            tokens, self.blocks.block_of_word, u, w, log_normalizer, log_start, log_emission,
            initial=before, lengths=lengths, restart=restart_lost(restart, initial, tokens),
        )
        return self.finished(result.final, self.trusted(result), tokens, lengths, kept.view(sample.shape))
