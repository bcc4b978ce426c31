"""The training of a teacher, as configured."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

from hmmlm.learning.config import Section
from hmmlm.learning.config_network import NetworkConfig, saved_network_config


class TransformerConfig(Section):
    """The transformer."""

    hidden: PositiveInt = 256
    """Size of its embeddings."""
    layers: PositiveInt = 4
    """Blocks of attention and a perceptron."""
    heads: PositiveInt = 4
    """Attention heads of a block."""


class TeacherConfig(NetworkConfig):
    """Everything the training of a teacher needs to be done again."""

    model: TransformerConfig = TransformerConfig()
    length: PositiveInt = 64
    """Tokens of a chunk, each read after an <eos>: the most it can read at once as a teacher."""


def saved_teacher_config(out: Path) -> TeacherConfig:
    """The configuration of the run in `out`."""
    return saved_network_config(TeacherConfig, out, "hmmlm teacher")
