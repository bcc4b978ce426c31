"""Learn the peers' own examples from one start with each system: `python -m benchmarks.learning`.

The examples: hmmlearn's casino (one sequence of 15,000 rolls of two dice), dynamax's casino (five of 5,000), and short
sequences with more states. All systems run the same iterations of Baum-Welch in one process; the best of three times
counts, and the log-likelihoods of the results are printed beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from dynamax.hidden_markov_model import CategoricalHMM as DynamaxHMM
from hmmlearn.hmm import CategoricalHMM
from pomegranate.distributions import Categorical
from pomegranate.hmm import DenseHMM

from hmmlm import HMM

EXAMPLES = {  # states, sequences, tokens of each, iterations
    "casino of hmmlearn": (2, 1, 15_000, 100),
    "casino of dynamax": (2, 5, 5_000, 100),
    "10 states": (10, 1, 15_000, 20),
    "short sequences": (4, 300, 30, 50),
}
CASINO = ([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]], [[1 / 6] * 6, [0.1] * 5 + [0.5]])
ROUNDS = 3


def systems(states: int, tokens: torch.Tensor, iterations: int) -> dict[str, Callable[[], float]]:
    """Return functions by system that learn from the same start and return the log-likelihood of the result."""
    chance = np.random.default_rng(0)
    start = [chance.dirichlet(np.ones(n), size) for n, size in ((states, None), (states, states), (6, states))]
    column, lengths = tokens.reshape(-1, 1).numpy(), [tokens.shape[1]] * len(tokens)

    def ours() -> float:
        return HMM.from_probs(*start).fit(tokens, iterations=iterations, tolerance=0).score(tokens)

    def theirs(implementation: str) -> float:
        tol = -np.inf
        model = CategoricalHMM(states, n_iter=iterations, tol=tol, init_params="", implementation=implementation)
        model.startprob_, model.transmat_, model.emissionprob_ = (table.copy() for table in start)
        return float(model.fit(column, lengths).score(column, lengths))

    def pomegranate() -> float:
        ends, tables = torch.ones(states), [torch.from_numpy(table).float() for table in start]
        model = DenseHMM([Categorical(row[None]) for row in tables[2]], tables[1], tables[0], ends)
        for _ in range(iterations):
            model.summarize(tokens[..., None])
            model.from_summaries()
        return float(model.log_probability(tokens[..., None]).sum())

    def dynamax() -> float:
        model = DynamaxHMM(states, 1, 6, 1.0, 1.0, 0.0, 1.0)  # without priors
        probs = dict(zip(("initial_probs", "transition_matrix", "emission_probs"), start, strict=True))
        params, props = model.initialize(**probs | {"emission_probs": probs["emission_probs"][:, None]})
        found = model.fit_em(params, props, tokens[..., None].numpy(), num_iters=iterations, verbose=False)
        return float(found[1][-1])  # before the last iteration

    return {
        "hmmlm": ours,
        "hmmlearn (its default, log)": lambda: theirs("log"),
        "hmmlearn (scaling)": lambda: theirs("scaling"),
        "dynamax": dynamax,
        "pomegranate": pomegranate,
    }


def main() -> None:
    """Print a table."""
    logging.getLogger("hmmlearn").setLevel(logging.ERROR)
    print("| example | system | seconds | log-likelihood |\n|---|---|---|---|")
    for name, (states, sequences, length, iterations) in EXAMPLES.items():
        tokens = HMM.from_probs(*CASINO).sample(sequences, length, seed=0)[0]
        learn = systems(states, tokens, iterations)
        times: dict[str, list[float]] = {system: [] for system in learn}
        for _ in range(ROUNDS):
            for system, run in learn.items():
                begin = time.perf_counter()
                found = run()
                times[system].append(time.perf_counter() - begin)
                if len(times[system]) == ROUNDS:
                    print(f"| {name} | {system} | {min(times[system]):.3f} | {found:.4f} |", flush=True)


if __name__ == "__main__":
    main()
