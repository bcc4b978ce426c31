"""Small dense models of the factored families."""

from typing import Any

import torch

from hmmlm.models.factored import DenseFactored, LinearConfig, MlpConfig, TransformerConfig

CONFIGS = {"linear": LinearConfig, "mlp": MlpConfig, "transformer": TransformerConfig}


def make_dense(
    kind: str, states: int, words: int, hidden: int | None = None, seed: int = 0, **fields: Any
) -> DenseFactored:
    """Return the dense model of a family; `fields` are those of its configuration, such as split or capacity."""
    config = CONFIGS[kind](num_states=states, **fields)
    width = config.width(words) if hidden is None else hidden
    return config.make_dense(words, width, torch.Generator().manual_seed(seed))
