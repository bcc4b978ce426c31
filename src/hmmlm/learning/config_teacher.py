"""The training of a teacher, as configured."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from hmmlm.data.files import read_json
from hmmlm.errors import InputError
from hmmlm.learning.config import ScheduleConfig, Section, TokenizerConfig, TrainConfig
from hmmlm.learning.folders import config_file


class TransformerConfig(Section):
    """The transformer."""

    hidden: PositiveInt = 256
    """Size of its embeddings."""
    layers: PositiveInt = 4
    """Blocks of attention and a perceptron."""
    heads: PositiveInt = 4
    """Attention heads of a block."""


class TeacherConfig(Section):
    """Everything the training of a teacher needs to be done again."""

    data: str = "embedded"
    """Corpus: a name (embedded, ptb, wikitext-2), a text file, a folder with train, valid and test files; or a folder
    that `hmmlm data` or `hmmlm train` made, whose token files and tokenizer are used as they are."""
    data_folder: Path | None = None
    """Where named corpora lie; None: $HMMLM_DATA or the cache folder, where they are downloaded to if missing."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: TransformerConfig = TransformerConfig()
    length: PositiveInt = 64
    """Tokens of a chunk, each read after an <eos>: the most it can read at once as a teacher."""
    batch_size: PositiveInt = 64
    """Chunks side by side."""
    rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    schedule: ScheduleConfig = ScheduleConfig(kind="cosine", warmup_fraction=0.05)
    train: TrainConfig = TrainConfig()


def saved_teacher_config(out: Path) -> TeacherConfig:
    """The configuration of the run in `out`."""
    path = config_file(out)
    try:
        return TeacherConfig.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its fields"
        raise InputError(f"{path} is not of a run of hmmlm teacher: {where}: {first['msg']}") from None
