"""dynamax's inference functions, with emission scores looked up by token instead of computed by CategoricalHMM.

CategoricalHMM evaluates a distribution over the whole vocabulary for each token and state. Calling the underlying
functions avoids that, so this is the harder comparison. The "EM step" is again the E step alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dynamax.hidden_markov_model import hmm_filter, hmm_posterior_mode, hmm_two_filter_smoother
from jax import Array

from benchmarks.peers import Task, Tasks, dynamax
from benchmarks.problem import VOCABULARY, Problem

VERSION = dynamax.VERSION
DTYPE = dynamax.DTYPE

Logs = tuple[Array, Array, Array]  # start [Z], transition [Z, Z], emission [Z, V]


def log_likelihoods(logs: Logs, tokens: Array) -> Array:
    start, transition = jnp.exp(logs[0]), jnp.exp(logs[1])
    return jax.vmap(lambda scores: hmm_filter(start, transition, scores).marginal_loglik)(logs[2].T[tokens])


def viterbi(logs: Logs, tokens: Array) -> Array:
    start, transition = jnp.exp(logs[0]), jnp.exp(logs[1])
    return jax.vmap(lambda scores: hmm_posterior_mode(start, transition, scores))(logs[2].T[tokens])


def e_step(logs: Logs, tokens: Array) -> tuple[Array, Array, Array, Array]:
    """Compute expected counts of start, transition and emission, and the log-likelihood, summed over sequences."""
    start, transition = jnp.exp(logs[0]), jnp.exp(logs[1])
    post: Any = jax.vmap(lambda scores: hmm_two_filter_smoother(start, transition, scores))(logs[2].T[tokens])
    states = post.smoothed_probs.reshape(-1, post.smoothed_probs.shape[-1])
    emission = jax.ops.segment_sum(states, tokens.reshape(-1), VOCABULARY)
    return post.initial_probs.sum(0), post.trans_probs.sum(0), emission, post.marginal_loglik.sum()


def tasks(problem: Problem) -> Tasks:
    """Return the operations as compiled tasks."""
    logs = tuple(jnp.log(jnp.asarray(p, jnp.float32)) for p in (problem.start, problem.transition, problem.emission))
    tokens = jnp.asarray(problem.tokens, jnp.int32)

    def compiled(function: Any, result: Any) -> Task:
        return dynamax.compiled(function, logs, tokens, result)

    gradient = jax.grad(lambda logs, tokens: log_likelihoods(logs, tokens).sum())
    return {
        "forward": lambda: compiled(log_likelihoods, np.asarray),
        "gradient": lambda: compiled(gradient, lambda out: np.asarray(out[1])),
        "viterbi": lambda: compiled(viterbi, np.asarray),
        "em": lambda: compiled(e_step, lambda out: dynamax.normalised(out[1])),
    }
