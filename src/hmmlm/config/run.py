"""The configuration of a training run of a hidden Markov model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from hmmlm.config.explain import member_types
from hmmlm.config.initialization import (
    BigramConfig,
    InitializationConfig,
    LabelConfig,
    LvdConfig,
    NoInitialization,
)
from hmmlm.config.next_words import NextWordsConfig
from hmmlm.config.renames import present_sections
from hmmlm.config.sections import HmmTrainConfig
from hmmlm.config.training import TrainingConfig
from hmmlm.distillation.pretrained import PretrainedConfig
from hmmlm.models.base import ModelConfig
from hmmlm.models.factored import LinearConfig, MlpConfig, TransformerConfig
from hmmlm.models.low_rank import LowRankConfig
from hmmlm.models.monarch import MonarchConfig
from hmmlm.models.neural import NeuralConfig
from hmmlm.models.scalar import ScalarConfig
from hmmlm.models.uniform import UniformConfig
from hmmlm.models.union import UnionConfig

AnyModelConfig = Annotated[
    ScalarConfig
    | LinearConfig
    | MlpConfig
    | TransformerConfig
    | NeuralConfig
    | UniformConfig
    | UnionConfig
    | LowRankConfig
    | MonarchConfig
    | PretrainedConfig,
    Field(discriminator="kind"),
]
"""The registry of model families."""


def _is_true(value: Any) -> bool:
    """Return whether a value will be read as true; one that cannot be read is reported later."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False


class RunConfig(TrainingConfig):
    """Everything a training run of a hidden Markov model needs to be repeated."""

    model: AnyModelConfig = ScalarConfig()
    initialization: InitializationConfig = NoInitialization()
    next_words: NextWordsConfig = NextWordsConfig()
    train: HmmTrainConfig = HmmTrainConfig()
    chosen: tuple[str, ...] | None = None
    """Names of the settings that the user chose, where the others will follow from the text; None: all are set."""

    def dump(self) -> dict[str, Any]:
        return {name: value for name, value in super().dump().items() if name != "chosen" or value is not None}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_optimizer(cls, values: Any) -> Any:
        """Fill in the settings that suit the model family or the optimizer, where they are left out."""
        if not isinstance(values, Mapping):
            return values
        values = present_sections(values)
        model, optimizer = values.get("model", {}), values.get("optimizer", {})
        if not isinstance(model, Mapping | ModelConfig) or not isinstance(optimizer, Mapping):
            return values
        if optimizer.get("kind") == "baum-welch" and _is_true(optimizer.get("full_batch")):
            schedule = {"kind": "constant", "warmup": 0.0}
            return {"schedule": schedule, **values, "optimizer": {"step": 1.0, "pseudocount": 0.0, **optimizer}}
        kind = model.get("kind", "scalar") if isinstance(model, Mapping) else type(model).model_fields["kind"].default
        families = {m.model_fields["kind"].default: m for m in member_types(cls.model_fields["model"])}
        if optimizer.get("kind", "adamw") == "adamw" and isinstance(kind, str) and kind in families:
            defaults = getattr(families[kind], "optimizer_defaults", {})
            return {**values, "optimizer": {**defaults, **optimizer, "kind": "adamw"}}
        return values

    @model_validator(mode="after")
    def _optimizer_fits(self) -> RunConfig:
        if self.optimizer.kind == "baum-welch" and not self.model.counts_suffice:
            raise ValueError(
                "optimizer.kind = 'baum-welch' needs a model of tables, such as 'scalar' with model.blocks = 0"
            )
        return self

    @model_validator(mode="after")
    def _next_words_fit(self) -> RunConfig:
        if self.next_words.teacher is None:
            return self
        if not self.model.predicts_next_words:
            raise ValueError("next_words.teacher needs model.kind = 'neural', or 'linear' or 'mlp' with model.blocks")
        if self.next_words.samples > self.next_words.drawn:
            raise ValueError(
                f"next_words.samples ({self.next_words.samples}) is more than next_words.drawn "
                f"({self.next_words.drawn})"
            )
        return self

    @model_validator(mode="after")
    def _initialization_fits(self) -> RunConfig:
        start, model = self.initialization, self.model
        if isinstance(start, BigramConfig) and (model.kind != "scalar" or not model.blocks):
            raise ValueError("initialization.kind = 'bigram' needs model.kind = 'scalar' and model.blocks")
        if not isinstance(start, LabelConfig):
            return self
        if not model.distillable:
            raise ValueError(f"initialization.kind = {start.kind!r} does not support model.kind = {model.kind!r}")
        if start.kind == "counts" and not model.assignable:
            raise ValueError(
                "initialization.kind = 'counts' needs model.kind = 'scalar' and model.blocks = 0: use 'lvd'"
            )
        if isinstance(start, LvdConfig) and (start.centroids or start.head) and not model.has_embeddings:
            raise ValueError("initialization.centroids and .head need model.kind linear, mlp or transformer, no blocks")
        if isinstance(start, LvdConfig) and start.head and not getattr(model, "factor_emission", False):
            raise ValueError("initialization.head needs model.factor_emission = true")
        if start.kmeans.tokens < model.num_states:
            raise ValueError(
                f"initialization.kmeans.tokens ({start.kmeans.tokens}) must be at least model.num_states "
                f"({model.num_states})"
            )
        return self
