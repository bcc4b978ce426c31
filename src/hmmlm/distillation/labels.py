"""Labels for latent variable distillation: the state of each token by the cluster of its teacher embedding.

In a blocked model, embeddings are clustered inside the block of their word, so that a label is one of the states that
may emit the word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.batches import Batch, ExtendedBatches
from hmmlm.data.files import exclusive
from hmmlm.distillation.cache import LabelStore
from hmmlm.distillation.kmeans import Clusters, Piece
from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.hmm import HMM

LABELS = Path("data", "labels.npy")
"""Labels of a user, in the folder of a run."""
Embed = Callable[[Tensor], Tensor]
"""Student tokens [B, T] (−1 beyond a row's length) → the teacher's embeddings of them [B, T, H]."""


class LabelSource(Protocol):
    """Where labels come from."""

    def labels(self, batch: Batch) -> Tensor:
        """Return the states [B, T] of a batch on the CPU; −1 where there is no token."""


@dataclass(frozen=True)
class TeacherLabels:
    """Labels by the nearest centroid of the teacher's embedding, computed on request."""

    embed: Embed
    clusters: Clusters
    block_of_word: Tensor | None = None
    """[V]; None: states are not in blocks."""

    @torch.no_grad()
    def labels(self, batch: Batch) -> Tensor:
        tokens, device = batch.tokens, self.clusters.mean.device
        known = tokens >= 0
        embeddings = self.embed(tokens)[known.to(device)]
        words = tokens[known].to(device)
        group = None if self.block_of_word is None else self.block_of_word.to(device).index_select(0, words)
        # Rounded like the points that were clustered.
        return nearest_states(self.clusters, embeddings.to(torch.bfloat16), group, tokens)


@dataclass(frozen=True)
class StoredLabels:
    """Labels that are kept by place in the text; a teacher supplies those that are not known yet."""

    teacher: TeacherLabels
    store: LabelStore

    def labels(self, batch: Batch) -> Tensor:
        assert batch.places is not None
        found = self.store.read(batch.places)
        if bool(((found < 0) & (batch.tokens >= 0)).any()):
            with exclusive(self.store.lock, lambda: None):  # a concurrent run may have asked for them
                found = self.store.read(batch.places)
                unknown = ((found < 0) & (batch.tokens >= 0)).any(1)
                if bool(unknown.any()):
                    rows = Batch(batch.tokens[unknown], None, None, carry=False)
                    found[unknown] = self.teacher.labels(rows)
                    self.store.write(batch.places[unknown], found[unknown])
        return found


@dataclass(frozen=True)
class GivenLabels:
    """Labels of a user, of some of the tokens of a text."""

    states: np.ndarray  # [N] by place; −1: unknown

    @classmethod
    def open(cls, path: Path) -> GivenLabels:
        return cls(np.load(path, mmap_mode="r", allow_pickle=False))

    def labels(self, batch: Batch) -> Tensor:
        assert batch.places is not None
        found = torch.from_numpy(self.states[batch.places.clamp(min=0).numpy()].astype(np.int64))
        return found.masked_fill(batch.places < 0, -1)


@dataclass(frozen=True)
class LabeledBatches(ExtendedBatches):
    """Batches with labels."""

    source: LabelSource

    def extend(self, batch: Batch, epoch: int, index: int) -> Batch:
        some = isinstance(self.source, GivenLabels)
        return batch._replace(labels=self.source.labels(batch), some_unknown=some)


def nearest_states(clusters: Clusters, points: Tensor, group: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the states [B, T] of points [n, H], the embeddings of the tokens [B, T] in order."""
    labels = clusters.labels(points, group)
    if group is not None:
        labels = group * clusters.centroids.shape[1] + labels
    return torch.full_like(tokens, -1).masked_scatter(tokens >= 0, labels.to(tokens.device))


@dataclass
class EmbeddedText:
    """Points to cluster: the embedding of every token that `texts` yields, of shape [B, T], and its word's block.

    `texts` is called once per pass. Up to `max_bytes` of embeddings are kept between passes, in bfloat16, on the
    teacher's device; the teacher recomputes the others.
    """

    texts: Callable[[], Iterable[Tensor]]
    embed: Embed
    block_of_word: Tensor | None = None
    max_bytes: int = 0
    _kept: dict[int, Piece] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def __iter__(self) -> Iterator[Piece]:
        for number, tokens in enumerate(self.texts()):
            yield self._kept[number] if number in self._kept else self._piece(number, tokens)

    def kept_labels(self, clusters: Clusters) -> Iterator[Tensor]:
        """Yield the labels [B, T] of the texts, in order, as long as their embeddings are kept."""
        for number, tokens in enumerate(self.texts()):
            if number not in self._kept:
                return
            points, group = self._kept[number]
            yield nearest_states(clusters.to(points.device), points, group, tokens)

    def _piece(self, number: int, tokens: Tensor) -> Piece:
        embeddings = self.embed(tokens)
        known = (tokens >= 0).to(embeddings.device)
        # Rounded whether kept or not, so that the available memory changes nothing.
        points, group = embeddings[known].to(torch.bfloat16), None
        if self.block_of_word is not None:
            words = tokens.to(embeddings.device)[known]
            group = self.block_of_word.to(embeddings.device).index_select(0, words)
        size = points.numel() * points.element_size()
        if self._bytes + size <= self.max_bytes:
            self._kept[number], self._bytes = Piece(points, group), self._bytes + size
        return Piece(points, group)


def hmm_from_labels(
    labeled: Iterable[tuple[Tensor, Tensor]],
    states: int,
    vocab_size: int,
    pseudocount: float,
    eos_id: int | None = None,
) -> HMM:
    """Return the HMM that maximizes P(O, S) over tokens and labels [B, T] each, `pseudocount` added to every count.

    Every row is a sequence; or, with `eos_id`, a piece of a text in which the chain starts again after that token. Of
    several processes, each counts its own share.
    """
    if pseudocount <= 0:
        raise InputError(f"pseudocount is {pseudocount}: it must be above 0, or unseen words would be impossible")
    shapes = ((states,), (states, states), (states, vocab_size))
    counts = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for tokens, labels in labeled:
        counts = [count.to(labels.device) for count in counts]
        tokens, known = tokens.to(labels.device), labels >= 0
        first = torch.zeros_like(known)
        if eos_id is None:
            first[:, 0] = True
        else:
            first[:, 1:] = tokens[:, :-1] == eos_id
        pair = known[:, 1:] & known[:, :-1] & ~first[:, 1:]
        cells = (
            labels[first & known],
            (labels[:, :-1] * states + labels[:, 1:])[pair],
            (labels * vocab_size + tokens)[known & (tokens >= 0)],
        )
        for count, cell in zip(counts, cells, strict=True):
            count.view(-1).index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))
    world().gather(None)  # until all have counted
    world().sum_(counts)
    if not counts[2].any():
        raise InputError("there is no text to count labels in")
    start, transition, emission = (
        ((count + pseudocount) / (count + pseudocount).sum(-1, keepdim=True)).log().float() for count in counts
    )
    return HMM(start, transition, emission)
