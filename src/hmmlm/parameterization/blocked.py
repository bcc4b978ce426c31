"""The very large HMM of Chiu & Rush 2020: a network from state embeddings to a blocked HMM, with state dropout."""

from typing import Literal

import torch
from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.ops.blocked_emission import blocked_emission
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.parameterization.blocked_base import FromFactors
from hmmlm.parameterization.networks import Residual, initialise_linears_
from hmmlm.structure.blocks import Blocks

Form = Literal["code", "paper"]


class BlockedNeural(FromFactors):
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
        super().__init__(blocks, dropout)
        if factored and hidden % 2:
            raise InputError(f"factored state embeddings need an even hidden size, not {hidden}")
        self.form, self.factored = form, factored

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
