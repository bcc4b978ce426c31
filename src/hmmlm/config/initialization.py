"""Where learning starts: random parameters, a bigram, or latent variable distillation (LVD) from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hmmlm.section import MAX_TOKENS, Pseudocount, Section, Seed, TokenCount, Width


class KMeansConfig(Section):
    """Clusters of the teacher's embeddings, one per state."""

    tokens: TokenCount = 1_000_000
    """Tokens of the training text, drawn at random by chunks, whose embeddings are clustered."""
    passes: Annotated[int, Field(gt=0, le=1_000)] = 10
    """Maximum number of passes over the embeddings; they end when centroids hardly move."""
    pca: Width | None = None
    """Principal components of the embeddings that are clustered, found in a first pass; None: all dimensions."""
    memory_gb: Annotated[float, Field(ge=0, le=1e6)] = 16.0
    """Embeddings kept between passes, on the teacher's device; the teacher recomputes the others in every pass."""
    seed: Seed | None = None
    """Seed of the chunks and the first centroids; None: train.seed. Set it to share clusters between seeds."""


class NoInitialization(Section):
    """Random parameters."""

    kind: Literal["none"] = "none"


class BigramConfig(Section):
    """A smoothed bigram of the blocks (scalar with blocks); the most frequent words have a block of their own."""

    kind: Literal["bigram"] = "bigram"


class LabelConfig(Section):
    """States of tokens from clusters of a teacher's embeddings."""

    teacher: str
    """A folder, a hub name, a GGUF file, or a run of `hmmlm teacher`."""
    gguf_file: str | None = None
    """The file in the teacher's folder or hub repository, if it is a GGUF."""
    random_teacher: bool = False
    """Use a teacher of this shape with random weights."""
    layer: Annotated[int, Field(ge=-1_000, le=1_000)] = -1
    """Which of the teacher's hidden states; −1: the last."""
    align: Literal["read", "predict"] = "read"
    """read: the hidden state at the token itself; predict: the one that predicts it."""
    clusters: Path | None = None
    """Clusters to use: clusters.safetensors of an earlier run with the same teacher; None: computed in the run."""
    cache: Path | None = None
    """A folder in which runs with the same teacher and text share clusters and labels; None: not shared."""
    kmeans: KMeansConfig = KMeansConfig()


class LvdConfig(LabelConfig):
    """Maximize P(O, S) with clusters as states S for some tokens, then P(O)."""

    kind: Literal["lvd"] = "lvd"
    tokens: TokenCount | None = None
    """Training tokens of the P(O, S) phase, counted in the total; None: 5 million, at most a tenth of the run."""
    labels: Literal["fly", "cached"] = "fly"
    """fly: the teacher reads every batch; cached: it reads the whole training text once, before training."""
    centroids: bool = False
    """Initialize the state embeddings with the centroids (linear, mlp, transformer without blocks)."""
    head: bool = False
    """Initialize the word embeddings with the teacher's language-model head (linear, mlp, transformer)."""
    frozen_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Training tokens for which the embeddings set by `centroids` and `head` are frozen."""

    @model_validator(mode="after")
    def _something_is_frozen(self) -> LvdConfig:
        if self.frozen_tokens and not (self.centroids or self.head):
            raise ValueError("frozen_tokens freezes what centroids and head set, and neither is true")
        return self


class CountsConfig(LabelConfig):
    """Start from the closed-form maximum of P(O, S) (scalar without blocks)."""

    kind: Literal["counts"] = "counts"
    tokens: TokenCount | None = None
    """Tokens that are counted, before training; None: those clustered."""
    pseudocount: Annotated[Pseudocount, Field(ge=1e-12)] = 0.01
    """Added to every count."""


InitializationConfig = Annotated[
    NoInitialization | BigramConfig | LvdConfig | CountsConfig, Field(discriminator="kind")
]
