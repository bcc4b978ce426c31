"""A plain implementation: the recursion in log space as a loop in torch, differentiated by autograd."""

import torch
from torch import Tensor

from benchmarks.peers import Task, Tasks
from benchmarks.problem import Problem

VERSION = torch.__version__
DTYPE = "float32"


def log_likelihood(start: Tensor, transition: Tensor, emission: Tensor, tokens: Tensor) -> Tensor:
    """Compute log p(x) [B] from log-probabilities."""
    scores = emission.t()[tokens]
    joint = start + scores[:, 0]
    for t in range(1, tokens.shape[1]):
        joint = torch.logsumexp(joint[:, :, None] + transition, 1) + scores[:, t]
    return torch.logsumexp(joint, 1)


def viterbi(start: Tensor, transition: Tensor, emission: Tensor, tokens: Tensor) -> Tensor:
    """Compute the best paths [B, T] from log-probabilities."""
    scores = emission.t()[tokens]
    best, pointers = start + scores[:, 0], []
    for t in range(1, tokens.shape[1]):
        moved, origin = (best[:, :, None] + transition).max(1)
        best = moved + scores[:, t]
        pointers.append(origin)
    path = [best.argmax(1)]
    for origin in reversed(pointers):
        path.append(origin.gather(1, path[-1][:, None]).squeeze(1))
    return torch.stack(path[::-1], 1)


def tasks(problem: Problem) -> Tasks:
    """Return the operations as tasks; EM normalizes the expected counts that autograd returns."""
    tokens = torch.from_numpy(problem.tokens)
    start, transition, emission = (
        torch.from_numpy(p).log().float() for p in (problem.start, problem.transition, problem.emission)
    )
    leaves = start.clone().requires_grad_(), transition.clone().requires_grad_(), emission.clone().requires_grad_()

    def counts() -> tuple[Tensor, ...]:
        return torch.autograd.grad(log_likelihood(*leaves, tokens).sum(), leaves)

    def em() -> list[Tensor]:
        return [(count / count.sum(-1, keepdim=True)).log() for count in counts()]

    return {
        "forward": lambda: Task(lambda: log_likelihood(start, transition, emission, tokens), lambda out: out.numpy()),
        "gradient": lambda: Task(counts, lambda out: out[1].numpy()),
        "viterbi": lambda: Task(lambda: viterbi(start, transition, emission, tokens), lambda out: out.numpy()),
        "em": lambda: Task(em, lambda out: out[1].exp().numpy()),
    }
