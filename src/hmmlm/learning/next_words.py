"""The start of a run with next-word distillation: a neural baseline reads the training text and draws next words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hmmlm.config.run import RunConfig
from hmmlm.data.batches import StreamBatches
from hmmlm.data.files import replacing
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distillation.next_words import NEXT_WORDS, open_next_words, word_dtype
from hmmlm.distributed.ranks import world
from hmmlm.errors import InputError
from hmmlm.runs.progress import Progress

STREAMS, WINDOW = 32, 128
"""Rows and tokens that the teacher reads at once. Each row starts without context, so there are few."""


def check_teacher(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise an InputError if the teacher is missing or has other tokens."""
    from hmmlm.baselines.neural import load_baseline

    path = config.next_words.teacher
    if path is None:
        return
    _, its_own = load_baseline(path)
    if its_own.fingerprint() != tokenizer.fingerprint():
        raise InputError(
            f"next_words.teacher: {path} has another vocabulary than this run: train it on the same text with the same "
            "[tokenizer] settings, or start this run with --data and the folder of that one"
        )


@torch.no_grad()
def draw_next_words(
    config: RunConfig,
    out: Path,
    tokens: TokenFile,
    tokenizer: Tokenizer,
    device: torch.device,
    progress: Progress,
    on_work: Callable[[], None],
) -> np.ndarray:
    """Return the words [tokens, drawn] that the teacher draws; they are stored in the run's folder, and drawn once.

    `on_work` is called often, and may raise to stop.
    """
    from hmmlm.baselines.neural import load_baseline

    settings, path = config.next_words, out / NEXT_WORDS

    def draw() -> None:
        assert settings.teacher is not None
        network, _ = load_baseline(settings.teacher)
        network = network.to(device)
        generator = torch.Generator(device).manual_seed(config.train.seed)
        words = np.empty((len(tokens), settings.drawn), word_dtype(tokenizer.vocab_size))
        batches = StreamBatches(
            tokens,
            min(STREAMS, len(tokens)),
            WINDOW,
            shuffle=False,
            reset_at_eos=False,
            eos_id=tokenizer.eos_id,
            seed=0,
        )
        hidden = None
        with progress.phase("next words", len(tokens)) as phase:
            for batch in batches.epoch(0):
                assert batch.places is not None
                drawn, hidden = network.draw(batch.tokens.to(device), hidden, settings.drawn, generator)
                known = batch.places >= 0
                words[batch.places[known].numpy()] = drawn.cpu()[known].numpy()
                phase.advance(batch.num_tokens())
                on_work()
        with replacing(path) as (temporary,), temporary.open("wb") as file:
            np.save(file, words)

    world().on_first(lambda: None if path.exists() else draw())  # one network reads all of the text in order
    return open_next_words(path, len(tokens), settings.drawn, tokenizer.vocab_size)
