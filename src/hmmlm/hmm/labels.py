"""What is known about states: an HMM and tokens that have only the paths which labels allow.

A word beside a label is a word of its own, which the allowed states alone emit. So every query is exact given labels,
by the same recursions; no row of the emission sums to one then, which no query asks for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmmlm.checks import ArrayLike, as_tensor, padded
from hmmlm.emissions import Blocked, Categorical, Emission, UnionEmission
from hmmlm.errors import InputError
from hmmlm.numerics.support import BlockSupport
from hmmlm.ops.common import NEG_INF
from hmmlm.scan.composition import AnyHMM, with_parts


class Labels(NamedTuple):
    """What is known of the states at n places."""

    state: Tensor | None  # [n]; −1: nothing is known
    allowed: Tensor | None  # [n, Z] bool, in place of a state

    def over(self, first: int, num_states: int, blocks: Tensor | None = None) -> Tensor:
        """Return which of `num_states` states from `first` on, or of those of each row's block, are allowed [n, K]."""
        names = torch.arange(num_states, device=self.device)[None] + first
        if blocks is not None:
            names = names + blocks[:, None] * num_states
        if self.state is not None:
            return (self.state[:, None] == names) | (self.state[:, None] < 0)
        assert self.allowed is not None
        return self.allowed.gather(1, names.expand(len(self.allowed), -1))

    @property
    def device(self) -> torch.device:
        known = self.allowed if self.state is None else self.state
        assert known is not None
        return known.device


class Labelled(NamedTuple):
    """A batch with labels, as one without."""

    hmm: Any
    """The model, of the same states, whose words are pairs of a word and a label."""
    tokens: Tensor  # [B, T] the number of each pair; −1 where nothing is known
    words: Tensor  # [P] the word of each pair; −1: missing


def with_labels(hmm: AnyHMM, tokens: Tensor, lengths: Tensor | None, labels: ArrayLike) -> Labelled:
    """Return the model and the tokens [B, T] that have only the paths which labels allow, differentiable.

    Args:
        labels: [B, T] the state of each token (−1: unknown), or [B, T, Z] bool, which states it may have.
    """
    inside = torch.ones_like(tokens, dtype=torch.bool)
    if lengths is not None:
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    given = check_labels(labels, inside, hmm.num_states)
    if given.state is not None:
        places = inside.masked_scatter(inside, (tokens[inside] >= 0) | (given.state >= 0))
        keys = (tokens[places] + 1) * (hmm.num_states + 1) + given.state[places[inside]] + 1
        keys, pair = keys.unique(return_inverse=True)
        words, given = keys // (hmm.num_states + 1) - 1, Labels(keys % (hmm.num_states + 1) - 1, None)
    else:
        places, words = inside, tokens[inside]
        pair = torch.arange(len(words), device=words.device)
    if not len(words):
        return Labelled(hmm, tokens, torch.arange(hmm.vocab_size, device=words.device))
    emission = _pair(hmm.emission, words, given, 0)
    pairs = torch.full_like(tokens, -1).masked_scatter(places, pair)
    return Labelled(with_parts(hmm, hmm.log_start, hmm.transition, emission), pairs, words)


def check_labels(labels: ArrayLike, inside: Tensor, num_states: int) -> Labels:
    """Return the labels of the tokens inside their sequences, where `inside` [B, T] is True."""
    given = _as_tensor(labels).to(inside.device)
    shape = inside.shape if given.dtype != torch.bool else (*inside.shape, num_states)
    if given.shape != shape or given.is_floating_point() or given.is_complex():
        raise InputError(
            f"labels must be integers {list(inside.shape)}, a state for each token (−1: unknown), or booleans "
            f"{[*inside.shape, num_states]}, whether it may have a state; not {given.dtype} {list(given.shape)}"
        )
    if given.dtype == torch.bool:
        wrong = inside & ~given.any(2)
        if bool(wrong.any()):
            raise InputError("labels allow no state in sequence {} at position {}".format(*wrong.nonzero()[0].tolist()))
        return Labels(None, given[inside])
    wrong = inside & ((given < -1) | (given >= num_states))
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        raise InputError(
            f"label {int(given[row, position])} in sequence {row} at position {position} is no state: "
            f"there are 0 to {num_states - 1}, and −1 for an unknown one"
        )
    return Labels(given[inside].long(), None)


def _as_tensor(labels: ArrayLike) -> Tensor:
    """Return labels as a tensor; lists may have different lengths."""
    if isinstance(labels, list | tuple) and len({len(row) for row in labels if hasattr(row, "__len__")}) > 1:
        labels = padded(labels)[0]
    return as_tensor(labels, "labels")


def labels_as_rows(labels: ArrayLike, tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Return labels with a row for each sequence of tokens [B, T]; with lengths [B], those of one after another."""
    given = _as_tensor(labels)
    if lengths is None or given.shape[:2] == tokens.shape:
        return given
    inside = torch.arange(tokens.shape[1]) < lengths[:, None].cpu()
    if len(given) != int(inside.sum()):
        raise InputError(f"{len(given)} labels for {int(inside.sum())} tokens: give one for each")
    rows = given.new_full((*inside.shape, *given.shape[1:]), True if given.dtype == torch.bool else -1)
    rows[inside] = given
    return rows


def _pair(emission: Emission, words: Tensor, labels: Labels, first: int) -> Emission:
    """Return the emission of words [P] beside their labels, for states that are numbered from `first` on."""
    if isinstance(emission, UnionEmission):
        starts = torch.tensor([0, *emission.sizes]).cumsum(0).tolist()
        return UnionEmission(
            [_pair(part, words, labels, first + start) for part, start in zip(emission.parts, starts, strict=False)]
        )
    if isinstance(emission, Blocked) and not bool((words < 0).any()):
        blocks = emission.block_of_word[words]
        allowed = labels.over(first, emission.width, blocks)
        return Blocked(emission.log_probs[words].masked_fill(~allowed, NEG_INF), blocks, emission.num_blocks)
    known = (words >= 0)[:, None]
    scores = torch.where(known, emission.dense().t()[words.clamp(min=0)], 0.0)
    return Categorical(scores.masked_fill(~labels.over(first, emission.num_states), NEG_INF).t())


def counts_of_words(emission: Emission, words: Tensor, counts: Any) -> Any:
    """Return the expected counts of an emission, from those of its words beside labels."""
    if isinstance(emission, UnionEmission):
        own = counts if isinstance(counts, tuple) else counts.split(emission.sizes)
        found = tuple(counts_of_words(part, words, each) for part, each in zip(emission.parts, own, strict=True))
        return found if not all(isinstance(part, Categorical) for part in emission.parts) else torch.cat(found)
    known = words >= 0
    if isinstance(emission, Blocked):
        if not bool(known.all()):  # then `_pair` made a matrix [Z, P]
            support = BlockSupport(emission.block_of_word[words.clamp(min=0)], emission.width)
            counts = support.restrict(counts.t())
        return torch.zeros_like(emission.log_probs).index_add_(0, words[known], counts[known])
    return counts.new_zeros(len(counts), emission.vocab_size).index_add_(1, words[known], counts[:, known])
