"""Grow the very large HMM: train it with few states, split each in two, train on, and so forth.

    python -m papers.growth --seed 0        # a minute on a GPU; adds a row to results/growth.json

The copies of a state share its probabilities and differ by noise, so a model predicts as before it was split. States
are not merged: blocks have equally many. Every stage has the whole schedule of the recipe.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hmmlm.config.run import RunConfig
from hmmlm.runs.interrupt import StopRequest
from hmmlm.runs.progress import LineProgress
from hmmlm.training.train import HmmTrainer
from papers.beyond import GROWN, GROWTH
from papers.records import add_record, commit, machine
from papers.runner import evaluate_best
from papers.settings import configuration
from papers.study import StudyRow, StudyRun

STAGES = ((2**12, 2), (2**13, 2), (2**14, 2), (2**15, 8))
"""States and epochs."""
NOISE = 0.1
"""Standard deviation of what is added to the embedding of every copy, relative to that of embeddings."""


class GrowingTrainer(HmmTrainer):
    """Trains a model that starts as a smaller one whose states are split."""

    smaller: Mapping[str, Tensor] | None = None
    """Parameters of the trained smaller model, by name."""

    @torch.no_grad()
    def start(self, request: StopRequest) -> None:
        if self.smaller is None:
            return
        for name, parameter in self.fit.learner.parameters().items():
            value = self.smaller[name]
            if value.shape != parameter.shape:
                value = value.repeat_interleave(len(parameter) // len(value), 0)
                value = value + NOISE * value.std() * torch.randn_like(value)
            parameter.copy_(value)
        self.fit.position.initialized = True


def grow(configs: Sequence[RunConfig], out: Path) -> Path:
    """Train models of ever more states, each from the one before; return the folder of the last."""
    before: Mapping[str, Tensor] | None = None
    for config in configs:
        trainer = GrowingTrainer(config, out / str(config.model.num_states), False, LineProgress())
        trainer.smaller = before
        if not trainer.run().finished:
            raise KeyboardInterrupt
        before = {name: value.detach().clone() for name, value in trainer.fit.learner.parameters().items()}
    return trainer.out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed, began, configs = parser.parse_args().seed, time.perf_counter(), []
    for states, epochs in STAGES:
        settings = {"model.num_states": states, "train.epochs": epochs}
        config = configuration(StudyRun(StudyRow(name="PTB", recipe="ptb-vl-hmm", settings=settings), seed))
        assert isinstance(config, RunConfig)
        configs.append(config)
    on_gpu = torch.cuda.is_available()
    folder = grow(configs, Path("runs") / f"growth-{seed}-{time.time():.0f}")
    found = evaluate_best(folder, on_gpu)
    metrics = {f"{split}_perplexity": round(value, 3) for split, value in found.items()}
    print(metrics, flush=True)
    add_record(
        Path("results") / f"{GROWTH.name}.json",
        {
            "row": f"PTB, {GROWN}",
            "recipe": "papers/growth.py",
            "metrics": {**metrics, "seconds": round(time.perf_counter() - began, 1)},
            "seed": seed,
            "settings": {"noise": NOISE},
            "command": f"python -m papers.growth --seed {seed}",
            "commit": commit(),
            "machine": machine(on_gpu),
            "date": time.strftime("%Y-%m-%d"),
        },
    )


if __name__ == "__main__":
    main()
