"""Configurations of model families, without torch: command lines and recipes are checked before it is imported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from hmmlm.errors import InputError
from hmmlm.section import Fraction, Layers, Passes, Scale, Section, States, Width

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hmmlm.data.tokenizers import Tokenizer
    from hmmlm.models.base import Model
    from hmmlm.models.factored import Factored
    from hmmlm.models.networks import Mlp, Transformer

FactorScale = Literal["unit", "normal"]
Form = Literal["released", "printed"]
Skip = Literal["none", "activation", "layer"]
BlockCount = Annotated[int, Field(ge=0, le=2**16)]


class ModelSize(NamedTuple):
    """Numbers that training holds at least, to refuse what cannot fit in memory before it is allocated."""

    parameters: int
    probabilities: int
    """Of the HMM that a step or a validation check makes, as far as it is held as a whole."""


class ModelConfig(Section, ABC):
    """A model family. Each adds `kind`, its own fields, and `build`, which imports torch."""

    states: States = 512
    """Number of hidden states."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {}
    """AdamW settings that suit the family, where the configuration does not set them."""

    @property
    def blocks_needed(self) -> int:
        """Number of word blocks; 0 unless a `BlockedConfig` has blocks."""
        return 0

    @property
    def assignable(self) -> bool:
        """Whether the model can be set to given probabilities, as Baum-Welch needs."""
        return False

    @property
    def distillable(self) -> bool:
        """Whether the model can be trained on P(O, S)."""
        return True

    @property
    def has_embeddings(self) -> bool:
        """Whether states and words have embeddings that a teacher's can be copied into."""
        return False

    def check_files(self) -> None:
        """Raise an InputError if a file that the configuration names is missing."""

    def size(self, words: int) -> ModelSize:
        """Return a lower bound of what training holds, for a vocabulary of `words`: here that of a dense HMM."""
        return ModelSize(0, self.states * (self.states + words))

    @abstractmethod
    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        """Create the model on the CPU, with parameters that depend on the seed alone.

        Args:
            block_of_word: [V] the block of each word, for a `BlockedConfig` with blocks.
            device: where the model will be trained.
        """


class BlockedConfig(ModelConfig):
    """A family whose states may be in blocks that emit the words of one Brown cluster each.

    With blocks, `build` returns a `BlockedModel`, or another model if it implements `dropout` itself.
    """

    blocks: BlockCount = 0
    """Brown clusters of words, each with states / blocks states; 0: every state may emit every word."""
    clusters: Path | None = None
    """A `paths` file as written by Liang's `brown-cluster`; None: the training text is clustered."""
    exchange_passes: Passes = 0
    """Passes over all words that move each to the best cluster, after clustering."""
    dropout: Fraction = 0.0
    """State dropout: the fraction of each block's states left out of a batch."""

    @property
    def blocks_needed(self) -> int:
        return self.blocks

    def check_files(self) -> None:
        if self.clusters is not None and not self.clusters.is_file():
            raise InputError(f"model.clusters: no file {self.clusters}; `hmmlm data --clusters` makes one")

    def block_cells(self, words: int) -> int:
        """Return the numbers of a blocked HMM: emissions, and the transitions between two blocks."""
        in_block = self.states // max(1, self.blocks)
        return in_block * (in_block + words)

    @model_validator(mode="after")
    def _blocks_divide_states(self) -> BlockedConfig:
        if self.blocks and self.states % self.blocks:
            raise ValueError(f"states ({self.states}) must be a multiple of blocks ({self.blocks})")
        return self

    @model_validator(mode="after")
    def _settings_of_blocks(self) -> BlockedConfig:
        unused = {"clusters": self.clusters, "exchange_passes": self.exchange_passes, "dropout": self._dense_dropout()}
        for name, value in unused.items():
            if value and not self.blocks:
                raise ValueError(f"{name} = {value} needs blocks: set blocks to the number of word clusters")
        return self

    def _dense_dropout(self) -> float:
        """State dropout that a model without blocks does not support."""
        return self.dropout


class ScalarConfig(BlockedConfig):
    """One logit per probability."""

    kind: Literal["scalar"] = "scalar"
    scale: Scale = 1.0
    """Standard deviation of the initial logits."""

    # A high rate with a high eps: where gradients are smaller than eps, AdamW is gradient descent with momentum. With
    # eps 1e-8 it moves the logit of a word that a state never meets as fast as any other, and overfits.
    optimizer_defaults: ClassVar[dict[str, Any]] = {"rate": 1.0, "eps": 3e-5, "weight_decay": 0.0}

    @property
    def assignable(self) -> bool:
        return not self.blocks

    def size(self, words: int) -> ModelSize:
        dense = super().size(words).probabilities
        if not self.blocks:
            return ModelSize(dense, dense)
        return ModelSize(self.states**2 + words * self.states // self.blocks, self.block_cells(words))

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        import torch

        from hmmlm.models.scalar import BlockedScalar, Scalar
        from hmmlm.structure.blocks import Blocks

        generator, words = torch.Generator().manual_seed(seed), vocabulary.vocab_size
        if block_of_word is None:
            return Scalar(self.states, words, self.scale, generator)
        blocks = Blocks.from_clusters(block_of_word, self.states, vocab_size=words)
        return BlockedScalar(blocks, self.dropout, self.scale, generator)


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
        embeddings = (self.states + (words if self.factor_emission else 0)) * self.hidden
        parameters = self.capacity or embeddings + self.network_weights
        if isinstance(self, BlockedConfig) and self.blocks:
            return ModelSize(parameters, self.block_cells(words))
        return ModelSize(parameters, super().size(words).probabilities)

    def make_dense(self, vocab_size: int, hidden: int, generator: torch.Generator | None) -> Factored:
        """Create the dense model with embeddings of width `hidden`."""
        from hmmlm.models.factored import Factored

        return Factored(
            self.states,
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
        from hmmlm.models.capacity import fit_width

        if self.capacity is None:
            return self.hidden
        # Nothing is drawn or scaled, only counted.
        unscaled = self.model_copy(update={"init": "normal"})
        what = f"{self.states} states and {vocab_size:,} words"
        return fit_width(lambda w: unscaled.make_dense(vocab_size, w, None), self.capacity, self.width_step, what)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        import torch

        from hmmlm.models.factored import BlockedFactored
        from hmmlm.structure.blocks import Blocks

        words = vocabulary.vocab_size
        dense = self.make_dense(words, self.width(words), torch.Generator().manual_seed(seed))
        if block_of_word is None:
            return dense
        assert isinstance(self, BlockedConfig)
        return BlockedFactored(Blocks.from_clusters(block_of_word, self.states, vocab_size=words), dense, self.dropout)


class LinearConfig(FactoredConfig, BlockedConfig):
    """Low-rank factors from tables of embeddings."""

    kind: Literal["linear"] = "linear"

    optimizer_defaults: ClassVar[dict[str, Any]] = {"rate": 0.03, "weight_decay": 0.1}


@dataclass(frozen=True)
class MlpForm:
    """One point of the grid of Lee & Berg-Kirkpatrick 2025, Table 3."""

    layers: int = 2
    """Linear layers, of the width of the embeddings, with biases."""
    skip: Skip = "activation"
    """Added to the output of every layer but the first: nothing, the input of its ReLU, or its own input."""
    relu: bool = True
    """A ReLU after every linear layer."""
    norm: bool = True
    """A LayerNorm after every layer but the first (after the only one, if there is one)."""

    def __post_init__(self) -> None:
        if self.skip != "none" and self.layers == 1:
            raise InputError(f"skip = {self.skip!r} needs a second layer, and layers is 1: set skip to 'none'")
        if self.skip == "activation" and not self.relu:
            raise InputError("skip = 'activation' skips the ReLU, and relu is false: set skip to 'none'")


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

    optimizer_defaults: ClassVar[dict[str, Any]] = {"rate": 0.01, "weight_decay": 0.1}

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
        from hmmlm.models.networks import Mlp

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
    optimizer_defaults: ClassVar[dict[str, Any]] = {"rate": 0.003, "weight_decay": 0.1}

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
        from hmmlm.models.capacity import transformer_layers
        from hmmlm.models.networks import Transformer

        depth = self.layers or (2 if self.capacity is None else transformer_layers(self.capacity))
        return partial(Transformer, hidden, depth, self.heads)


class NetworkConfig(ModelConfig):
    """Networks on state embeddings (Chiu & Rush 2020)."""

    states: States = 2048
    """Number of hidden states."""
    hidden: Width = 256
    """Size of embeddings and networks."""
    form: Form = "printed"
    """printed: the networks of the paper; released: those of its code, with bare embeddings on the incoming side."""
    network_dropout: Fraction = 0.0
    """Dropout inside the networks."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {"rate": 0.003, "weight_decay": 0.1}

    def network_size(self, words: int) -> int:
        """Return a lower bound of the number of parameters."""
        return (self.states // 2 + words + 6 * self.hidden) * self.hidden


class NeuralConfig(NetworkConfig, BlockedConfig):
    """Networks on state embeddings (Chiu & Rush 2020), for thousands of states."""

    kind: Literal["neural"] = "neural"
    blocks: BlockCount = 64
    """Brown clusters of words, each with states / blocks states; 0: every state may emit every word."""
    block_embeddings: bool = False
    """Half of each state embedding is shared by its block."""

    def _dense_dropout(self) -> float:
        return 0.0  # a single block has state dropout too

    def size(self, words: int) -> ModelSize:
        return ModelSize(self.network_size(words), self.block_cells(words))

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        import torch

        from hmmlm.models.base import one_block
        from hmmlm.models.neural import Neural

        return Neural(
            one_block(vocabulary.vocab_size, self.states, block_of_word),
            hidden=self.hidden,
            form=self.form,
            dropout=self.dropout,
            block_embeddings=self.block_embeddings,
            network_dropout=self.network_dropout,
            generator=torch.Generator().manual_seed(seed),
        )


class UniformConfig(NetworkConfig):
    """The networks of Chiu & Rush 2020 where every word is emitted by states drawn at random."""

    kind: Literal["uniform"] = "uniform"
    states_per_word: States = 128
    """States that may emit a word."""
    dropout: Fraction = 0.0
    """State dropout: the fraction of states left out of a batch."""

    @property
    def distillable(self) -> bool:
        return False

    @model_validator(mode="after")
    def _states_suffice(self) -> UniformConfig:
        if self.states_per_word > self.states:
            raise ValueError(f"states_per_word ({self.states_per_word}) must be at most states ({self.states})")
        return self

    def size(self, words: int) -> ModelSize:
        return ModelSize(self.network_size(words), super().size(words).probabilities)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        import torch

        from hmmlm.models.uniform import UniformNeural
        from hmmlm.structure.blocks import UniformSubsets

        return UniformNeural(
            UniformSubsets.sample(vocabulary.vocab_size, self.states, self.states_per_word, seed=seed),
            hidden=self.hidden,
            form=self.form,
            dropout=self.dropout,
            network_dropout=self.network_dropout,
            generator=torch.Generator().manual_seed(seed),
        )
