"""The training of a neural language model of our own, teacher or baseline, as configured."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from hmmlm.data.files import read_json
from hmmlm.errors import InputError
from hmmlm.learning.config import ScheduleConfig, Section, TokenizerConfig, TrainConfig
from hmmlm.learning.config_base import Momentum
from hmmlm.learning.folders import config_file


class NetworkConfig(Section):
    """What the training of any network needs to be done again; the network itself is added by each kind."""

    data: str = "embedded"
    """Corpus: a name (embedded, ptb, wikitext-2), a text file, a folder with train, valid and test files; or a folder
    that `hmmlm data` or `hmmlm train` made, whose token files and tokenizer are used as they are."""
    data_folder: Path | None = None
    """Where named corpora lie; None: $HMMLM_DATA or the cache folder, where they are downloaded to if missing."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    length: PositiveInt = 64
    """Tokens of a sequence in one batch."""
    batch_size: PositiveInt = 64
    """Sequences side by side."""
    rate: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    """How much of the mean and of the mean square of gradients is kept a step."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices."""
    clip: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    schedule: ScheduleConfig = ScheduleConfig(kind="cosine", warmup_fraction=0.05)
    train: TrainConfig = TrainConfig()


Config = TypeVar("Config", bound=NetworkConfig)


def saved_network_config(kind: type[Config], out: Path, command: str) -> Config:
    """The configuration of the run of `command` in `out`."""
    path = config_file(out)
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its fields"
        raise InputError(f"{path} is not of a run of {command}: {where}: {first['msg']}") from None
