"""The interface of model families: a configuration that builds a module whose forward pass makes an HMM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distributed.normalizers import split_linear_logsumexp
from hmmlm.distributed.ranks import world
from hmmlm.emissions import Blocked
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, Carry, Scan
from hmmlm.ops.blocked_emission import make_tiles
from hmmlm.ops.blocked_scan import Factors, blocked_scan
from hmmlm.ops.blocked_scan import refusal as blocked_refusal
from hmmlm.ops.common import factor_logits, last_tokens, logsumexp, product_dtype
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.pieces import fits
from hmmlm.scan.generic_scan import compute_again, generic_scan
from hmmlm.section import Fraction, ModelSize, Passes, Section, States
from hmmlm.structure.blocks import Blocks
from hmmlm.structure.dropout import global_states, sample_states, states_kept
from hmmlm.transitions import Dense, Factored, Transition

BlockCount = Annotated[int, Field(ge=0, le=2**16)]


class ModelConfig(Section, ABC):
    """A model family. Each adds `kind`, its own fields, and `build`."""

    num_states: States = 512
    """Number of hidden states."""

    optimizer_defaults: ClassVar[dict[str, Any]] = {}
    """AdamW settings that suit the family, where the configuration does not set them."""

    @property
    def blocks_needed(self) -> int:
        """Number of word blocks; 0 unless a `BlockedConfig` has blocks."""
        return 0

    @property
    def assignable(self) -> bool:
        """Whether the model is a `Scalar`, which can be set to the probabilities of two matrices."""
        return False

    @property
    def counts_suffice(self) -> bool:
        """Whether the model is a `TableModel`, which Baum-Welch can train."""
        return False

    @property
    def distillable(self) -> bool:
        """Whether the model can be trained on P(O, S)."""
        return True

    @property
    def predicts_next_words(self) -> bool:
        """Whether the model is a `FactoredBlockedModel`, whose `scan` accepts next words."""
        return False

    @property
    def has_embeddings(self) -> bool:
        """Whether states and words have embeddings that a teacher's can be copied into."""
        return False

    def check_files(self) -> None:
        """Raise an InputError if a file that the configuration names is missing."""

    def size(self, words: int) -> ModelSize:
        """Return a lower bound of what training holds, for a vocabulary of `words`: here that of a dense HMM."""
        return ModelSize(0, self.num_states * (self.num_states + words))

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
    """Brown clusters of words, each with states / blocks states; fewer, if the text has fewer than two words for each.
    0: every state may emit every word."""
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

    def size(self, words: int) -> ModelSize:
        if not self.blocks:
            return super().size(words)
        in_block = self.num_states // self.blocks  # emissions, and the transitions between two blocks
        return ModelSize(0, in_block * (in_block + words))

    @model_validator(mode="after")
    def _blocks_divide_states(self) -> BlockedConfig:
        if self.blocks and self.num_states % self.blocks:
            raise ValueError(f"states ({self.num_states}) must be a multiple of blocks ({self.blocks})")
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


class Model(nn.Module, ABC):
    """A module whose forward pass makes the distributional parameters.

    Training calls `scan` once per batch, with gradients; for use, the module is called once and the HMM is kept without
    it.
    """

    def __init__(self, states: int, vocab_size: int) -> None:
        super().__init__()
        self.num_states = states
        self.vocab_size = vocab_size
        self.skipped: Tensor
        """How many training sequences were dropped because their mass underflowed inside a CUDA graph."""
        self.register_buffer("skipped", torch.zeros((), dtype=torch.long), persistent=False)
        self.draws_for_rows = False
        """Whether `scan` draws more random numbers for more sequences."""

    @property
    def device(self) -> torch.device:
        return self.skipped.device

    @abstractmethod
    def forward(self) -> HMM:
        """Return the HMM, differentiable in the parameters of the module."""

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, carry: Carry | None = None, restart: Tensor | None = None
    ) -> Scan:
        """Compute log p(x) [B] of a training batch and its carry; see `Primitives.scan`."""
        restart = restart_lost(restart, carry, tokens)
        return self.drop_underflowed(self().scan(tokens, lengths, carry, restart, exact_carry=False))

    def drop_underflowed(self, result: Scan) -> Scan:
        """Set the log-likelihoods of suspect sequences, which have no gradient, to zero and count them in `skipped`."""
        if result.suspect is None:
            return result
        self.skipped += result.suspect.sum()
        return result._replace(log_likelihood=torch.where(result.suspect, 0.0, result.log_likelihood))

    def assign(self, hmm: HMM) -> None:
        """Set the parameters so that `forward` returns the probabilities of `hmm`."""
        raise InputError(f"a {type(self).__name__} model cannot be set to given probabilities: use the scalar family")


class TableModel(Model):
    """One logit per probability, drawn from N(0, scale²); the parameters are tables, with a softmax over each row."""

    def __init__(
        self, vocab_size: int, shapes: Mapping[str, Sequence[int]], scale: float, generator: torch.Generator | None
    ) -> None:
        """Create the tables of `shapes`, whose order is that of the tensors of the HMM: the first is the start [Z]."""
        super().__init__(next(iter(shapes.values()))[0], vocab_size)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape, generator=generator) * scale))

    @property
    def logits(self) -> dict[str, nn.Parameter]:
        """The logits, of which log-probabilities are a special case."""
        return dict(self.named_parameters())

    def log_probs(self) -> dict[str, Tensor]:
        """Return the log-probabilities of each table."""
        return {name: logits.log_softmax(-1) for name, logits in self.logits.items()}

    @abstractmethod
    def make_hmm(self, log_probs: Mapping[str, Tensor]) -> HMM:
        """Return the HMM of the log-probabilities of each table."""

    def forward(self) -> HMM:
        return self.make_hmm(self.log_probs())


class BlockedModel(Model):
    """States in blocks that emit the words of one cluster each, with state dropout."""

    def __init__(self, blocks: Blocks, dropout: float) -> None:
        super().__init__(blocks.num_states, blocks.vocab_size)
        states_kept(blocks.states_per_block, dropout)  # raises an error before any work
        self.blocks, self.dropout = blocks, dropout
        self.tiles = make_tiles(blocks.block_of_word, blocks.num_blocks)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move the structure along with the parameters."""
        result = super()._apply(fn, recurse)
        self.blocks, self.tiles = self.blocks.to(self.skipped.device), self.tiles.to(self.skipped.device)
        return result

    def blocked(self, log_emission: Tensor) -> Blocked:
        """Return the emission of log p(word | state i of its block) [V, k]."""
        return Blocked(log_emission, self.blocks.block_of_word, self.blocks.num_blocks)

    def finish(
        self, result: Scan, tokens: Tensor, lengths: Tensor | None, states: Tensor, block_of_word: Tensor
    ) -> Scan:
        """Drop underflowed sequences and name the states [M, kept] that the carry is over."""
        block = block_of_word.index_select(0, last_tokens(tokens, lengths).clamp(min=0))
        result = self.drop_underflowed(result)
        return result._replace(carry=Carry(result.carry.log_probs, states.index_select(0, block)))


class Features(NamedTuple):
    """Parameters of an HMM with M blocks of k states, as in `Factors`, where A = softmax(u wᵀ)."""

    block_of_word: Tensor  # [V]
    u: Tensor  # [Z, h]
    w: Tensor  # [Z, h]
    log_start: Tensor  # [Z]
    log_emission: Tensor  # [V, k]

    def factors(self, normalizers: Callable[[Tensor, Tensor], Tensor] = linear_logsumexp) -> Factors:
        """Return the factors with their normalizers."""
        return Factors(*self[:3], normalizers(self.u, self.w), *self[3:])

    def training_factors(self) -> Factors:
        """Return the factors; several processes divide the work of normalizers."""
        return self.factors(split_linear_logsumexp)

    def hmm(self) -> HMM:
        """Return the HMM of a batch; its transition is a matrix where that fits, which costs no more than normalizers.

        Several processes divide the normalizers instead, and all of them must do the same.
        """
        if world().count > 1 or not fits(len(self.u) ** 2):
            return from_factors(self.training_factors())
        log_transition = factor_logits(self.u, self.w).to(self.log_start.dtype).log_softmax(1)
        return _blocked_hmm(self.log_start, Dense(log_transition), self.log_emission, self.block_of_word)


class FactoredBlockedModel(BlockedModel):
    """A blocked model whose transition is softmax(U Wᵀ): `features_of` computes U and W of any sample of states."""

    @abstractmethod
    def features_of(self, states: Tensor | None, carried: Tensor | None = None) -> tuple[Features, Tensor | None]:
        """Compute the features of `states` [M·kept] (or all).

        With `carried` [n], states that are left but not entered, also their rows of u [n, h].
        """

    def forward(self) -> HMM:
        """Return the HMM over all states, without dropout.

        Under autocast the factors are rounded to the dtype of the products, so that they fit the normalizer in whatever
        precision they are multiplied later. What all rows of w have in common adds the same number to all scores of a
        state, 900 in trained models; without it the scores, and so the normalizer, are 20 times as accurate.
        """
        features = self.features_of(None)[0]
        rounded, exact = product_dtype(features.u), features.log_start.dtype
        if rounded != exact:
            u, w = features.u.to(exact), features.w.to(exact)
            u, w = (factor.to(rounded).to(exact) for factor in (u, w - w.mean(0)))
            features = features._replace(u=u, w=w)
        _, u, w, log_normalizer, log_start, log_emission = features.factors()
        return HMM(log_start, Factored(u, w, log_normalizer), self.blocked(log_emission))

    def scan(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        carry: Carry | None = None,
        restart: Tensor | None = None,
        next_words: Tensor | None = None,
    ) -> Scan:
        """Compute the likelihood of a batch under a fresh sample of states: those not kept cost nothing.

        The carry is over the previous batch's sample; transitions out of it are normalized over the current one.

        Args:
            next_words: [B, T, S]; the result then has their score too (see `blocked_scan`).
        """
        sample = sample_states(self.blocks, self.dropout)
        kept, block_of_word = global_states(self.blocks, sample), self.blocks.block_of_word
        carried_states = group = entry = None
        if carry is not None:
            assert carry.states is not None  # of this family's own scan
            carried_states, group = self._distinct(carry.states)
        features, left = self.features_of(kept, None if carried_states is None else carried_states.flatten())
        if carry is not None and carried_states is not None and left is not None:
            log_normalizer = linear_logsumexp(left, features.w).view(carried_states.shape)
            left = left.unflatten(0, carried_states.shape)
            if group is not None:
                left, log_normalizer = left.index_select(0, group), log_normalizer.index_select(0, group)
            first = tokens[:, :1] if next_words is None else torch.cat([tokens[:, :1], next_words[:, 0]], 1)
            words = block_of_word.index_select(0, first.clamp(min=0).flatten()).view(first.shape)
            entering = features.w.view(*sample.shape, -1)[words]  # [B, 1 + S, kept, h]
            scores = factor_logits(left.expand(len(tokens), -1, -1), entering.flatten(1, 2))
            entry = enter(carry, scores - log_normalizer[:, :, None]).unflatten(1, entering.shape[1:3])
        restart = restart_lost(restart, carry, tokens)
        if blocked_refusal(tokens.device, features.log_start.dtype):
            hmm = features.hmm()
            result = generic_scan(hmm, tokens, lengths, None, restart, entry=entry, next_words=next_words)
        else:
            result = scan_factors(features.training_factors(), tokens, lengths, entry, restart, next_words)
        return self.finish(result, tokens, lengths, kept.view(sample.shape), block_of_word)

    def _distinct(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the different rows of the carried states [B, k], and which of them each sequence carries.

        None: its own, or the only one.
        """
        if self.blocks.num_blocks == 1:
            return states[:1], None
        if states.is_cuda:  # finding them would synchronize with the device
            return states, None
        # All sequences carry states of the same sample, so that the first one identifies the row.
        _, group = states[:, 0].unique(return_inverse=True)
        rows = states.new_empty(int(group.max()) + 1, states.shape[1]).index_copy_(0, group, states)
        return rows, group


def _blocked_hmm(log_start: Tensor, transition: Transition, log_emission: Tensor, block_of_word: Tensor) -> HMM:
    return HMM(log_start, transition, Blocked(log_emission, block_of_word, len(log_start) // log_emission.shape[1]))


def from_factors(factors: Factors) -> HMM:
    """Return the HMM of factors, which may be in a narrower dtype than the other parameters."""
    u, w = (factor.to(factors.log_start.dtype) for factor in (factors.u, factors.w))
    transition = Factored(u, w, factors.log_normalizer.to(u.dtype))
    return _blocked_hmm(factors.log_start, transition, factors.log_emission, factors.block_of_word)


def scan_factors(
    factors: Factors,
    tokens: Tensor,
    lengths: Tensor | None,
    entry: Tensor | None,
    restart: Tensor | None,
    next_words: Tensor | None = None,
    product_dtype: torch.dtype | None = None,
) -> Scan:
    """Compute the likelihood of a batch by the GPU kernels; see `blocked_scan`."""
    given: dict[str, Any] = {"entry": entry, "next_words": next_words, "product_dtype": product_dtype}
    result = blocked_scan(factors, tokens, lengths=lengths, restart=restart, **given)
    again: dict[str, Any] = {"entry": entry, "next_words": next_words}
    return compute_again(result, lambda: from_factors(factors), tokens, lengths, None, restart, **again)


def enter(carry: Carry, log_transition: Tensor) -> Tensor:
    """Compute log p(z_0 | past) [B, n], differentiable, from log A [B, K, n] of the carried states."""
    return logsumexp(carry.log_probs[:, :, None].to(log_transition.dtype) + log_transition, 1)


def restart_lost(restart: Tensor | None, carry: Carry | None, tokens: Tensor) -> Tensor | None:
    """Return `restart` [B, T] with sequences whose carried mass has vanished starting again: they would stay lost."""
    if carry is None:
        return restart
    restart = torch.zeros_like(tokens, dtype=torch.bool) if restart is None else restart.clone()
    restart[:, 0] |= carry.is_lost
    return restart


def one_block(vocab_size: int, states: int, block_of_word: Tensor | None) -> Blocks:
    """Return the blocks of a model; a single one if there are no word clusters."""
    clusters = torch.zeros(vocab_size) if block_of_word is None else block_of_word
    return Blocks.from_clusters(clusters, states, vocab_size=vocab_size)
