"""Training the neural baselines (`baselines.neural`) on the windows that Chiu & Rush 2020 train everything on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from hmmlm.baselines.neural import NeuralBaseline, load_baseline, make_baseline, save_baseline
from hmmlm.data.batches import ChunkBatches, StreamBatches
from hmmlm.data.files import write_bytes
from hmmlm.learning.config import BatchConfig, RunConfig
from hmmlm.learning.config_baseline import BaselineConfig, saved_baseline_config
from hmmlm.learning.evaluate import perplexity
from hmmlm.learning.interrupt import StopRequest
from hmmlm.learning.network import NetworkResult, NetworkTrainer, State, reopen_data, train_network
from hmmlm.learning.prepare import make_batches
from hmmlm.learning.progress import Progress

PERPLEXITY = "perplexity.json"


def train_baseline(
    config: BaselineConfig, out: Path, resume: bool = False, progress: Progress | None = None
) -> NetworkResult:
    """Train in the folder `out`; with `resume`, go on from its last checkpoint. At the end the best model by validation
    is scored once, on valid and test, into perplexity.json.

    Ctrl-C or SIGTERM saves and returns a result that is not `finished`.
    """
    result = train_network(BaselineTrainer, saved_baseline_config, config, out, resume, progress)
    if result.finished:
        scores = {split: score_baseline(out, split, progress) for split in ("valid", "test")}
        write_bytes(Path(out) / PERPLEXITY, (json.dumps(scores, indent=1) + "\n").encode())
    return result


def score_baseline(run: Path, split: str, progress: Progress | None = None) -> float:
    """Perplexity of a run's best model: every token counts, each is predicted from what its stream has before it."""
    config, run = saved_baseline_config(run), Path(run)
    trainer = BaselineTrainer(config, run, reopen_data(config, run), progress or Progress())
    trainer.model.load_state_dict(load_baseline(run / "best")[0].state_dict())
    return perplexity(-trainer.evaluate(trainer.make_batches(split), StopRequest(), split), 1)


class BaselineTrainer(NetworkTrainer[BaselineConfig, NeuralBaseline]):
    def make_model(self, generator: torch.Generator) -> NeuralBaseline:
        tokenizer, model = self.data.tokenizer, self.config.model
        return make_baseline(
            **model.model_dump(), vocab_size=tokenizer.vocab_size, first=tokenizer.eos_id, generator=generator
        )

    def make_batches(self, split: str) -> ChunkBatches | StreamBatches:
        batches = BatchConfig(batch_size=self.config.batch_size, length=self.config.length)
        return make_batches(RunConfig(batches=batches, train=self.config.train), self.data, split)

    def score(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        return self.model.log_probs(tokens, state)

    def keep(self, folder: Path) -> None:
        save_baseline(folder, self.model, self.config.model.model_dump(), self.data.tokenizer)
