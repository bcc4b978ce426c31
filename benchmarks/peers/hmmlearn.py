"""hmmlearn's CategoricalHMM with its defaults: log space, one sequence after another."""

import logging
from importlib.metadata import version

import numpy as np
from hmmlearn.hmm import CategoricalHMM

from benchmarks.peers import Task, Tasks
from benchmarks.problem import VOCABULARY, Problem

VERSION = version("hmmlearn")
DTYPE = "float64"
logging.getLogger("hmmlearn").setLevel(logging.ERROR)  # every fit warns about more parameters than tokens


def tasks(problem: Problem, implementation: str = "log") -> Tasks:
    """Return the operations as tasks; hmmlearn offers no gradient."""
    model = CategoricalHMM(problem.start.shape[0], init_params="", n_iter=1, implementation=implementation)
    model.n_features = VOCABULARY
    column, lengths = problem.tokens.reshape(-1, 1), [problem.tokens.shape[1]] * problem.tokens.shape[0]

    def reset() -> None:
        model.startprob_, model.transmat_, model.emissionprob_ = problem.start, problem.transition, problem.emission

    def em() -> CategoricalHMM:
        reset()  # assigns references only: `fit` replaces the arrays
        return model.fit(column, lengths)

    reset()
    return {
        "forward": lambda: Task(lambda: model.score(column, lengths), np.asarray),
        "viterbi": lambda: Task(
            lambda: model.decode(column, lengths), lambda out: out[1].reshape(problem.tokens.shape)
        ),
        "em": lambda: Task(em, lambda fitted: fitted.transmat_),
    }
