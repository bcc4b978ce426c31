"""A tiny causal language model of Hugging Face, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.teachers import word_level

WORDS = ["the", "cat", "dog", "bird", "sat", "ran", "on", "mat", "tree", "."]
BOS, EOS = 1, 2
"""Of the tokens [CLS] and [SEP]."""


def save_causal(folder: Path, end: int = EOS, rows: int = 13, context: int = 32, **special: str) -> Any:
    """Write a model of 13 tokens that ends about half of its texts of 30 tokens with the token `end`; return it.

    Args:
        rows: rows of its embedding table.
        context: maximum number of tokens.
        special: special tokens of the tokenizer.
    """
    import transformers

    special = special or {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=word_level(WORDS), unk_token="[UNK]", **special)
    words.save_pretrained(folder)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=rows,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=BOS if "bos_token" in special else None,
        eos_token_id=EOS if "eos_token" in special else None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        # Token embeddings are large and have a constant first dimension, so that the head has a bias there.
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = 2.0
        model.lm_head.weight.normal_()
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[end] = 0.0
        model.lm_head.weight[list({BOS, EOS} - {end}), 0] = -100.0
    model.eval().save_pretrained(folder)
    return model
