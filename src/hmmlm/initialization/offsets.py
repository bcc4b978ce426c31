"""Tokenizers of teachers: text to ids, and which characters of the text each id stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers

from hmmlm.data.files import read_bytes
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

    @classmethod
    def from_file(cls, path: Path, settings: dict[str, Any] | None, first: int | None) -> FastTokenizer:
        """Of a tokenizer.json; texts begin with the bos token of its `settings`, with `first` where there are none."""
        try:
            tokenizer = tokenizers.Tokenizer.from_str(read_bytes(path).decode())
        except Exception as error:  # tokenizers raises bare Exception
            reason = next(iter(str(error).splitlines()), "empty file")
            raise InputError(f"{path} is not a whole tokenizer.json: {reason}") from None
        if settings is None:
            return cls(tokenizer, before=first)
        names = [settings.get(name) for name in ("bos_token", "unk_token")]
        before, unknown = (name["content"] if isinstance(name, dict) else name for name in names)
        return cls(
            tokenizer, before=None if before is None else tokenizer.token_to_id(before),
            unk_id=None if unknown is None else tokenizer.token_to_id(unknown),
        )  # fmt: skip

    @classmethod
    def from_sentencepiece(cls, path: Path, first: int | None) -> FastTokenizer:
        """Of a sentencepiece `.model` of byte pairs, such as Llama's."""
        try:
            model = sentencepiece.SentencePieceProcessor(model_proto=read_bytes(path))
        except RuntimeError:
            raise InputError(f"{path} is not a whole sentencepiece model: get the file again") from None
        ids = range(model.vocab_size())
        special = [model.is_control(i) or model.is_unknown(i) or model.is_byte(i) for i in ids]
        return cls.from_pieces([model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids], special, first)

    @classmethod
    def from_pieces(
        cls, pieces: Sequence[str], scores: Sequence[float], special: Sequence[bool], first: int | None
    ) -> FastTokenizer:
        """Of sentencepiece's pieces: neighbours are joined to the piece of the highest score, `special` ones never."""
        ids = {piece: i for i, piece in enumerate(pieces)}
        merges: list[tuple[str, str]] = []
        for i in sorted(range(len(pieces)), key=lambda i: -scores[i]):
            piece = pieces[i]
            splits = () if special[i] else ((piece[:at], piece[at:]) for at in range(1, len(piece)))
            merges += sorted((s for s in splits if s[0] in ids and s[1] in ids), key=lambda s: (ids[s[0]], ids[s[1]]))
        unknown = "<unk>" if "<unk>" in ids else None
        tokenizer = tokenizers.Tokenizer(
            models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )  # fmt: skip
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        return cls(tokenizer, before=first, unk_id=None if unknown is None else ids[unknown])

    def save(self, path: Path, settings: Path) -> None:
        """For `from_file`, and for Hugging Face."""
        path.write_text(self._tokenizer.to_str(), encoding="utf-8")
        named = {"bos_token": self.before, "unk_token": self.unk_id}
        content = {name: None if i is None else self._tokenizer.id_to_token(i) for name, i in named.items()}
        settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **content}, indent=1) + "\n")

    def has_pieces(self, pieces: Sequence[str]) -> bool:
        """Whether these, in order, are its tokens."""
        return self._tokenizer.get_vocab(with_added_tokens=True) == {piece: i for i, piece in enumerate(pieces)}

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
