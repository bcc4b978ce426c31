"""hmmlearn with its faster recursion, which is not the default; Viterbi does not use it."""

from benchmarks.peers import Tasks, hmmlearn
from benchmarks.problem import Problem

VERSION = hmmlearn.VERSION
DTYPE = hmmlearn.DTYPE


def tasks(problem: Problem) -> Tasks:
    offered = hmmlearn.tasks(problem, "scaling")
    del offered["viterbi"]
    return offered
