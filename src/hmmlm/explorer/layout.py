"""A map of states: points in the plane, near each other if they emit similar words and go to similar states."""

from __future__ import annotations

import math
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.explorer.index import StateIndex

SHOWN = 1_500  # states on the map, those with the largest share
WIDTH = 128  # random projections of each of the two distributions of a state
PIECE = 128  # states whose rows are computed at once
NEIGHBOURS = 20.0  # the perplexity of the neighbourhoods
STEPS, EXAGGERATED, EXAGGERATION = 300, 80, 8.0


class Layout(NamedTuple):
    """The states of a map, the largest share first."""

    states: list[int]  # [N]
    points: Tensor  # [N, 2] in [0, 1]²


@torch.no_grad()
def lay_out(index: StateIndex, stopped: Event) -> Layout:
    """Return the map of the SHOWN states with the largest share, or any map once it is `stopped`.

    The same model gives the same map.
    """
    states = index.order[:SHOWN]
    points = embed(features(index, states), stopped).cpu()
    low, high = points.amin(0), points.amax(0)
    return Layout(states.tolist(), (points - low) / (high - low).clamp_min(1e-9))


def features(index: StateIndex, states: Tensor) -> Tensor:
    """Return a vector [N, 2·WIDTH] per state: √p(word | state) and √p(next state | state), projected at random.

    Distances of square roots are Hellinger distances, and projections preserve them approximately.
    """
    hmm, generator = index.hmm, torch.Generator().manual_seed(0)
    by_word, by_state = (
        (torch.randn(size, WIDTH, generator=generator) / WIDTH**0.5).to(hmm.device, hmm.dtype)
        for size in (hmm.vocab_size, hmm.num_states)
    )
    found = []
    for piece in states.split(PIECE):
        words, log_probs = hmm.emission.log_rows(piece)
        emission = torch.zeros(len(piece), hmm.vocab_size, dtype=hmm.dtype, device=hmm.device)
        emission.scatter_add_(1, words.clamp(min=0), log_probs.mul(0.5).exp())  # padding has probability zero
        found.append(torch.cat([emission @ by_word, index.transitions(piece).mul(0.5).exp() @ by_state], 1))
    return torch.cat(found).float()


def embed(vectors: Tensor, stopped: Event) -> Tensor:
    """Return points [N, 2] whose neighbourhoods are like those of vectors [N, D]: t-SNE from principal components."""
    centred = vectors - vectors.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    points = centred @ directions[:, -2:]
    points = 1e-2 * points / points.square().mean(0).sqrt().clamp_min(1e-9)
    if len(vectors) < 8:  # too few to have neighbourhoods
        return points
    affinity = _affinities(torch.cdist(vectors, vectors).square(), min(NEIGHBOURS, len(vectors) / 4))
    # The usual schedule: neighbours attract more at first, so that clusters form before they are pushed apart.
    velocity, gains = torch.zeros_like(points), torch.ones_like(points)
    rate = max(50.0, len(points) / EXAGGERATION / 4)
    for step in range(STEPS):
        if stopped.is_set():
            break
        early = step < EXAGGERATED
        size = points.square().sum(1)
        # In place: the time of a step is that of reading and writing [N, N].
        kernel = torch.addmm(size + 1, points, points.T, alpha=-2).add_(size[:, None]).reciprocal_()
        kernel.fill_diagonal_(0)
        force = (kernel * (-1 / kernel.sum())).add_(affinity, alpha=EXAGGERATION if early else 1.0).mul_(kernel)
        gradient = 4 * (force.sum(1, keepdim=True) * points - force @ points)
        same = gradient.sign() == velocity.sign()
        gains = torch.where(same, gains * 0.8, gains + 0.2).clamp_min(0.01)
        velocity = (0.5 if early else 0.8) * velocity - rate * gains * gradient
        points = points + velocity
        points = points - points.mean(0)
    return points


def _affinities(squared: Tensor, perplexity: float) -> Tensor:
    """Return symmetric probabilities [N, N] of pairs: Gaussian neighbourhoods, each of the given perplexity."""
    count = len(squared)
    away = squared.clone().fill_diagonal_(torch.inf)
    away = away - away.amin(1, keepdim=True)  # the nearest has weight one, so that no row vanishes
    low, high = torch.full((count, 1), 1e-6), torch.full((count, 1), 1e6)
    low, high = low.to(squared), high.to(squared)
    for _ in range(50):  # bisection of the precision, on a logarithmic scale
        middle = (low * high).sqrt()
        probs = (-away * middle).softmax(1)
        wide = -torch.xlogy(probs, probs).sum(1, keepdim=True) > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return (probs + probs.T) / (2 * count)
