"""Where learning starts, as configured."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hmmlm.learning.config_base import Fraction, Section


class KMeansConfig(Section):
    """Clusters of the teacher's embeddings, one a state."""

    tokens: PositiveInt = 1_000_000
    """Tokens of the training text, drawn at random by chunks, whose embeddings are clustered: all of them in every
    pass, never a subsample."""
    pca: PositiveInt | None = None
    """Principal components kept before clustering; None: all dimensions."""
    start: Literal["k-means++", "random"] = "k-means++"
    """How the first centroids are drawn."""
    start_points: PositiveInt = 65_536
    """Embeddings, drawn at random, that the first centroids are drawn from."""
    update: Literal["full", "minibatch"] = "full"
    """full: centroids move after every pass; minibatch: after every batch."""
    passes: PositiveInt = 10
    """Passes over the embeddings at most; they end when centroids hardly move."""
    memory_gb: NonNegativeFloat = 16.0
    """Embeddings kept between passes, on the teacher's device; for those beyond the teacher is asked in every pass."""
    seed: int | None = None
    """Of the chunks and the first centroids; None: train.seed. Runs with other seeds can share clusters by it."""


class InitializationConfig(Section):
    """Where learning starts: latent variable distillation (LVD) from a teacher, and pieces of it as parameters."""

    kind: Literal["none", "lvd", "counts"] = "none"
    """lvd: maximise P(O, S) with clusters of the teacher's embeddings as states S for `tokens`, then P(O); counts:
    start from the closed-form maximum of P(O, S) over `tokens` (scalar, dense)."""
    teacher: str | None = None
    """The teacher: a folder, a hub name, or a model that `hmmlm teacher` made."""
    gguf_file: str | None = None
    """The file in the teacher's folder, where it is a GGUF."""
    random_teacher: bool = False
    """A teacher of this shape with random weights instead."""
    layer: int = -1
    """Which of the teacher's hidden states; −1: the last."""
    align: Literal["read", "predict"] = "read"
    """read: the state of the token itself; predict: the one that predicts it."""
    tokens: PositiveInt | None = None
    """lvd: training tokens of the P(O, S) phase, counted in the total (None: 5 million, at most a tenth of the run);
    counts: tokens that are counted, before training (None: those clustered)."""
    labels: Literal["fly", "cached"] = "fly"
    """fly: the teacher reads every batch; cached: all of the training text once, before training, into a file."""
    clusters: Path | None = None
    """Clusters to use, clusters.safetensors of an earlier run with the same teacher; None: made here."""
    shared: Path | None = None
    """A folder in which runs with the same teacher and text share clusters and, of chunks, labels; None: none."""
    pseudocount: PositiveFloat = 0.01
    """Added to every count (counts)."""
    network: Literal["own", "pretrained", "body", "random"] = "own"
    """The network of a transformer parameterization: its own; or the teacher's, with all its weights, the head for the
    word vectors (pretrained), those of its blocks alone (body), or random ones (transformer, mono, not split; `hidden`,
    `layers` and `heads` are the teacher's)."""
    alike: Fraction = 0.2
    """The most that such a network may say alike of all states at first: their embeddings, drawn as far apart as those
    of words, are drawn further apart until it is so. 1 leaves them as they are."""
    centroids: bool = False
    """State embeddings start as the centroids (lvd; linear, mlp, transformer)."""
    head: bool = False
    """Word vectors start as the teacher's language-model head (lvd; linear, mlp, transformer)."""
    frozen_tokens: NonNegativeInt = 0
    """Training tokens for which what `centroids` and `head` set stays as it is."""
    kmeans: KMeansConfig = KMeansConfig()

    @model_validator(mode="after")
    def _teacher_given(self) -> InitializationConfig:
        if self.teacher is None and (self.kind != "none" or self.network != "own"):
            name = "kind" if self.kind != "none" else "network"
            raise ValueError(f"{name} = {getattr(self, name)!r} needs a teacher: a folder or a hub name")
        if self.teacher is not None and self.kind == "none" and self.network == "own":
            raise ValueError(f"teacher = {self.teacher!r} is not used with kind = 'none': set kind to 'lvd'")
        if (self.centroids or self.head) and self.kind != "lvd":
            raise ValueError("centroids and head are of clusters: set kind to 'lvd'")
        if self.frozen_tokens and not (self.centroids or self.head):
            raise ValueError("frozen_tokens is for what centroids and head set, and neither is true")
        return self
