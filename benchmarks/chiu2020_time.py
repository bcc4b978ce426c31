"""Measure what steps of the models of Chiu & Rush 2020 cost: writes results/chiu2020-time.json.

    PYTHONPATH=src python -m benchmarks.chiu2020_time                              # on one H200, PTB's sizes
    PYTHONPATH=src python -m benchmarks.chiu2020_time --small --out small.json     # tiny models: a test of the script
    python -m papers publish                                                       # the columns of Tables 2 and 4

Rows and their settings are those of `papers.chiu2020_time`. Texts are random words with Zipfian frequencies in the
batches of the row; sequences carry their state from one to the next, and restart as often as a sentence of PTB ends.

- ms per step: a training step, AdamW included;
- forward ms: parameters of a fresh sample of states and the likelihood of a batch, without gradients, which the paper's
  column Time has; of HMMs;
- evaluation ms: the likelihood of a batch under a fixed model, without dropout;
- seconds per epoch: training steps of an epoch of PTB, without validation.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from benchmarks.dense_step import draw_tokens
from benchmarks.speed import step_seconds
from hmmlm.config.networks import BaselineConfig
from hmmlm.data.batches import Batch
from hmmlm.hmm import HMM, Carry, Scan
from hmmlm.learning.evaluate import evaluate
from hmmlm.learning.graph import GraphedStep
from hmmlm.learning.learners import AdamWLearner, NetworkLearner
from papers.chiu2020_time import EPOCH, SENTENCES, TIME, TOKENS
from papers.parameters import WORDS, build_model, make_vocabulary
from papers.records import add_record, commit, machine
from papers.settings import configuration, planned_settings
from papers.study import FORWARD, STEP, StudyRow, StudyRun

BATCHES, WARM_UP = 4, 5  # different batches; untimed steps, more than graph capture needs
ROUNDS, ROUND_SECONDS = 5, 0.1
SMALL: dict[str, Any] = {"model.num_states": 512, "model.hidden": 16, "batches.batch_size": 4, "batches.length": 8}
SMALL_WORDS = 500


class Steps:
    """Steps of the model of a configuration on random batches."""

    def __init__(self, config: Any, words: int, fabric: Fabric) -> None:
        torch.manual_seed(0)
        model, vocabulary = build_model(config, words), make_vocabulary(words)
        self.learner: Any
        if isinstance(config, BaselineConfig):
            self.learner = NetworkLearner(fabric, model, vocabulary, config.optimizer)
        else:
            self.learner = AdamWLearner(fabric, model, vocabulary, {}, config.optimizer)
        rows, length = config.batches.batch_size, config.batches.length
        self.batches = [
            Batch(
                draw_tokens(rows, length, words, torch.device("cpu")),
                None,
                torch.rand(rows, length) < SENTENCES / TOKENS,
                True,
            )
            for _ in range(BATCHES)
        ]
        self.upcoming = cycle(self.batches)
        self.carry: Any = None
        self.train(WARM_UP)
        replays = fabric.device.type == "cuda"
        self.graphed = GraphedStep(self._scan, fabric.device) if replays else None

    def train(self, steps: int) -> None:
        """Run training steps at a rate of 0, which cost the same and leave the model as it started."""
        for batch in islice(self.upcoming, steps):
            self.carry = self.learner.step(batch, self.carry, 0.0).carry

    def score(self, steps: int) -> None:
        """Compute the parameters of a sample of states and the likelihood of a batch, as a training step does."""
        for batch in islice(self.upcoming, steps):
            result = self._scan(batch, self.carry) if self.graphed is None else self.graphed(batch, self.carry)
            self.carry = result.carry

    @torch.no_grad()
    def _scan(self, batch: Batch, carry: Carry | None) -> Scan:
        with self.learner.fabric.autocast():
            result: Scan = self.learner.model.scan(batch.tokens, batch.lengths, carry, batch.restart)
        return result


def measure(config: Any, words: int, fabric: Fabric) -> dict[str, float]:
    """Return the metrics of a configuration."""
    cuda = fabric.device.type == "cuda"
    if cuda:
        gc.collect()  # the recorded step of the row before refers to itself
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = Steps(config, words, fabric)
    training = step_seconds(steps.train, cuda, ROUNDS, ROUND_SECONDS)
    per_epoch = ceil(TOKENS / steps.batches[0].tokens.numel())
    metrics = {STEP: 1e3 * training, EPOCH: per_epoch * training}
    if cuda:
        metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    hmm: HMM | None = None
    if isinstance(steps.learner, AdamWLearner):
        steps.score(WARM_UP)
        metrics[FORWARD] = 1e3 * step_seconds(steps.score, cuda, ROUNDS, ROUND_SECONDS)
        hmm = steps.learner.hmm()  # once, as validation makes it

    def evaluate_batches(count: int) -> None:
        batches = islice(steps.upcoming, count)
        if hmm is None:
            steps.learner.evaluate(batches, lambda tokens: None)
        else:
            evaluate(hmm, batches)

    evaluate_batches(WARM_UP)
    metrics["evaluation_ms"] = 1e3 * step_seconds(evaluate_batches, cuda, ROUNDS, ROUND_SECONDS)
    return {name: float(f"{value:.4g}") for name, value in metrics.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure the chosen rows and write them."""
    names = [row.name for row in TIME.rows]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help="; ".join(names))
    parser.add_argument("--out", type=Path, default=Path(f"results/{TIME.name}.json"))
    parser.add_argument("--small", action="store_true", help="tiny models, to test the script on any machine")
    given = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    for row in (row for row in TIME.rows if row.name in given.rows):
        began = time.perf_counter()
        config: Any = configuration(StudyRun(shrink(row) if given.small else row, 0))
        precision = config.train.precision if cuda else "32-true"
        fabric = Fabric(accelerator="cuda" if cuda else "cpu", devices=1, precision=precision)
        metrics = measure(config, SMALL_WORDS if given.small else WORDS["ptb"], fabric)
        print(f"{row.name} ({time.perf_counter() - began:.0f} s)", metrics, flush=True)
        add_record(
            given.out,
            {
                "row": row.name,
                "recipe": "benchmarks/chiu2020_time.py",
                "metrics": metrics,
                "seed": 0,
                "settings": dict(row.settings),
                "command": f'python -m benchmarks.chiu2020_time --rows "{row.name}"',
                "commit": commit(),
                "machine": machine(cuda),
                "date": time.strftime("%Y-%m-%d"),
                "note": f"median of {ROUNDS} rounds; random words",
            },
        )


def shrink(row: StudyRow) -> StudyRow:
    """Return a row that takes a moment on a CPU."""
    known = planned_settings(row.recipe, row.settings)
    return replace(row, settings={**row.settings, **{name: SMALL[name] for name in SMALL if name in known}})


if __name__ == "__main__":
    main()
