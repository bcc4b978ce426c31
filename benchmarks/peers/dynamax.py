"""dynamax's CategoricalHMM, compiled and mapped over the sequences; its "EM step" here is the E step alone."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dynamax.hidden_markov_model import CategoricalHMM
from jax import Array

from benchmarks.peers import Task, Tasks
from benchmarks.problem import VOCABULARY, Problem

VERSION = f"{version('dynamax')} (jax {version('jax')})"
DTYPE = "float32"


def compiled(function: Any, parameters: Any, tokens: Array, result: Callable[[Any], np.ndarray]) -> Task:
    """Compile `function(parameters, tokens)` and return it as a task."""
    ready = jax.jit(function).lower(parameters, tokens).compile()
    return Task(lambda: jax.block_until_ready(ready(parameters, tokens)), result)


def normalised(counts: Array) -> np.ndarray:
    return np.asarray(counts / counts.sum(1, keepdims=True))


def tasks(problem: Problem) -> Tasks:
    """Return the operations of CategoricalHMM as compiled tasks."""
    model = CategoricalHMM(problem.start.shape[0], 1, VOCABULARY)
    logs = tuple(jnp.log(jnp.asarray(p, jnp.float32)) for p in (problem.start, problem.transition, problem.emission))
    template, _ = model.initialize(
        initial_probs=jnp.exp(logs[0]), transition_matrix=jnp.exp(logs[1]), emission_probs=jnp.exp(logs[2])[:, None]
    )
    tokens = jnp.asarray(problem.tokens, jnp.int32)[..., None]  # [B, T, 1]

    def log_likelihoods(params: Any, tokens: Array) -> Array:
        return jax.vmap(lambda sequence: model.marginal_log_prob(params, sequence))(tokens)

    def total(logs: tuple[Array, Array, Array], tokens: Array) -> Array:
        params = template._replace(
            initial=template.initial._replace(probs=jnp.exp(logs[0])),
            transitions=template.transitions._replace(transition_matrix=jnp.exp(logs[1])),
            emissions=template.emissions._replace(probs=jnp.exp(logs[2])[:, None]),
        )
        return log_likelihoods(params, tokens).sum()

    def viterbi(params: Any, tokens: Array) -> Array:
        return jax.vmap(lambda sequence: model.most_likely_states(params, sequence))(tokens)

    def e_step(params: Any, tokens: Array) -> Any:
        statistics, log_likelihood = jax.vmap(lambda sequence: model.e_step(params, sequence))(tokens)
        # The M step would sum these first; summing here lets the compiler avoid one copy per sequence.
        return jax.tree.map(lambda values: values.sum(0), statistics), log_likelihood.sum()

    return {
        "forward": lambda: compiled(log_likelihoods, template, tokens, np.asarray),
        "gradient": lambda: compiled(jax.grad(total), logs, tokens, lambda out: np.asarray(out[1])),
        "viterbi": lambda: compiled(viterbi, template, tokens, np.asarray),
        "em": lambda: compiled(e_step, template, tokens, lambda out: normalised(out[0][1])),
    }
