"""hmmlm."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hmmlm
from benchmarks.peers import Task, Tasks
from benchmarks.problem import Problem
from hmmlm.learning.optimizers import maximize
from hmmlm.scan.composition import matrices

VERSION = hmmlm.__version__
DTYPE = "float32"


def compiled(run: Callable[[], Any], result: Callable[[Any], np.ndarray]) -> Task:
    """Return a task whose loops are compiled: as for dynamax, compilation is not timed."""
    run()
    return Task(run, result)


def tasks(problem: Problem) -> Tasks:
    """Return the operations of `hmmlm.HMM` as tasks."""
    tokens = torch.from_numpy(problem.tokens)
    logs = [torch.from_numpy(p).log().float() for p in (problem.start, problem.transition, problem.emission)]
    fixed = hmmlm.HMM(*logs)
    leaves = [log.clone().requires_grad_() for log in logs]
    learned = hmmlm.HMM(*leaves)

    def gradient() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        learned.log_likelihood(tokens).sum().backward()
        assert leaves[1].grad is not None
        return leaves[1].grad

    def em() -> hmmlm.HMM:
        found = matrices(fixed)
        assert found is not None
        tables = dict(zip(("start", "transition", "emission"), found, strict=True))
        return hmmlm.HMM(*maximize(fixed.expected_counts(tokens)._asdict(), tables).values())

    return {
        "forward": lambda: compiled(lambda: fixed.log_likelihood(tokens), lambda out: out.numpy()),
        "gradient": lambda: compiled(gradient, lambda out: out.numpy()),
        "viterbi": lambda: compiled(lambda: fixed.viterbi(tokens), lambda out: out[0].numpy()),
        "em": lambda: compiled(em, lambda new: new.transition.dense().exp().numpy()),
    }
