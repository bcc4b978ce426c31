"""Latent variable distillation: clusters of a teacher's embeddings as labels, and learning from P(O, S) with them.

A label is a state. In a blocked model, embeddings are clustered inside the block of their word, so that a label is one
of the states that may emit the word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, AnyHMM, BlockedHMM
from hmmlm.initialization.clustering import Clusters, Piece

Embed = Callable[[Tensor], Tensor]
"""Student tokens [B, T] (−1 beyond a row's length) → the teacher's embeddings of them [B, T, H]."""


@dataclass
class EmbeddedText:
    """Pieces to cluster: the embeddings of every token that `texts` yields, of shape [B, T], and its word's block.

    `texts` is called once a pass. Up to `hold` bytes of embeddings are kept between passes, in bfloat16, where the
    teacher put them; those beyond are asked of the teacher again.
    """

    texts: Callable[[], Iterable[Tensor]]
    embed: Embed
    block_of_word: Tensor | None = None
    hold: int = 0
    _held: dict[int, Piece] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def __iter__(self) -> Iterator[Piece]:
        for number, tokens in enumerate(self.texts()):
            yield self._held[number] if number in self._held else self._piece(number, tokens)

    def held_labels(self, clusters: Clusters) -> Iterator[Tensor]:
        """Labels [B, T] of the texts, in order, as long as their embeddings are held: as a `Labeller` gives them."""
        for number, tokens in enumerate(self.texts()):
            if number not in self._held:
                return
            points, group = self._held[number]
            yield _placed(clusters.to(points.device), points, group, tokens)

    def _piece(self, number: int, tokens: Tensor) -> Piece:
        embeddings = self.embed(tokens)
        there = (tokens >= 0).to(embeddings.device)
        # rounded whether held or not, so that what fits in memory changes nothing
        points, group = embeddings[there].to(torch.bfloat16), None
        if self.block_of_word is not None:
            words = tokens.to(embeddings.device)[there]
            group = self.block_of_word.to(embeddings.device).index_select(0, words)
        size = points.numel() * points.element_size()
        if self._bytes + size <= self.hold:
            self._held[number], self._bytes = Piece(points, group), self._bytes + size
        return Piece(points, group)


@dataclass(frozen=True)
class Labeller:
    """Tokens [B, T] → the state [B, T] of each by its nearest centroid; −1 where there is no token."""

    embed: Embed
    clusters: Clusters
    block_of_word: Tensor | None = None
    """[V]; None where states are not in blocks."""

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        there = tokens >= 0
        embeddings = self.embed(tokens)[there.to(self.clusters.mean.device)]
        words = tokens[there].to(self.clusters.mean.device)
        group = None if self.block_of_word is None else self.block_of_word.to(words.device).index_select(0, words)
        # rounded as the points that were clustered
        return _placed(self.clusters, embeddings.to(torch.bfloat16), group, tokens)


def _placed(clusters: Clusters, points: Tensor, group: Tensor | None, tokens: Tensor) -> Tensor:
    """The states [B, T] of points [n, H] that are the embeddings of the tokens [B, T] in order."""
    labels = clusters.labels(points, group)
    if group is not None:
        labels = group * clusters.centroids.shape[1] + labels
    return torch.full_like(tokens, -1).masked_scatter(tokens >= 0, labels.to(tokens.device))


def joint_log_likelihood(
    hmm: AnyHMM, tokens: Tensor, states: Tensor, restart: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """log P(O, S) = log π(s_1) + Σ log A(s_t−1, s_t) + Σ log O(s_t, o_t) [B] for tokens and states [B, T].

    Positions with state −1 (beyond a sequence's end) add nothing. `restart` [B, T]: where the chain starts again from
    π. `before` [B]: the states that the sequences come from; None where they begin.
    """
    known, to = states >= 0, states.clamp(min=0)
    first = torch.zeros_like(states, dtype=torch.bool) if restart is None else restart.clone()
    first[:, 0] |= before is None
    origin = torch.cat([to[:, :1] if before is None else before[:, None], to[:, :-1]], 1)
    origins, targets, words = origin.flatten(), to.flatten(), tokens.clamp(min=0).flatten()
    if isinstance(hmm, BlockedHMM):
        parts, k = hmm.factors, hmm.factors.states_per_block
        u, w = parts.u.index_select(0, origins), parts.w.index_select(0, targets)
        moved = (u * w).sum(1) - parts.log_normalizer.index_select(0, origins)
        emitted = parts.log_emission.flatten().index_select(0, words * k + targets % k)
        started = parts.log_start.index_select(0, targets)
    else:
        moved = hmm.log_transition.flatten().index_select(0, origins * hmm.states + targets)
        emitted = hmm.log_emission.flatten().index_select(0, targets * hmm.vocab_size + words)
        started = hmm.log_start.index_select(0, targets)
    entered = torch.where(first.flatten(), started, moved).view_as(states)
    emitted = emitted.view_as(states).masked_fill(tokens < 0, 0.0)
    return (entered + emitted).masked_fill(~known, 0.0).sum(1)


def hmm_from_labels(
    labelled: Iterable[tuple[Tensor, Tensor]], states: int, vocab_size: int, pseudocount: float,
    eos_id: int | None = None,
) -> HMM:  # fmt: skip
    """The HMM that maximises P(O, S) over tokens and labels [B, T] each, `pseudocount` added to every count.

    Every row is a sequence; or, with `eos_id`, a piece of a text in which the chain starts again after that token.
    """
    if pseudocount <= 0:
        raise InputError(f"pseudocount is {pseudocount}: it must be above 0, or unseen words would be impossible")
    counts: list[Tensor] | None = None
    for tokens, labels in labelled:
        if counts is None:
            shapes = ((states,), (states, states), (states, vocab_size))
            counts = [torch.zeros(shape, dtype=torch.float64, device=labels.device) for shape in shapes]
        tokens, known = tokens.to(labels.device), labels >= 0
        first = torch.zeros_like(known)
        if eos_id is None:
            first[:, 0] = True
        else:
            first[:, 1:] = tokens[:, :-1] == eos_id
        pair = known[:, 1:] & known[:, :-1] & ~first[:, 1:]
        places = (
            labels[first & known], (labels[:, :-1] * states + labels[:, 1:])[pair],
            (labels * vocab_size + tokens)[known & (tokens >= 0)],
        )  # fmt: skip
        for count, place in zip(counts, places, strict=True):
            count.view(-1).index_add_(0, place, torch.ones_like(place, dtype=torch.float64))
    if counts is None:
        raise InputError("no text to count labels in")
    start, transition, emission = (
        ((count + pseudocount) / (count + pseudocount).sum(-1, keepdim=True)).log().float() for count in counts
    )
    return HMM(start, transition, emission)


def write_labels(
    path: Path, tokens: TokenFile, label: Callable[[Tensor], Tensor], states: int, rows: int, length: int
) -> TokenFile:
    """Labels of a whole token file, in a file of the same shape: read in the same batches, they stay beside its tokens.

    The text is shown to the teacher in chunks of `length`, `rows` at a time.
    """
    size = rows * length

    def documents() -> Iterator[Tensor]:
        offsets = torch.from_numpy(tokens.documents.astype("int64"))
        held, begin = torch.empty(0, dtype=torch.long), 0  # labels from position `begin` on
        done = 0
        for number in range(len(offsets) - 1):
            first, last = int(offsets[number]), int(offsets[number + 1])
            while done < last:
                ids = torch.from_numpy(tokens.tokens[done : done + size].astype("int64"))
                padded = torch.nn.functional.pad(ids, (0, -len(ids) % length), value=-1).view(-1, length)
                held = torch.cat([held[first - begin :], label(padded).flatten()[: len(ids)]])
                begin, done = first, done + len(ids)
            yield held[first - begin : last - begin]

    return write_tokens(path, (document.numpy() for document in documents()), states, tokens.fingerprint)
