"""A tiny causal model of transformers with random weights."""

from typing import Any

import pytest
import torch


def tiny_llama(vocab_size: int, eos: int, pad: int, seed: int = 0) -> Any:
    """Return a Llama of one layer; skip the test if transformers is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            eos_token_id=eos,
            pad_token_id=pad,
            bos_token_id=None,
        )
    ).eval()
