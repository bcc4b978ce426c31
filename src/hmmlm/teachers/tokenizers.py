"""Tokenizers of teachers: token ids of a text with their character offsets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import tokenizers

from hmmlm.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from hmmlm.errors import InputError


class Encoding(NamedTuple):
    """Token `ids` [N] of a text and their character `spans` [N, 2]: token i covers text[begin:end]."""

    ids: np.ndarray
    spans: np.ndarray


class TeacherTokenizer(Protocol):
    """The part of a teacher's tokenizer that alignment uses."""

    pieces: Sequence[str]
    """Display form of each id; two tokenizers with the same pieces have the same tokens."""
    prefix_id: int | None
    """Token placed before every text: the beginning-of-text token or [CLS]."""
    suffix_id: int | None
    """Token placed after every text: [SEP]."""
    unk_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenize texts, without prefix and suffix."""


class FastTokenizer:
    """A Hugging Face tokenizer with character offsets.

    Args:
        tokenizer: the `tokenizers` object; its truncation and padding are switched off.
        prefix_id, suffix_id, unk_id: see `TeacherTokenizer`.
        newline_id: if given, every line is encoded on its own and each line break becomes this token.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        prefix_id: int | None,
        suffix_id: int | None = None,
        unk_id: int | None = None,
        newline_id: int | None = None,
    ) -> None:
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())  # HuggingFaceTokenizer may add an eos token
        display = HuggingFaceTokenizer(copy)
        self.pieces: Sequence[str] = [display.token(i) for i in range(size)]
        self.prefix_id, self.suffix_id, self.unk_id = prefix_id, suffix_id, unk_id
        self._tokenizer, self._newline_id = tokenizer, newline_id
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "</s>" in a corpus is text, not the end-of-text token

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        if self._newline_id is not None:
            return [self._encode_lines(text, self._newline_id) for text in texts]
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_encoding(encoding.ids, encoding.offsets) for encoding in encodings]

    def _encode_lines(self, text: str, newline_id: int) -> Encoding:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        lines = text.split("\n")
        begin = 0
        for line, encoding in zip(lines, self._tokenizer.encode_batch(lines, add_special_tokens=False), strict=True):
            if begin:
                ids.append(newline_id)
                spans.append((begin - 1, begin))
            ids += encoding.ids
            spans += [(begin + first, begin + last) for first, last in encoding.offsets]
            begin += len(line) + 1
        return _encoding(ids, spans)


class TokenizerWithoutOffsets:
    """A word or sentencepiece tokenizer, which reports no character offsets: students must share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces: Sequence[str] = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
        self.prefix_id: int | None = tokenizer.eos_id
        self.suffix_id: int | None = None
        self.unk_id = tokenizer.unk_id
        self._kind = tokenizer.kind

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        raise InputError(
            f"the teacher's {self._kind} tokenizer gives no character offsets: give the student the same tokenizer "
            "(tokenizer.kind = 'file'), or train a teacher with a bpe tokenizer"
        )


def gpt_tokenizer(tokenizer: Tokenizer, folder: Path) -> TeacherTokenizer:
    """Return the tokenizer of a GPT saved in `folder`, which reads eos before every chunk and after every line."""
    if tokenizer.kind not in ("huggingface", "char"):
        return TokenizerWithoutOffsets(tokenizer)
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return FastTokenizer(fast, prefix_id=tokenizer.eos_id, unk_id=tokenizer.unk_id, newline_id=tokenizer.eos_id)


def _encoding(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Encoding:
    return Encoding(np.array(ids, dtype=np.int64), np.array(spans, dtype=np.int64).reshape(-1, 2))
