"""What the configurations of all kinds of training share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError, model_validator

from hmmlm.config.explain import explain, member_types
from hmmlm.config.renames import present_sections
from hmmlm.config.sections import (
    CORPUS_WORDS,
    AdamWConfig,
    AutoTokenizerConfig,
    BatchesConfig,
    CosineConfig,
    OptimizerConfig,
    ScheduleConfig,
    StreamConfig,
    TextConfig,
    TokenizerConfig,
    TrainConfig,
)
from hmmlm.errors import InputError
from hmmlm.section import Section

AnyConfig = TypeVar("AnyConfig", bound="TrainingConfig")


class TrainingConfig(Section):
    """Everything a training run needs to be repeated, except the model."""

    command: ClassVar[str] = "train"
    """The command that starts such a run."""
    data: str = "embedded"
    """Corpus: a name (embedded, ptb, wikitext-2), a text file, a folder with train, valid and test files, or a folder
    made by `hmmlm data` or `hmmlm train`, whose token files and tokenizer are then used."""
    data_folder: Path | None = None
    """Folder of named corpora; None: $HMMLM_DATA or the cache folder, to which missing corpora are downloaded."""
    text: TextConfig = TextConfig()
    tokenizer: TokenizerConfig = AutoTokenizerConfig()
    batches: BatchesConfig = StreamConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = CosineConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            values = present_sections(values)
        return fill_in_kinds(cls, with_words(values, "data"))

    def dump(self) -> dict[str, Any]:
        """Return the configuration as plain JSON values; `read_config` is the inverse."""
        return self.model_dump(mode="json")


def fill_in_kinds(kind: type[BaseModel], values: Any) -> Any:
    """Fill in what sections leave out: the default kind, and the field defaults that the configuration sets for it."""
    if not isinstance(values, Mapping):
        return values
    filled = dict(values)
    for name, field in kind.model_fields.items():
        given, default = filled.get(name), field.default
        if isinstance(given, Mapping) and isinstance(default, Section) and len(member_types(field)) > 1:
            own = str(getattr(default, "kind", ""))
            chosen = given.get("kind", own)
            base = default.model_dump(exclude_unset=True) if chosen == own else {}
            filled[name] = {**base, **given, "kind": chosen}
        elif isinstance(given, Mapping) and isinstance(default, Section):
            filled[name] = {**default.model_dump(exclude_unset=True), **given}
    return filled


def with_words(values: Any, field: str) -> Any:
    """Fill in a tokenizer section without a kind, unless it is empty: it is of words, as that of named corpora is.

    `field` names the corpus, the embedded one if it is left out.
    """
    if not isinstance(values, Mapping) or not isinstance(corpus := values.get(field, "embedded"), str):
        return values
    given, own = values.get("tokenizer", {}), CORPUS_WORDS.get(corpus)
    if not isinstance(given, Mapping) or given.get("kind", "word") != "word" or (own is None and not given):
        return values
    return {**values, "tokenizer": {"kind": "word", **(own or {}), **given}}


def read_config(kind: type[AnyConfig], values: Mapping[str, Any], where: str = "configuration") -> AnyConfig:
    """Validate a configuration; fields left out keep their defaults. `where` names the source in errors."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise InputError(f"{where}: {explain(kind, error)}") from None


def drop_other_kinds(kind: type[BaseModel], values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the kinds chosen in `over`, without the fields that these do not have."""
    result = dict(values)
    for name, section in values.items():
        chosen = over.get(name, {}).get("kind") if isinstance(over.get(name), Mapping) else None
        if chosen is None or name not in kind.model_fields or not isinstance(section, Mapping):
            continue
        own = section.get("kind", getattr(kind.model_fields[name].default, "kind", None))
        if chosen != own:
            members = {m.model_fields["kind"].default: m for m in member_types(kind.model_fields[name])}
            known = members[chosen].model_fields if chosen in members else {}
            result[name] = {field: value for field, value in section.items() if field in known} | {"kind": chosen}
    return result
