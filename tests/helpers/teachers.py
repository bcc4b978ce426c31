"""Small tokenizers for the tests of teachers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

LINES = ["the cat sat on the mat .", "the dog (not the cat) sat.", "naïve cats — “quoted” 😀 dogs!"]


def word_level(words: Sequence[str], lowercase: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer of runs of letters and runs of punctuation; whitespace is in no token."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lowercase:
        steps = [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
        tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def write_sentencepiece(path: Path) -> Path:
    """Train a sentencepiece model like Llama's, byte-fallback BPE, on the first two lines."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES[:2] * 20),
        model_writer=model,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    path.write_bytes(model.getvalue())
    return path
