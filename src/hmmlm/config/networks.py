"""Configurations of neural language models: teachers and baselines."""

from __future__ import annotations

from typing import ClassVar

from hmmlm.baselines.neural import AnyBaselineConfig, LstmConfig
from hmmlm.config.sections import AdamWConfig, BatchesConfig, ChunkConfig, StreamConfig
from hmmlm.config.training import TrainingConfig
from hmmlm.teachers.gpt import GPTConfig


class TeacherConfig(TrainingConfig):
    """Everything the training of a teacher needs to be repeated."""

    command: ClassVar[str] = "teacher"
    model: GPTConfig = GPTConfig()
    batches: ChunkConfig = ChunkConfig(batch_size=32, length=64)
    """Chunks, each read after an <eos>; their length is the longest context of the teacher."""
    optimizer: AdamWConfig = AdamWConfig(lr=1e-3, weight_decay=0.1)


class BaselineConfig(TrainingConfig):
    """Everything the training of a baseline needs to be repeated."""

    command: ClassVar[str] = "baseline"
    model: AnyBaselineConfig = LstmConfig()
    batches: BatchesConfig = StreamConfig(batch_size=16, length=32, reset_at_eos=False, eval_reset_at_eos=False)
    # In small batches most words do not occur: with a short memory of squared gradients, they are pushed down too far
    # between their occurrences.
    optimizer: AdamWConfig = AdamWConfig(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
