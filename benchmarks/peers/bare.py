"""Only the matrix products that the computation requires: a lower bound on its time.

Forward: a chain of T − 1 products [B, Z] × [Z, Z]. Gradient and EM: the same forward and backward, and one product
[Z, B (T − 1)] × [B (T − 1), Z] for the expected transition counts. Viterbi has no products.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers import Task, Tasks
from benchmarks.problem import Problem

VERSION = torch.__version__
DTYPE = "float32"


def products(transition: Tensor, batch: int, steps: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return functions of the products of the likelihood, and of the likelihood and its gradient."""
    states, like = transition.shape[0], {"dtype": transition.dtype, "device": transition.device}
    alpha, beta = torch.full((steps, batch, states), 1 / states, **like), torch.ones(steps, batch, states, **like)

    def forward() -> Tensor:
        for t in range(1, steps):
            torch.mm(alpha[t - 1], transition, out=alpha[t])
        return alpha

    def both() -> Tensor:
        forward()
        for t in range(steps - 1, 0, -1):
            torch.mm(beta[t], transition.t(), out=beta[t - 1])
        return alpha[:-1].view(-1, states).t() @ beta[1:].view(-1, states)

    return forward, both


def tasks(problem: Problem) -> Tasks:
    """Return the matrix products of each operation as tasks without a result."""
    forward, both = products(torch.from_numpy(problem.transition).float(), *problem.tokens.shape)
    return {
        "forward": lambda: Task(forward),
        "gradient": lambda: Task(both),
        "em": lambda: Task(both),
    }
