"""Tiny runs for the tests of learning: a planted HMM, its text, and configurations that train in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizer import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.learning.config import RunConfig, config_from_dict
from hmmlm.learning.prepare import Prepared

WORDS = ["<unk>", "<eos>", "a", "b", "c", "d"]


def random_hmm(states: int, words: int, seed: int, sharpness: float = 1.0, dtype: torch.dtype = torch.float64) -> HMM:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((states,), (states, states), (states, words))
    start, transition, emission = (
        (sharpness * torch.randn(*shape, generator=generator, dtype=dtype)).log_softmax(-1) for shape in shapes
    )
    return HMM(start, transition, emission)


def planted(hmm: HMM, sequences: int, length: int, seed: int = 0) -> Prepared:
    """Sequences drawn from `hmm`, one after another, as every split; read as chunks of `length` they are its own."""
    tokens = {}
    for i, (split, count) in enumerate({"train": sequences, "valid": sequences // 4, "test": sequences // 4}.items()):
        drawn, _ = hmm.sample(count, length, generator=torch.Generator().manual_seed(seed + i))
        documents = torch.arange(0, count * length + 1, length).numpy()
        tokens[split] = TokenFile.from_arrays(drawn.flatten().numpy(), documents, hmm.vocab_size)
    return Prepared(WordTokenizer(WORDS[: hmm.vocab_size]), tokens)


def write_text(folder: Path, lines: int = 60) -> Path:
    """A text file of words drawn from a planted HMM."""
    folder.mkdir(parents=True, exist_ok=True)
    hmm = random_hmm(3, 4, seed=1, sharpness=2.0)
    tokens, _ = hmm.sample(lines, 9, generator=torch.Generator().manual_seed(0))
    path = folder / "text.txt"
    # the number makes every line different, so that none of the splits is empty
    path.write_text("\n".join(f"{' '.join('abcd'[t] for t in row)} {i % 7}" for i, row in enumerate(tokens.tolist())))
    return path


def tiny_config(data: Path | str, **sections: dict[str, Any]) -> RunConfig:
    """A few dozen steps of a 4-state model; each section's fields can be overridden."""
    values: dict[str, Any] = {
        "data": str(data),
        "model": {"states": 4},
        "batches": {"batch_size": 3, "length": 8},
        "schedule": {"kind": "cosine", "warmup_fraction": 0.2},
        "train": {
            "epochs": 2, "log_every": 4, "checkpoint_every": 5, "checks_per_epoch": 2, "tensorboard": False,
            "device": "cpu",
        },
    }  # fmt: skip
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return config_from_dict(values)
