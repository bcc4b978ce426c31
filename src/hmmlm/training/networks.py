"""Training of neural language models: teachers and baselines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hmmlm.config.networks import BaselineConfig, TeacherConfig
from hmmlm.data.files import PERPLEXITY, write_bytes
from hmmlm.distributed.ranks import world
from hmmlm.learning.fit import Phase
from hmmlm.learning.learners import NetworkLearner
from hmmlm.runs.folders import saved_config
from hmmlm.runs.interrupt import StopRequest
from hmmlm.runs.progress import Progress
from hmmlm.training.prepare import Prepared, make_batches, reopen

if TYPE_CHECKING:
    from lightning_fabric import Fabric
from hmmlm.training.trainer import Trainer, TrainResult, make_fabric


def train_teacher(
    config: TeacherConfig, out: Path, resume: bool = False, progress: Progress | None = None
) -> TrainResult:
    """Train a teacher in the folder `out`, which `open_teacher` then accepts; see `train`."""
    return NetworkTrainer(config, Path(out), resume, progress).run()


def train_baseline(
    config: BaselineConfig, out: Path, resume: bool = False, progress: Progress | None = None
) -> TrainResult:
    """Train a neural baseline in the folder `out`; see `train`.

    At the end the best model by validation is scored once, on valid and test, into perplexity.json.
    """
    out = Path(out)
    result = NetworkTrainer(config, out, resume, progress).run()
    if result.finished and world().first:
        scores = {split: score_baseline(out, split) for split in ("valid", "test")}
        write_bytes(out / PERPLEXITY, (json.dumps(scores, indent=1) + "\n").encode())
    return result


def score_baseline(run: Path, split: str) -> float:
    """Return the perplexity of a run's best model: every token counts, each predicted from what precedes it."""
    from hmmlm.baselines.neural import load_baseline

    config = saved_config(BaselineConfig, run)
    data = reopen(run)
    network, tokenizer = load_baseline(run / "best")
    learner = NetworkLearner(make_fabric(config), network, tokenizer, config.optimizer)
    return learner.evaluate(make_batches(config, data, split).epoch(0), lambda tokens: None).perplexity


class NetworkTrainer(Trainer):
    """Trains a neural language model: a teacher or a baseline."""

    config: TeacherConfig | BaselineConfig

    def check(self) -> None:
        """Networks need nothing but the text."""

    def make_learner(self, fabric: Fabric, data: Prepared) -> NetworkLearner[Any]:
        config = self.config
        torch.manual_seed(config.train.seed)
        generator = torch.Generator().manual_seed(config.train.seed)
        network = config.model.build(data.tokenizer, config.batches.length, generator)
        return NetworkLearner(fabric, network, data.tokenizer, config.optimizer)

    def plan(self, request: StopRequest) -> Sequence[Phase]:
        return [Phase("marginal", self.fit.total_tokens, self.fit.train)]
