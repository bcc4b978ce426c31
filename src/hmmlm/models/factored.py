"""The reparameterizations of Lee & Berg-Kirkpatrick 2025: linear, MLP and transformer; dense, or with Brown blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.models.base import BlockedConfig, FactoredBlockedModel, Features, Model, ModelConfig
from hmmlm.models.capacity import fit_width, transformer_layers
from hmmlm.models.networks import Mlp, MlpForm, Skip, Transformer, initialize_linears_
from hmmlm.ops.blocked_emission import blocked_emission
from hmmlm.ops.common import factor_logits
from hmmlm.section import Layers, ModelSize, Scale, Width
from hmmlm.structure.blocks import Blocks

FactorScale = Literal["unit", "normal"]
Network = Mlp | Transformer


class FactoredConfig(ModelConfig):
    """Low-rank factors of the logits, from tables of state embeddings or networks on them."""

    hidden: Width = 256
    """Size of embeddings and networks."""
    capacity: Annotated[int, Field(gt=0, le=10**12)] | None = None
    """Total number of parameters, approximately: sets `hidden`, and the depth of transformers."""
    split: bool = True
    """One table of state embeddings per role instead of one for all; with linear: ablation B instead of A."""
    factor_start: bool = True
    """Whether the start logits are factored; otherwise they are free parameters."""
    factor_transition: bool = True
    """Whether the transition logits are factored."""
    factor_emission: bool = True
    """Whether the emission logits are factored."""
    init: FactorScale = "unit"
    """unit: initial logits have variance 1; normal: tables from N(0, 1), as in the released code."""
    scale: Scale = 1.0
    """Standard deviation of the initial free logits."""

    @property
    def has_embeddings(self) -> bool:
        return not self.blocks_needed

    @model_validator(mode="after")
    def _capacity_sets_hidden(self) -> FactoredConfig:
        if self.capacity is not None and self.hidden != type(self).model_fields["hidden"].default:
            raise ValueError(f"hidden follows from capacity: leave out hidden = {self.hidden}, or capacity")
        return self

    @model_validator(mode="after")
    def _blocks_are_factored(self) -> FactoredConfig:
        if self.blocks_needed and not (self.factor_start and self.factor_transition and self.factor_emission):
            raise ValueError("a model with blocks is factored throughout: leave out factor_*, or set blocks to 0")
        return self

    def make_network(self, hidden: int) -> Callable[[], Mlp | Transformer] | None:
        """Return what creates a network of width `hidden`; None: no network between embeddings and factors."""
        return None

    @property
    def predicts_next_words(self) -> bool:
        return self.blocks_needed > 0

    @property
    def network_weights(self) -> int:
        """Weights of the smallest set of networks of width `hidden` that the family has."""
        return 0

    @property
    def one_network(self) -> bool:
        """Whether all roles share one network."""
        return False

    @property
    def width_step(self) -> int:
        """The width of the network is a multiple of this."""
        return 1

    def size(self, words: int) -> ModelSize:
        embeddings = (self.num_states + (words if self.factor_emission else 0)) * self.hidden
        parameters = self.capacity or embeddings + self.network_weights
        return ModelSize(parameters, super().size(words).probabilities)

    def make_dense(self, vocab_size: int, hidden: int, generator: torch.Generator | None) -> DenseFactored:
        """Create the dense model with embeddings of width `hidden`."""
        return DenseFactored(
            self.num_states,
            vocab_size,
            hidden,
            make_network=self.make_network(hidden),
            split=self.split,
            mono=self.one_network,
            start=self.factor_start,
            transition=self.factor_transition,
            emission=self.factor_emission,
            init=self.init,
            scale=self.scale,
            generator=generator,
        )

    def width(self, vocab_size: int) -> int:
        """Return `hidden`, or the width whose number of parameters is nearest to `capacity`."""
        if self.capacity is None:
            return self.hidden
        # Nothing is drawn or scaled, only counted.
        unscaled = self.model_copy(update={"init": "normal"})
        what = f"{self.num_states} states and {vocab_size:,} words"
        return fit_width(lambda w: unscaled.make_dense(vocab_size, w, None), self.capacity, self.width_step, what)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        words = vocabulary.vocab_size
        dense = self.make_dense(words, self.width(words), torch.Generator().manual_seed(seed))
        if block_of_word is None:
            return dense
        assert isinstance(self, BlockedConfig)
        return BlockedFactored(
            Blocks.from_clusters(block_of_word, self.num_states, vocab_size=words), dense, self.dropout
        )


class LinearConfig(FactoredConfig, BlockedConfig):
    """Low-rank factors from tables of embeddings."""

    kind: Literal["linear"] = "linear"

    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 0.03, "weight_decay": 0.1}


class MlpConfig(FactoredConfig, BlockedConfig):
    """Low-rank factors from MLPs on state embeddings."""

    kind: Literal["mlp"] = "mlp"
    mono: bool = False
    """One network for all roles instead of one for each."""
    layers: Layers = 2
    """Linear layers of each network."""
    skip: Skip = "activation"
    """Added to the output of layers after the first: nothing, the input of the ReLU, or that of the layer."""
    relu: bool = True
    """A ReLU after every linear layer."""
    norm: bool = True
    """A LayerNorm after every layer but the first, or after the only one."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 0.01, "weight_decay": 0.1}

    @model_validator(mode="after")
    def _form_is_consistent(self) -> MlpConfig:
        MlpForm(self.layers, self.skip, self.relu, self.norm)
        return self

    @property
    def one_network(self) -> bool:
        return self.mono

    @property
    def network_weights(self) -> int:
        return self.layers * self.hidden**2

    def make_network(self, hidden: int) -> Callable[[], Mlp]:
        return partial(Mlp, hidden, MlpForm(self.layers, self.skip, self.relu, self.norm))


class TransformerConfig(FactoredConfig):
    """Low-rank factors from transformers over the sequence of states."""

    kind: Literal["transformer"] = "transformer"
    mono: bool = False
    """One network for all roles instead of one for each."""
    layers: Layers | None = None
    """Blocks of each network; None: 2, and more for a `capacity` above 2^22."""
    heads: Annotated[int, Field(gt=0, le=1_024)] | None = None
    """Attention heads; None: heads of at least 64 dimensions."""

    # A third of the best rate of the studies at 2^22 parameters; networks of 15M parameters and more need less.
    optimizer_defaults: ClassVar[dict[str, Any]] = {"lr": 0.003, "weight_decay": 0.1}

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> TransformerConfig:
        if self.heads is not None and self.capacity is None and self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self

    @property
    def one_network(self) -> bool:
        return self.mono

    @property
    def width_step(self) -> int:
        return self.heads or 1

    @property
    def network_weights(self) -> int:
        return (self.layers or 2) * 12 * self.hidden**2

    def make_network(self, hidden: int) -> Callable[[], Transformer]:
        depth = self.layers or (2 if self.capacity is None else transformer_layers(self.capacity))
        return partial(Transformer, hidden, depth, self.heads)


class DenseFactored(Model):
    """Logits a = H_in H_outᵀ [Z, Z], b = H_emit Vᵀ [Z, W] and π = H_in s [Z]; a softmax over each row.

    Rows of a are the states that are left: H_in is their side, H_out that of the states entered.

    H comes from tables of state embeddings E [Z, h]: one table for all roles, or with `split` one per role.
    `make_network` creates the network between E and H: None for the linear forms (H = E: ablation A with one table,
    whose a is symmetric, ablation B with split ones); otherwise one network per role (ψ), or with `mono` one in all
    (ι). A single network on a single table gives every role the same H, so then each role has a linear head of its own.

    `start`, `transition`, `emission`: whether each is factored; the others are free logits from N(0, scale²), as in the
    scalar model.

    `init` sets the initial scale. "unit": logits of variance 1 whatever the form: V, s and H have entries of mean
    square h^-1/2. Without a network that is E from N(0, h^-1/2); networks without a norm are homogeneous in E (their
    biases are zero, their weights Kaiming-uniform), so E is scaled, and where a norm comes last, its gain is. (The
    diagonal of ablation A's a is then about √h: its states tend to stay.) "normal", as in the released code: all tables
    from N(0, 1), linear layers with PyTorch's initialization; logits then have a variance of about h.
    """

    def __init__(
        self,
        states: int,
        vocab_size: int,
        hidden: int,
        *,
        make_network: Callable[[], Network] | None = None,
        split: bool = True,
        mono: bool = False,
        start: bool = True,
        transition: bool = True,
        emission: bool = True,
        init: FactorScale = "unit",
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(states, vocab_size)
        if mono and make_network is None:
            raise InputError("mono needs a network, and the linear model has none: set mono to false")
        needed = {"in": start or transition, "out": transition, "emit": emission}
        self.roles = roles = tuple(role for role, wanted in needed.items() if wanted)
        self.is_factored = {"start": start, "transition": transition, "emission": emission}
        unit = hidden**-0.25

        def logits(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        def factor(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * (unit if init == "unit" else 1.0))

        # Each of these is the logits themselves, or what H is multiplied with.
        self.start = factor(hidden) if start else logits(states)
        self.transition = None if transition else logits(states, states)
        self.emission = factor(vocab_size, hidden) if emission else logits(states, vocab_size)
        self.embeddings = nn.ParameterList(
            nn.Parameter(torch.randn(states, hidden, generator=generator)) for _ in (roles if split else roles[:1])
        )
        self.networks = nn.ModuleList(make_network() for _ in (roles[:1] if mono else roles) if make_network)
        headed = mono and not split
        self.heads = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in roles if headed)
        for module in (*self.networks, *self.heads):
            # Kaiming is for ReLUs; transformers keep PyTorch's initialization.
            initialize_linears_(module, init == "unit" and isinstance(module, Mlp), generator)
            if isinstance(module, Transformer):
                module.shrink_residuals_()
        if init == "unit" and roles:
            self._scale_to(unit)

    @torch.no_grad()
    def _scale_to(self, size: float) -> None:
        """Scale H to entries of this root mean square."""
        total = torch.stack([h.square().mean() for h in self.features()]).mean().sqrt().clamp(min=1e-6)
        gains = [network.gain for network in self.networks if network.gain is not None]
        for tensor in gains or self.embeddings.parameters():
            assert isinstance(tensor, nn.Parameter)
            tensor.mul_(size / total)

    def features(self, states: Tensor | None = None) -> list[Tensor]:
        """Return H [n, h] of every role, in the order of `roles`; of some states or of all.

        Some states only: for networks that look at one state at a time, which transformers do not.
        """
        tables: list[Tensor] = list(self.embeddings)
        networks = list(self.networks)
        if states is not None:
            tables = [table.index_select(0, states) for table in tables]
        if len(networks) == 1 < len(tables):
            return list(networks[0](torch.stack(tables)).unbind())
        if self.heads:
            inner = networks[0](tables[0])
            return [head(inner) for head in self.heads]
        each = tables * len(self.roles) if len(tables) == 1 else tables
        return [network(table) for network, table in zip(networks, each, strict=True)] if networks else each

    def forward(self) -> HMM:
        h = dict(zip(self.roles, self.features(), strict=True))
        start = h["in"] @ self.start if self.is_factored["start"] else self.start
        transition = factor_logits(h["in"], h["out"]) if self.transition is None else self.transition
        emission = factor_logits(h["emit"], self.emission) if self.is_factored["emission"] else self.emission
        log_start, log_transition, log_emission = (
            torch.log_softmax(logits, -1, dtype=self.start.dtype) for logits in (start, transition, emission)
        )
        return HMM(log_start, log_transition, log_emission)


class BlockedFactored(FactoredBlockedModel):
    """H_in, H_out, H_emit of a `DenseFactored` model of the same size; a batch computes only the states it keeps.

    Everything is factored, and networks are MLPs: a transformer over the states would see others with every sample.
    """

    def __init__(self, blocks: Blocks, dense: DenseFactored, dropout: float = 0.5) -> None:
        super().__init__(blocks, dropout)
        if not all(dense.is_factored.values()):
            free = ", ".join(name for name, factored in dense.is_factored.items() if not factored)
            raise InputError(f"models with blocks are factored throughout, and {free} is not: factor it")
        if any(isinstance(network, Transformer) for network in dense.networks):
            raise InputError(
                "a transformer attends to all states, and a blocked model computes some: use linear or mlp"
            )
        self.dense = dense

    def features_of(self, states: Tensor | None, carried: Tensor | None = None) -> tuple[Features, Tensor | None]:
        u, w, emitting = self.dense.features(states)
        log_start = torch.log_softmax(u @ self.dense.start, 0, dtype=self.dense.start.dtype)
        blocked = emitting.reshape(self.blocks.num_blocks, -1, emitting.shape[1])
        log_emission = blocked_emission(blocked, self.dense.emission, None, self.tiles)
        left = None if carried is None else self.dense.features(carried)[0]
        return Features(self.blocks.block_of_word, u, w, log_start, log_emission), left
