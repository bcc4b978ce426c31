"""Tokenizers with one protocol: word vocabularies, Hugging Face tokenizers, sentencepiece files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from hmmlm.data.files import parse_json, read_bytes, read_json, require_like, write_bytes
from hmmlm.data.words import EOS, FORMAT, UNK, WordTokenizer, check_id, fingerprint_of, split_at
from hmmlm.errors import InputError

__all__ = [
    "EOS_FILE",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "load_tokenizer",
]

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # "gpt2" or "owner/name"
_HUB_TIMEOUT_S = 10.0
EOS_FILE = "eos.json"
"""File beside a tokenizer.json that names its end-of-text token, where that is not one of the usual names."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PARTS = Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""What tokens of a trained BPE are parts of, as in GPT-2: a word, a number or marks after a space, or spaces."""
_MIN_COUNT = 5  # of two tokens that become one: keeps the vocabulary of a small text small
_ASCII = [chr(code) for code in range(0x20, 0x7F)]
_EOS_NAMES = ("</s>", EOS, "<|endoftext|>", "<|end_of_text|>")


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for.

    Printable characters of Latin-1 stand for themselves, the characters from 256 on for the other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer. `encode` adds no eos; `decode` writes each eos as a line break."""

    @property
    def kind(self) -> str: ...  # "word" | "huggingface" | "char" | "sentencepiece"
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def unk_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...
    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the first character of each token of `encode(text)` and the one after its last."""

    def decode(self, ids: Sequence[int]) -> str: ...
    def token(self, id: int) -> str:
        """Return one token for display, with a leading space as ▁."""

    def spell(self, id: int) -> bytes | None:
        """Return the bytes that a token adds to a line that has begun; None for a special token, `<unk>` included."""

    def fingerprint(self) -> str:
        """Return the first 16 hex digits of the vocabulary's sha256, which token files and checkpoints store."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`, for `load_tokenizer`."""


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`. Its end-of-text token is the eos; if it has none, `<eos>` is added.

    Args:
        tokenizer: the `tokenizers` object; its truncation and padding are switched off.
        eos: the end-of-text token, where it is not the first of the usual names that the vocabulary has.
    """

    kind = "huggingface"
    """Or "char", if every token is a character."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos: str | None = None) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()  # a tokenizer.json may enable both, which would damage a corpus
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "</s>" in a text is encoded as text, not as eos
        if eos is None and not any(tokenizer.token_to_id(name) is not None for name in _EOS_NAMES):
            tokenizer.add_special_tokens([EOS])
        self._vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        usual = next((name for name in _EOS_NAMES if name in self._vocabulary), None)
        if eos is not None and eos not in self._vocabulary:
            raise InputError(f"the end-of-text token {eos!r} is not in the vocabulary of the tokenizer")
        self._eos = eos if eos != usual else None
        self.eos_id = self._vocabulary[eos or usual or EOS]
        self.unk_id = self._vocabulary.get(getattr(tokenizer.model, "unk_token", None) or "")
        self.vocab_size = max(self._vocabulary.values()) + 1  # not the count: ids may have gaps
        if all(len(piece) == 1 for piece, id in self._vocabulary.items() if id not in (self.eos_id, self.unk_id)):
            self.kind = "char"

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer(vocab_size={self.vocab_size})"

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int | None) -> HuggingFaceTokenizer:
        """Train a BPE of at most `vocab_size` tokens; without a size, the tokens are characters.

        Tokens consist of characters of the lines, not of bytes: any tokens are a text, and none has a line break. A
        BPE also has all of ASCII, so that it can be asked for JSON; other characters are `<unk>`.
        """
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=UNK))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(_PARTS, behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size or 0,
            min_frequency=_MIN_COUNT,
            show_progress=False,
            special_tokens=[UNK, EOS],
            initial_alphabet=[] if vocab_size is None else _ASCII,
        )
        tokenizer.train_from_iterator(lines, trainer)
        if vocab_size is not None and (least := tokenizer.get_vocab_size()) > vocab_size:
            raise InputError(
                f"a vocabulary of {vocab_size:,} is too small for the characters of the text: use {least:,} or more"
            )
        return cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        return self._tokenizer.encode(text, add_special_tokens=False).offsets

    def decode(self, ids: Sequence[int]) -> str:
        lines = split_at([check_id(i, self.vocab_size) for i in ids], self.eos_id)
        return "\n".join(self._tokenizer.decode(line, skip_special_tokens=False) for line in lines)

    def token(self, id: int) -> str:
        piece = self._tokenizer.id_to_token(check_id(id, self.vocab_size))
        if piece is None:
            return f"<{id}>"  # an id without a token
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            text = self._tokenizer.decode([id], skip_special_tokens=False)
            if text and "\ufffd" not in text:  # an incomplete character stays in its byte form
                return "▁" + text[1:] if text.startswith(" ") else text
        return piece.replace(" ", "▁")

    def spell(self, id: int) -> bytes | None:
        added = self._added.get(check_id(id, self.vocab_size))
        piece = self._tokenizer.id_to_token(id)
        if piece is None or id in (self.eos_id, self.unk_id) or (added is not None and added.special):
            return None
        if added is not None:
            return added.content.encode()
        if self._byte_level:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if isinstance(self._tokenizer.decoder, decoders.BPEDecoder):
            raise InputError(
                "this tokenizer marks the ends of words, so a token has no text of its own: use one whose tokens begin "
                "words, such as a byte-level BPE"
            )
        anchor = self._anchor  # a token may decode to less at the start of a text
        before = len(self._tokenizer.decode(anchor, skip_special_tokens=False))
        return self._tokenizer.decode([*anchor, id], skip_special_tokens=False)[before:].encode()

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self._tokenizer.get_added_tokens_decoder()

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a")

    @cached_property
    def _decoder(self) -> str:
        return str(json.loads(self._tokenizer.to_str()).get("decoder"))

    @property
    def _byte_level(self) -> bool:
        return "'ByteLevel'" in self._decoder

    @property
    def _byte_fallback(self) -> bool:
        return "'ByteFallback'" in self._decoder

    def fingerprint(self) -> str:
        vocabulary = sorted((i, token) for token, i in self._vocabulary.items())
        return fingerprint_of(self.kind, vocabulary, self.eos_id)

    def save(self, folder: Path) -> None:
        write_bytes(folder / "tokenizer.json", self._tokenizer.to_str().encode())
        if self._eos is not None:
            write_bytes(folder / EOS_FILE, (json.dumps({"eos_token": self._eos}) + "\n").encode())


class SentencePieceTokenizer:
    """A sentencepiece `.model` file, such as Llama's."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        content = read_bytes(path)
        try:
            if not content:
                raise RuntimeError("empty file")
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise InputError(f"{path} is not a complete sentencepiece model: copy the file again") from None
        self.eos_id: int = self._processor.eos_id()
        self.unk_id: int | None = self._processor.unk_id()
        self.vocab_size: int = self._processor.vocab_size()
        if self.eos_id < 0:
            raise InputError(f"the sentencepiece model {path} has no end-of-sentence piece: train it with one")

    def __repr__(self) -> str:
        return f"SentencePieceTokenizer(vocab_size={self.vocab_size})"

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def spans(self, text: str) -> list[tuple[int, int]]:
        # Versions of sentencepiece report offsets differently. A piece that normalization has changed is not found.
        spans, end = [], 0
        for piece in self._processor.encode(text, out_type=str):
            surface = piece.replace("▁", " ").strip()
            start = text.find(surface, end) if surface else -1
            start, end = (end, end) if start < 0 else (start, start + len(surface))
            spans.append((start, end))
        return spans

    def decode(self, ids: Sequence[int]) -> str:
        lines = split_at([check_id(i, self.vocab_size) for i in ids], self.eos_id)
        return "\n".join(self._processor.decode(line) for line in lines)

    def token(self, id: int) -> str:
        return self._processor.id_to_piece(check_id(id, self.vocab_size))

    def spell(self, id: int) -> bytes | None:
        processor = self._processor
        if processor.is_control(check_id(id, self.vocab_size)) or processor.is_unknown(id) or processor.is_unused(id):
            return None
        piece = processor.id_to_piece(id)
        return bytes([int(piece[3:5], 16)]) if processor.is_byte(id) else piece.replace("▁", " ").encode()

    def fingerprint(self) -> str:
        return fingerprint_of(self.kind, [self.token(i) for i in range(self.vocab_size)], self.eos_id)

    def save(self, folder: Path) -> None:
        if (folder / "tokenizer.json").exists():
            raise InputError(f"{folder} already contains another tokenizer (tokenizer.json): choose another folder")
        write_bytes(folder / "tokenizer.model", self._processor.serialized_model_proto())


def find_tokenizer(name: Path) -> Tokenizer:
    """Return the tokenizer in a file or folder, or the one of that name on the Hugging Face hub."""
    if name.exists() or name.suffix in (".json", ".model") or not _HUB_NAME.fullmatch(str(name)):
        return load_tokenizer(name)
    import huggingface_hub as hub  # a dependency of tokenizers; its import is slow

    try:
        file = hub.try_to_load_from_cache(str(name), "tokenizer.json")
        if not isinstance(file, str):
            hub.model_info(str(name), timeout=_HUB_TIMEOUT_S)  # fails at once, where a download retries for a minute
            file = hub.hf_hub_download(str(name), "tokenizer.json")
    except Exception as error:  # of huggingface_hub or of its HTTP library: no common class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no tokenizer {name}: there is no such file, it is not in the cache of the Hugging Face hub, and the hub "
            f"does not supply it ({reason}): check the name and the connection, or give a tokenizer.json"
        ) from None
    return load_tokenizer(Path(file))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer in `folder` (tokenizer.json, else tokenizer.model), which may also be such a file."""
    path = folder
    if folder.is_dir():
        path = next((p for p in (folder / "tokenizer.json", folder / "tokenizer.model") if p.exists()), folder)
    if path.is_dir():
        raise InputError(f"no tokenizer in {folder}: it should contain tokenizer.json or tokenizer.model")
    if not path.exists():
        raise InputError(f"no tokenizer at {path}: give a folder, a tokenizer.json or a sentencepiece .model file")
    return SentencePieceTokenizer(path) if path.suffix == ".model" else _load_json(path)


def _load_json(path: Path) -> Tokenizer:
    """Return the word vocabulary or Hugging Face tokenizer in a JSON file."""
    content = parse_json(path)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return WordTokenizer.from_json(content, path)
    if not isinstance(content, dict) or "model" not in content:
        raise InputError(f"{path} is neither a word vocabulary of hmmlm nor a Hugging Face tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} is not a Hugging Face tokenizer that this version reads ({reason})") from None
    return HuggingFaceTokenizer(tokenizer, _read_eos(path.with_name(EOS_FILE)))


def _read_eos(path: Path) -> str | None:
    """Return the end-of-text token that a file names; None if there is no such file."""
    if not path.exists():
        return None
    content = read_json(path)
    require_like(path, content, {"eos_token": ""})
    return str(content["eos_token"])
