"""Linear interpolation of language models over the same tokens, with weights chosen by EM."""

from __future__ import annotations

import numpy as np

from hmmlm.baselines.ngram import FloatArray, IntArray

_ITERATIONS = 1_000
_TOLERANCE = 1e-9  # change of the mean log-probability at which EM stops
_FEWEST = 100  # tokens of a class that has weights of its own


def fit_weights(log_probs: FloatArray) -> FloatArray:
    """Return the weights [M] that maximize the likelihood of a text, by log-probabilities of its tokens [M, N].

    EM never lowers the likelihood, and the likelihood is concave in the weights, so its limit is the maximum. Tokens
    that no model can explain have no influence.
    """
    # Only ratios at a token matter, so its largest probability is scaled to one.
    top = log_probs.max(0)
    probs = np.exp(log_probs[:, top > -np.inf] - top[top > -np.inf])
    weights = np.full(len(log_probs), 1 / len(log_probs))
    before = -np.inf
    for _ in range(_ITERATIONS if probs.size else 0):
        mixed = weights @ probs
        weights = weights * (probs / mixed).mean(1)
        mean = float(np.log(mixed).mean())
        if mean - before < _TOLERANCE:
            break
        before = mean
    return weights / weights.sum()


def fit_weights_by_class(log_probs: FloatArray, classes: IntArray, count: int) -> FloatArray:
    """Return weights [K, M] for tokens of each of `count` classes, by log-probabilities [M, N] and classes [N].

    A class of few tokens has the weights that suit all tokens.
    """
    overall = fit_weights(log_probs)
    members = [classes == k for k in range(count)]
    return np.stack([overall if own.sum() < _FEWEST else fit_weights(log_probs[:, own]) for own in members])


def mix(log_probs: FloatArray, weights: FloatArray) -> FloatArray:
    """Compute log Σ_m w_m p_m [N] from log-probabilities [M, N] and weights [M], or [M, N] for each token."""
    with np.errstate(divide="ignore"):
        joint = log_probs + np.log(weights[:, None] if weights.ndim == 1 else weights)
        top = joint.max(0)  # of the weighted terms: a term of weight zero may be larger than all others
        top = np.where(top == -np.inf, 0.0, top)
        return np.log(np.exp(joint - top).sum(0)) + top
