"""The very large HMM of Chiu & Rush 2020: a network from state embeddings to a blocked HMM, with state dropout."""

from typing import Literal

import torch
from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.hmm import BlockedHMM, Carry
from hmmlm.hmm.blocked import BlockedScan, last_states, restart_lost
from hmmlm.ops.blocked_emission import blocked_emission, make_tiles
from hmmlm.ops.blocked_scan import Initial, blocked_scan
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.linear_logsumexp.precision import resolve
from hmmlm.parameterization.base import Parameterization
from hmmlm.parameterization.networks import Residual, initialise_linears_
from hmmlm.structure.blocks import Blocks
from hmmlm.structure.dropout import global_states, sample_states, states_kept

Form = Literal["code", "paper"]


class BlockedNeural(Parameterization):
    """A ∝ exp(H_out H_inᵀ), O ∝ exp(H_emit E_xᵀ) within blocks, all H from one table of state embeddings.

    form "code", as released: networks for start, out and emit, the incoming side is the bare embedding, embeddings
    from N(0, 1), a bias a word. form "paper", as printed: a network on the incoming side too, start scores from the
    incoming side, Kaiming-uniform weights, no word bias. `factored`: half of each embedding is shared by its block,
    and a further network for each role composes the two halves.
    """

    def __init__(
        self, blocks: Blocks, *, hidden: int = 256, form: Form = "code", dropout: float = 0.5, factored: bool = False,
        network_dropout: float = 0.0, generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(blocks.states, blocks.vocab_size)
        if factored and hidden % 2:
            raise InputError(f"factored state embeddings need an even hidden size, not {hidden}")
        states_kept(blocks.states_per_block, dropout)  # says what is wrong before any work
        self.blocks, self.form, self.dropout, self.factored = blocks, form, dropout, factored

        def network() -> nn.Module:
            inner = Residual(hidden, network_dropout)
            return nn.Sequential(Residual(hidden, network_dropout), inner) if factored else inner

        roles = ("start", "out", "emit") if form == "code" else ("out", "in", "emit")
        self.networks = nn.ModuleDict({role: network() for role in roles})
        self.start = nn.Linear(hidden, 1)
        self.words = nn.Linear(hidden, blocks.vocab_size, bias=form == "code")
        width = hidden // 2 if factored else hidden
        self.embedding = nn.Parameter(torch.empty(blocks.states, width))
        self.block_embedding = nn.Parameter(torch.empty(blocks.num_blocks, width)) if factored else None
        tables = [self.embedding] if self.block_embedding is None else [self.embedding, self.block_embedding]
        initialise_linears_(self, form == "paper", generator)
        for table in tables:
            if form == "code":
                nn.init.normal_(table, generator=generator)
            else:
                nn.init.kaiming_uniform_(table, generator=generator)
        self.tiles = make_tiles(blocks.block_of_word, blocks.num_blocks)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move the structure along with the parameters."""
        result = super()._apply(fn, recurse)
        device = self.embedding.device
        self.blocks, self.tiles = self.blocks.to(device), self.tiles.to(device)
        return result

    def embed(self, states: Tensor | None) -> Tensor:
        """Embeddings [n, h] of the given states, or of all."""
        own = self.embedding if states is None else self.embedding.index_select(0, states)
        if self.block_embedding is None:
            return own
        if states is None:
            states = torch.arange(self.states, device=own.device)
        shared = self.block_embedding.index_select(0, states // self.blocks.states_per_block)
        return torch.cat([shared, own], 1)

    def parts(self, states: Tensor | None, carried: Tensor | None = None) -> tuple[Tensor, ...]:
        """u, w, log_normalizer, log_start [M·kept, …] and log_emission [V, kept] over `states` [M·kept] (or all).

        With `carried` [n], states that are left but not entered, u and log_normalizer of those follow.
        """
        embedding = self.embed(states)
        kept = embedding.shape[0] // self.blocks.num_blocks
        leaving, sizes = embedding, [len(embedding)]
        if carried is not None:
            leaving, sizes = torch.cat([embedding, self.embed(carried)]), [*sizes, len(carried)]
        u, *u_carried = self.networks["out"](leaving).split(sizes)
        w = self.networks["in"](embedding) if self.form == "paper" else embedding
        beginning = w if self.form == "paper" else self.networks["start"](embedding)
        log_start = self.start(beginning).squeeze(1).float().log_softmax(0)
        emitting = self.networks["emit"](embedding).view(self.blocks.num_blocks, kept, -1)
        log_emission = blocked_emission(emitting, self.words.weight, self.words.bias, self.tiles)
        before = [part for rows in u_carried for part in (rows, linear_logsumexp(rows, w))]
        return u, w, linear_logsumexp(u, w), log_start, log_emission, *before

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
        carried = None if initial is None else initial.states.flatten()
        u, w, log_normalizer, log_start, log_emission, *left = self.parts(kept, carried)
        before = None
        if initial is not None:
            size = initial.states.shape
            before = Initial(initial.probs, left[0].view(*size, -1), left[1].view(size))
        result = blocked_scan(
            tokens, self.blocks.block_of_word, u, w, log_normalizer, log_start, log_emission,
            initial=before, lengths=lengths, restart=restart_lost(restart, initial, tokens),
        )
        states = last_states(tokens, lengths, self.blocks.block_of_word, kept.view(sample.shape))
        return BlockedScan(self.trusted(result), Carry(result.final, states))
