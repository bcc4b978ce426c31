"""The very large HMM of Chiu & Rush 2020: networks from state embeddings to a blocked HMM, with state dropout."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.models.base import BlockCount, BlockedConfig, FactoredBlockedModel, Features, Model, ModelConfig, one_block
from hmmlm.models.networks import Residual, distinct_rows, initialize_linears_
from hmmlm.ops.blocked_emission import blocked_emission
from hmmlm.ops.graph import side_by_side
from hmmlm.section import Fraction, ModelSize, States, Width
from hmmlm.structure.blocks import Blocks

Form = Literal["released", "printed", "preprint"]


class NetworkConfig(ModelConfig):
    """Networks on state embeddings (Chiu & Rush 2020)."""

    num_states: States = 2048
    """Number of hidden states."""
    hidden: Width = 256
    """Size of embeddings and networks."""
    form: Form = "printed"
    """printed: the networks of the paper; released: those of its code, with bare embeddings on the incoming side;
    preprint: as printed, and the network of emissions reads an embedding of the state's block too."""
    network_dropout: Fraction = 0.0
    """Dropout inside the networks."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 0.003, "weight_decay": 0.1}

    def network_size(self, words: int) -> int:
        """Return a lower bound of the number of parameters."""
        return (self.num_states // 2 + words + 6 * self.hidden) * self.hidden


class NeuralConfig(NetworkConfig, BlockedConfig):
    """Networks on state embeddings (Chiu & Rush 2020), for thousands of states."""

    kind: Literal["neural"] = "neural"
    blocks: BlockCount = 64
    """Brown clusters of words, each with states / blocks states; fewer, if the text has fewer than two words for each.
    0: every state may emit every word."""
    block_embeddings: bool = False
    """Half of each state embedding is shared by its block."""

    @property
    def predicts_next_words(self) -> bool:
        return True

    def _dense_dropout(self) -> float:
        return 0.0  # a single block has state dropout too

    def size(self, words: int) -> ModelSize:
        # Without blocks, the transitions are computed in tiles all the same.
        cells = super().size(words).probabilities if self.blocks else self.num_states * words
        return ModelSize(self.network_size(words), cells)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        return Neural(
            one_block(vocabulary.vocab_size, self.num_states, block_of_word),
            hidden=self.hidden,
            form=self.form,
            dropout=self.dropout,
            block_embeddings=self.block_embeddings,
            network_dropout=self.network_dropout,
            generator=torch.Generator().manual_seed(seed),
        )


class Neural(FactoredBlockedModel):
    """A ∝ exp(H_out H_inᵀ), O ∝ exp(H_emit E_xᵀ) within blocks, all H from one table of state embeddings.

    form "released": networks for start, out and emit; the incoming side is the bare embedding; embeddings from N(0, 1);
    a bias per word. form "printed": a network on the incoming side too, start scores from the incoming side,
    Kaiming-uniform weights, no word bias. form "preprint": as printed, but the network of emissions reads embeddings of
    block and state side by side. `block_embeddings`, for which it is as printed: half of each embedding is shared by
    its block, and a further network for each role composes the two halves.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        hidden: int = 256,
        form: Form = "released",
        dropout: float = 0.5,
        block_embeddings: bool = False,
        network_dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(blocks, dropout)
        if block_embeddings and hidden % 2:
            raise InputError(f"block embeddings need an even hidden size, not {hidden}")
        self.form, self.halves = form, block_embeddings
        self.draws_for_rows = network_dropout > 0  # of the states that sequences carry

        def network() -> nn.Module:
            inner = Residual(hidden, network_dropout)
            return nn.Sequential(Residual(hidden, network_dropout), inner) if block_embeddings else inner

        roles = ("start", "out", "emit") if form == "released" else ("out", "in", "emit")
        self.networks = nn.ModuleDict({role: network() for role in roles})
        beside = form == "preprint" and not block_embeddings
        if beside:
            self.networks["emit"] = Residual(hidden, network_dropout, inputs=2)
        self.start = nn.Linear(hidden, 1)
        self.words = nn.Linear(hidden, blocks.vocab_size, bias=form == "released")
        width = hidden // 2 if block_embeddings else hidden
        self.embedding = nn.Parameter(torch.empty(blocks.num_states, width))
        shape = (blocks.num_blocks, width)
        self.block_embedding = nn.Parameter(torch.empty(shape)) if block_embeddings or beside else None
        tables = [self.embedding] if self.block_embedding is None else [self.embedding, self.block_embedding]
        initialize_linears_(self, form != "released", generator)
        for table in tables:
            if form == "released":
                nn.init.normal_(table, generator=generator)
            else:
                nn.init.kaiming_uniform_(table, generator=generator)

    def embed(self, states: Tensor | None) -> Tensor:
        """Return the embeddings [n, h] of the given states, which are all different, or of all states."""
        return self._join(self.embedding if states is None else distinct_rows(self.embedding, states), states)

    def _join(self, own: Tensor, states: Tensor | None) -> Tensor:
        """Return the embeddings [n, h] of states from their own parts."""
        if self.block_embedding is None or not self.halves:
            return own
        if states is None:
            states = torch.arange(self.num_states, device=own.device)
        of_block = self.block_embedding.index_select(0, states // self.blocks.states_per_block)
        return torch.cat([of_block, own], 1)

    def leaving(self, embedding: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute u [n, h] of states with the given embeddings [n, h], and that of the `carried` states, if any."""
        if carried is None:
            return self.networks["out"](embedding), None
        again = self._join(self.embedding.index_select(0, carried), carried)  # sequences may carry the same states
        every = torch.cat([embedding, again])
        u, u_carried = self.networks["out"](every).split([len(embedding), len(carried)])
        return u, u_carried

    def entering(self, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Compute w [n, h] and log_start [n] of states with the given embeddings [n, h]."""
        w = embedding if self.form == "released" else self.networks["in"](embedding)
        starting = self.networks["start"](embedding) if self.form == "released" else w
        return w, self.start(starting).squeeze(1).to(self.embedding.dtype).log_softmax(0)

    def emission_features(self, embedding: Tensor) -> Tensor:
        """Compute H_emit [n, h] of states with the given embeddings [n, h], as many of each block, in order."""
        if self.block_embedding is not None and not self.halves:
            of_block = self.block_embedding.repeat_interleave(len(embedding) // self.blocks.num_blocks, 0)
            embedding = torch.cat([of_block, embedding], 1)
        features: Tensor = self.networks["emit"](embedding)
        return features

    def emitting(self, embedding: Tensor) -> Tensor:
        """Compute log p(word | state i of its block) [V, kept] of states with the given embeddings [n, h]."""
        features = self.emission_features(embedding).unflatten(0, (self.blocks.num_blocks, -1))
        return blocked_emission(features, self.words.weight, self.words.bias, self.tiles)

    def features_of(self, states: Tensor | None, carried: Tensor | None = None) -> tuple[Features, Tensor | None]:
        embedding = self.embed(states)
        (u, u_carried), (w, log_start), log_emission = side_by_side(
            embedding.device,
            lambda: self.leaving(embedding, carried),
            lambda: self.entering(embedding),
            lambda: self.emitting(embedding),
            shared=embedding,
        )
        return Features(self.blocks.block_of_word, u, w, log_start, log_emission), u_carried
