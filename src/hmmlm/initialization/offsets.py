"""Tokenizers of teachers: text to ids, and which characters of the text each id stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import tokenizers

from hmmlm.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from hmmlm.errors import InputError


class Encoding(NamedTuple):
    """`ids` [N] of a text, and `spans` [N,2]: token i stands for text[begin:end]."""

    ids: np.ndarray
    spans: np.ndarray


class TeacherTokenizer(Protocol):
    """What aligning with a teacher needs of its tokenizer."""

    pieces: Sequence[str]
    """How each id is shown: two tokenizers with the same pieces speak of the same tokens."""
    before: int | None
    """Read before every text: the beginning-of-text token, or [CLS]."""
    after: int | None
    """Read after every text: [SEP]."""
    unk_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Without `before` and `after`."""


class FastTokenizer:
    """A Hugging Face tokenizer; with `line_end`, lines are encoded one by one and each line break is that token."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, before: int | None, after: int | None = None,
        unk_id: int | None = None, line_end: int | None = None,
    ) -> None:
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())  # the next line may add an eos to it
        shown = HuggingFaceTokenizer(copy)
        self.pieces: Sequence[str] = [shown.token(i) for i in range(size)]
        self.before, self.after, self.unk_id = before, after, unk_id
        self._tokenizer, self._line_end = tokenizer, line_end
        tokenizer.no_truncation()  # sentence encoders ask for both
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "</s>" in a text is text, not the end of it

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        if self._line_end is not None:
            return [self._lines(text, self._line_end) for text in texts]
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Encoding(np.array(e.ids, dtype=np.int64), _spans(e.offsets)) for e in encoded]

    def _lines(self, text: str, line_end: int) -> Encoding:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        place = 0
        lines = text.split("\n")
        for encoded in self._tokenizer.encode_batch(lines, add_special_tokens=False):
            if place:  # after the first line: the break before this one
                ids.append(line_end)
                spans.append((place - 1, place))
            ids += encoded.ids
            spans += [(place + begin, place + end) for begin, end in encoded.offsets]
            place += len(lines.pop(0)) + 1
        return Encoding(np.array(ids, dtype=np.int64), _spans(spans))


class PlainTokenizer:
    """A word or sentencepiece tokenizer: only for students that share it, because it does not say where tokens lie."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.pieces: Sequence[str] = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
        self.before: int | None = tokenizer.eos_id
        self.after: int | None = None
        self.unk_id = tokenizer.unk_id
        self._kind = tokenizer.kind

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        raise InputError(
            f"the teacher's tokenizer is a {self._kind} one, which gives no character offsets: "
            "give the student the same tokenizer (tokenizer.kind = 'file'), or train a teacher with a bpe one"
        )


def own_tokenizer(tokenizer: Tokenizer, folder: Path) -> TeacherTokenizer:
    """Of a teacher trained by hmmlm, saved in `folder`: every line ends with eos, and every chunk begins after one."""
    if tokenizer.kind != "huggingface":
        return PlainTokenizer(tokenizer)
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return FastTokenizer(fast, before=tokenizer.eos_id, unk_id=tokenizer.unk_id, line_end=tokenizer.eos_id)


def _spans(offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(offsets, dtype=np.int64).reshape(-1, 2)
