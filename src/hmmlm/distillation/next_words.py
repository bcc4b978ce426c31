"""Words that a teacher draws in place of each word of a text, and batches that have some of them.

Averaged over the draws, the log-probability of these words is the cross-entropy with the teacher's prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hmmlm.data.batches import ALL_ROWS, Batch, ExtendedBatches, Share
from hmmlm.errors import InputError

NEXT_WORDS = "next_words.npy"


def word_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the type in which drawn words are stored."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def open_next_words(path: Path, tokens: int, drawn: int, vocab_size: int) -> np.ndarray:
    """Return the stored words [tokens, drawn], memory-mapped; raise an InputError if the file is not of this text."""
    try:
        words = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}; remove it, and the teacher draws again") from None
    if words.shape != (tokens, drawn) or words.dtype != word_dtype(vocab_size):
        raise InputError(
            f"{path} has {words.dtype} {list(words.shape)}, should be {word_dtype(vocab_size)} {[tokens, drawn]}: "
            "remove it, and the teacher draws again"
        )
    return words


@dataclass(frozen=True)
class NextWordBatches(ExtendedBatches):
    """Batches with `samples` of the stored words at every position, a function of (seed, epoch, index) alone."""

    words: np.ndarray  # [tokens, drawn]
    samples: int
    seed: int
    share: Share = ALL_ROWS

    def extend(self, batch: Batch, epoch: int, index: int) -> Batch:
        assert batch.places is not None
        places = batch.places.clamp(min=0).numpy()[:, :, None]
        # Another stream than that of the batches, which use [seed, epoch].
        generator = np.random.default_rng([self.seed, epoch, index])
        # Drawn for the whole batch, so that words do not depend on how rows are shared.
        rows, length = batch.tokens.shape if batch.whole is None else batch.whole[:2]
        column = generator.integers(self.words.shape[1], size=(rows, length, self.samples))
        column = column[self.share.rows(rows), : batch.tokens.shape[1]]
        return batch._replace(next_words=torch.from_numpy(self.words[places, column].astype(np.int64)))
