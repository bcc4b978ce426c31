"""Tiny training runs: a planted HMM, its text, configurations that train in a second, and runs that are interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.learning.fit import Fit
from hmmlm.runs.history import read_history
from hmmlm.runs.progress import Progress, ProgressPhase
from hmmlm.training import train as training
from hmmlm.training import trainer
from hmmlm.training.prepare import Prepared

WORDS = ["<unk>", "<eos>", "a", "b", "c", "d"]
TIMES = ("seconds", "tokens_per_second")
"""Fields of a history that differ between two runs of the same configuration."""


def random_hmm(states: int, words: int, seed: int, sharpness: float = 1.0, dtype: torch.dtype = torch.float64) -> HMM:
    """Return an HMM with random logits of standard deviation `sharpness`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((states,), (states, states), (states, words))
    start, transition, emission = (
        (sharpness * torch.randn(*shape, generator=generator, dtype=dtype)).log_softmax(-1) for shape in shapes
    )
    return HMM(start, transition, emission)


def cpu_fabric() -> Any:
    """Return Fabric for one process on the CPU."""
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


def planted(hmm: HMM, sequences: int, length: int, seed: int = 0) -> Prepared:
    """Return sequences drawn from `hmm`, concatenated, as every split; chunks of `length` are the sequences."""
    tokens = {}
    for i, (split, count) in enumerate({"train": sequences, "valid": sequences // 4, "test": sequences // 4}.items()):
        drawn, _ = hmm.sample(count, length, generator=torch.Generator().manual_seed(seed + i))
        documents = torch.arange(0, count * length + 1, length).numpy()
        tokens[split] = TokenFile.from_arrays(drawn.flatten().numpy(), documents, hmm.vocab_size)
    return Prepared(WordTokenizer(WORDS[: hmm.vocab_size]), tokens)


def write_prepared(folder: Path, data: Prepared) -> Path:
    """Write the tokenizer and the token files as `hmmlm data` does, and return the folder."""
    data.tokenizer.save(folder / "tokenizer")
    for split, tokens in data.tokens.items():
        documents = np.split(tokens.tokens, tokens.documents[1:-1])
        write_tokens(folder / "data" / split, documents, tokens.vocab_size, data.tokenizer.fingerprint())
    return folder


def write_text(folder: Path, lines: int = 60) -> Path:
    """Write a text of words drawn from a planted HMM, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    hmm = random_hmm(3, 4, seed=1, sharpness=2.0)
    tokens, _ = hmm.sample(lines, 9, generator=torch.Generator().manual_seed(0))
    path = folder / "text.txt"
    # The number makes every line different, so that no split is empty.
    path.write_text("\n".join(f"{' '.join('abcd'[t] for t in row)} {i % 7}" for i, row in enumerate(tokens.tolist())))
    return path


def tiny_config(data: Path | str, **sections: dict[str, Any]) -> RunConfig:
    """Return a few dozen steps of a 4-state model; the fields of `sections` override the defaults here.

    Streams carry through `<eos>`.
    """
    values: dict[str, Any] = {
        "data": str(data),
        "model": {"num_states": 4},
        "batches": {"batch_size": 3, "length": 8},
        "schedule": {"kind": "cosine", "warmup": 0.2},
        "train": {
            "epochs": 2,
            "log_every": 4,
            "checkpoint_every": 5,
            "checks_per_epoch": 2,
            "tensorboard": False,
            "device": "cpu",
        },
    }
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    if values["batches"].get("kind", "stream") == "stream":
        values["batches"] = {"reset_at_eos": False, "eval_reset_at_eos": False, **values["batches"]}
    return read_config(RunConfig, values)


def fit_planted(out: Path, data: Prepared, **sections: dict[str, Any]) -> Fit:
    """Train on `data`, which is written beside `out`, until the end, and return the loop that did."""
    folder = out.with_name(f"{out.name}-tokens")
    if not folder.exists():
        write_prepared(folder, data)
    made: list[Fit] = []

    class RecordedFit(Fit):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "Fit", RecordedFit)
        assert training.train(tiny_config(folder, **sections), out).finished
    return made[0]


def records(out: Path, event: str) -> list[dict[str, Any]]:
    """Return the records of one kind of event in the history of a run."""
    return [record for record in read_history(out / "history.jsonl") if record["event"] == event]


class Interrupting(Progress):
    """Sends a signal to this process from inside a phase, at its `after`th advance."""

    def __init__(self, name: str, after: int, number: signal.Signals = signal.SIGINT) -> None:
        self.name, self.left, self.number = name, after, number

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, unit: str = "tokens", done: int = 0
    ) -> Iterator[ProgressPhase]:
        interrupting = self

        class Sender(ProgressPhase):
            def advance(self, amount: int, **figures: str) -> None:
                interrupting.left -= amount > 0
                if interrupting.left == 0 and amount:
                    os.kill(os.getpid(), interrupting.number)

        yield Sender() if name == self.name else ProgressPhase()


def assert_same_run(run: Path, other: Path) -> None:
    """Check that two runs are equal bit for bit: history (except times), and the files of checkpoint and models."""
    assert without_times(run) == without_times(other)
    for link in ("last", "best", "final"):
        ours, theirs = ({file.name: file.read_bytes() for file in (folder / link).iterdir()} for folder in (run, other))
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if ours[name] != theirs[name]] == [], link


def without_times(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in TIMES} for r in read_history(run / "history.jsonl")]
