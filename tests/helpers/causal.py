"""A tiny causal language model of Hugging Face, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.teachers import word_level

WORDS = ["the", "cat", "dog", "bird", "sat", "ran", "on", "mat", "tree", "."]
BOS, EOS = 1, 2
"""Of the tokens [CLS] and [SEP]."""


def tiny_llama(vocab_size: int, eos: int | None, pad: int | None, seed: int = 0, **config: Any) -> Any:
    """Return a Llama of one layer, or as configured; skip the test if transformers is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"eos_token_id": eos, "pad_token_id": pad, "bos_token_id": None}
    config = {"vocab_size": vocab_size, **sizes, **special, **config}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


def save_causal(
    folder: Path,
    end: int = EOS,
    rows: int = 13,
    context: int = 32,
    words: Sequence[str] = WORDS,
    **special: str,
) -> Any:
    """Write a model that ends about half of its texts of 30 tokens with the token `end`; return it.

    Args:
        rows: rows of its embedding table.
        context: maximum number of tokens.
        words: ten of them; with more, `rows` too.
        special: special tokens of the tokenizer.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    special = special or {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=word_level(words), unk_token="[UNK]", **special)
    tokenizer.save_pretrained(folder)
    model = tiny_llama(
        rows,
        EOS if "eos_token" in special else None,
        None,
        seed=5,
        num_hidden_layers=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=BOS if "bos_token" in special else None,
    )
    with torch.no_grad():
        # Token embeddings are large and have a constant first dimension, so that the head has a bias there.
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = 2.0
        model.lm_head.weight.normal_()
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[end] = 0.0
        model.lm_head.weight[list({BOS, EOS} - {end}), 0] = -100.0
    model.save_pretrained(folder)
    return model
