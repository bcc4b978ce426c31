"""The problem that every system solves: a random HMM and a batch of tokens, with reference answers in NumPy."""

from typing import NamedTuple

import numpy as np

SEQUENCES, LENGTH, VOCABULARY = 64, 64, 10_000
OPERATIONS = ("forward", "gradient", "viterbi", "em")
# Most systems compute in float32; their error over 64 steps is well below this.
TOLERANCE = 1e-4


class Problem(NamedTuple):
    """An HMM as probabilities, and a batch of tokens."""

    start: np.ndarray  # [Z] probabilities, float64
    transition: np.ndarray  # [Z, Z]
    emission: np.ndarray  # [Z, V]
    tokens: np.ndarray  # [B, T] int64


class Answers(NamedTuple):
    """Reference answers for a problem."""

    log_likelihood: np.ndarray  # [B]
    counts: np.ndarray  # [Z, Z] expected transition counts: the gradient with respect to the log-probabilities
    best: np.ndarray  # [B] log-probability of the best path


def softmax(logits: np.ndarray) -> np.ndarray:
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    return probs / probs.sum(-1, keepdims=True)


def make(states: int) -> Problem:
    """Return a random problem: logits of unit variance around Zipfian frequencies, tokens with these frequencies."""
    rng = np.random.default_rng(states)
    unigram = 1.0 / np.arange(1, VOCABULARY + 1)
    return Problem(
        softmax(rng.standard_normal(states)),
        softmax(rng.standard_normal((states, states))),
        softmax(rng.standard_normal((states, VOCABULARY)) + np.log(unigram)),
        rng.choice(VOCABULARY, (SEQUENCES, LENGTH), p=unigram / unigram.sum()),
    )


def solve(problem: Problem) -> Answers:
    """Compute the reference answers with scaled recursions in float64 (best paths: `best_scores`)."""
    start, transition, emission, tokens = problem
    seen = emission.T[tokens]  # [B, T, Z]
    alpha, scale = np.empty_like(seen), np.empty(tokens.shape)
    predicted = np.broadcast_to(start, seen[:, 0].shape)
    for t in range(tokens.shape[1]):
        alpha[:, t] = predicted * seen[:, t]
        scale[:, t] = alpha[:, t].sum(1)
        alpha[:, t] /= scale[:, t, None]
        predicted = alpha[:, t] @ transition
    counts, beta = np.zeros_like(transition), np.ones_like(seen[:, 0])
    for t in range(tokens.shape[1] - 1, 0, -1):
        weight = seen[:, t] * beta / scale[:, t, None]
        counts += alpha[:, t - 1].T @ weight
        beta = weight @ transition.T
    return Answers(np.log(scale).sum(1), counts * transition, best_scores(problem))


def best_scores(problem: Problem) -> np.ndarray:
    """Compute max over paths of log p(path, tokens) [B], one sequence at a time so that [Z, Z] sums stay in cache."""
    into = np.log(problem.transition).T.astype(np.float32)
    scores = np.log(problem.emission.T[problem.tokens]).astype(np.float32)
    best = []
    for sequence in scores:
        score = np.log(problem.start) + sequence[0]
        for here in sequence[1:]:
            score = (into + (score - score.max()).astype(np.float32)).max(1) + score.max() + here
        best.append(score.max())
    return np.array(best)


def path_scores(problem: Problem, paths: np.ndarray) -> np.ndarray:
    """Compute log p(path, tokens) [B] of paths [B, T]."""
    score = np.log(problem.start)[paths[:, 0]] + np.log(problem.emission[paths, problem.tokens]).sum(1)
    return score + np.log(problem.transition[paths[:, :-1], paths[:, 1:]]).sum(1)


def disagreement(problem: Problem, answers: Answers, operation: str, result: np.ndarray) -> float:
    """Return the largest error of a result, relative to the largest reference value.

    `result` is, by operation: log-likelihoods [B] or their sum; expected transition counts [Z, Z]; paths [B, T]; the
    new transition matrix [Z, Z].
    """
    if operation == "forward":
        got, wanted = result, answers.log_likelihood if result.ndim else answers.log_likelihood.sum()
    elif operation == "gradient":
        got, wanted = result, answers.counts
    elif operation == "viterbi":  # different paths may tie, so compare their scores
        got, wanted = path_scores(problem, result), answers.best
    else:
        got, wanted = result, answers.counts / answers.counts.sum(1, keepdims=True)
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())
