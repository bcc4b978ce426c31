"""pomegranate's DenseHMM over Categorical distributions, which does not provide gradients."""

from importlib.metadata import version

import numpy as np
import torch
from pomegranate.distributions import Categorical
from pomegranate.hmm import DenseHMM

from benchmarks.peers import Task, Tasks
from benchmarks.problem import Problem

VERSION = f"{version('pomegranate')} (torch {torch.__version__})"
DTYPE = "float32"


def tasks(problem: Problem) -> Tasks:
    """Return the operations of DenseHMM as tasks."""
    start, transition, emission = (
        torch.from_numpy(p).float() for p in (problem.start, problem.transition, problem.emission)
    )
    # Every state ends with probability 1, so that ending costs nothing, as in the other systems.
    model = DenseHMM([Categorical(row[None]) for row in emission], transition, start, torch.ones_like(start))
    tokens = torch.from_numpy(problem.tokens)[..., None]

    def em() -> DenseHMM:
        model.summarize(tokens)
        model.from_summaries()
        return model

    def new_transition(fitted: DenseHMM) -> np.ndarray:
        moves = fitted.edges.exp().numpy()  # rows sum to less than one: the rest is the end
        return moves / moves.sum(1, keepdims=True)

    return {
        "forward": lambda: Task(lambda: model.log_probability(tokens), lambda out: out.numpy()),
        "viterbi": lambda: Task(lambda: model.viterbi(tokens), lambda out: out.numpy()),
        "em": lambda: Task(em, new_transition),
    }
