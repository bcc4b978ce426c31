"""A word vocabulary, for text that is already tokenized (PTB, WikiText) and for raw English."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from hmmlm.data.files import is_integer, require_like, write_bytes
from hmmlm.errors import InputError

UNK = "<unk>"
EOS = "<eos>"
MAX_COUNTED = 1 << 22
"""Different words that are counted for a vocabulary, in about half a gigabyte; the rarest are dropped beyond."""
MAX_PIECES = 1 << 19
"""Largest number of pieces between spaces that a tokenizer keeps with their words, in 100 MB."""
FORMAT = "hmmlm word tokenizer"
VERSION = 1
Split = Literal["whitespace", "words"]

# A number with separators, or a word with inner apostrophes, hyphens and dots (isn't, read-only, os.path), or one mark.
_WORD = re.compile(rf"{UNK}|{EOS}|\d+(?:[.,]\d+)+\b|\w+(?:[.'’-]\w+)*|\.\.\.|[^\w\s]")
_NOT_SPACE = re.compile(r"\S+")
_NO_SPACE_BEFORE = frozenset([*",.;:!?)]}%…’”/", "..."])
_NO_SPACE_AFTER = frozenset("([{$#@“‘/")
_PAIRED = frozenset("\"'`")  # the same mark opens and closes a quotation
_SPACES = ("no_space_before", "no_space_after")  # of a file, and of `Spacing`


class Spacing(NamedTuple):
    """What the spaces of a line depend on: none before a comma, after an opening bracket or inside quotation marks."""

    joined: bool = True
    """Whether the next word follows without a space."""
    open_marks: frozenset[str] = frozenset()
    no_space_before: frozenset[str] = _NO_SPACE_BEFORE
    no_space_after: frozenset[str] = _NO_SPACE_AFTER

    def joins(self, word: str) -> bool:
        """Return whether `word` follows without a space."""
        return self.joined or word in self.open_marks or word in self.no_space_before

    def after(self, word: str) -> Spacing:
        """Return the spacing after `word`."""
        if word not in _PAIRED:
            return self._replace(joined=word in self.no_space_after)
        return self._replace(joined=word not in self.open_marks, open_marks=self.open_marks ^ {word})

    @classmethod
    def of_counts(cls, counts: Counter[str]) -> Spacing:
        """Return the spacing that most marks have in a text, from the counts of `count_words`."""
        marks = {word for word in counts if _is_mark(word)}
        before = {mark for mark in marks if counts[f" {mark}"] >= counts[mark]}
        after = {mark for mark in marks if counts[f"{mark} "] >= counts[mark]}
        return cls(True, frozenset(), (_NO_SPACE_BEFORE - marks) | before, (_NO_SPACE_AFTER - marks) | after)


ENGLISH = Spacing()


def _is_mark(word: str) -> bool:
    """Return whether a word is a punctuation mark, other than those that are paired."""
    return not (word[0].isalnum() or word[0] in "_ " or word[-1] == " " or word in _PAIRED or word in (UNK, EOS))


class WordTokenizer:
    """A tokenizer with a fixed word vocabulary; every other word is `<unk>`.

    split="whitespace" is for text that is already tokenized; "words" also splits off punctuation.
    """

    kind = "word"

    def __init__(
        self, words: Sequence[str], split: Split = "whitespace", lowercase: bool = False, spacing: Spacing = ENGLISH
    ) -> None:
        if split not in ("whitespace", "words"):
            raise InputError(f'unknown split {split!r}: use "whitespace" or "words"')
        self.words = list(words)
        self.split: Split = split
        self.lowercase = lowercase
        self.spacing = spacing  # at the start of a line
        self._marks = (
            spacing.no_space_before | spacing.no_space_after | _PAIRED if split == "words" else frozenset[str]()
        )
        self._ids = {word: i for i, word in enumerate(self.words)}
        for special in (UNK, EOS):
            if special not in self._ids:
                raise InputError(f"the word vocabulary has no {special}")
        if len(self._ids) != len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise InputError(f"the word vocabulary contains {twice!r} twice")
        self.unk_id = self._ids[UNK]
        self.eos_id = self._ids[EOS]
        self._pieces = _Pieces(self._ids, self.unk_id)

    @classmethod
    def train(
        cls,
        lines: Iterable[str],
        max_size: int | None = None,
        min_count: int | None = 1,
        *,
        split: Split = "whitespace",
        lowercase: bool = False,
    ) -> WordTokenizer:
        """Create a vocabulary of the `max_size` most frequent words that occur at least `min_count` times.

        The size includes `<unk>` and `<eos>`. A `min_count` of None means 2, so that `<unk>` occurs in training, or 1
        if the text already has `<unk>`.
        """
        counts = count_words(lines, split, lowercase)
        return cls.from_counts(counts, max_size, min_count, split=split, lowercase=lowercase)

    @classmethod
    def from_counts(
        cls,
        counts: Counter[str],
        max_size: int | None = None,
        min_count: int | None = 1,
        *,
        split: Split = "whitespace",
        lowercase: bool = False,
    ) -> WordTokenizer:
        """Create a vocabulary from the counts of words; see `train`."""
        if max_size is not None and max_size < 3:
            raise InputError(
                f"a vocabulary of {max_size} has no room for a word besides {UNK} and {EOS}: use 3 or more"
            )
        if not counts:
            raise InputError("the text to create a vocabulary from has no words")
        if min_count is None:
            min_count = 1 if UNK in counts else 2
        ranked = sorted((-n, w) for w, n in counts.items() if n >= min_count and " " not in w and w not in (UNK, EOS))
        words = [UNK, EOS] + [word for _, word in ranked]
        return cls(words[:max_size], split, lowercase, Spacing.of_counts(counts))

    @classmethod
    def covering(
        cls, counts: Counter[str], held_out: Counter[str], accepted: float, most: int
    ) -> tuple[WordTokenizer, float]:
        """Create a vocabulary, larger than usual if held-out words need it; return also the fraction that is unknown.

        It has 10,000 words that occur twice, or as many up to `most` as leave an `accepted` fraction unknown. A quarter
        of the words that occur once stays `<unk>`, so that it occurs in training.
        """
        usual, whole = cls.from_counts(counts, 10_000, None, split="words"), cls.from_counts(counts, split="words")
        once = sum(count == 1 and " " not in word for word, count in counts.items())
        most = min(most, whole.vocab_size - (once + 3) // 4)
        total = sum(count for word, count in held_out.items() if " " not in word)
        unknown, size = total - sum(held_out[word] for word in usual.words[2:]), usual.vocab_size
        while unknown > accepted * total and size < most:
            unknown -= held_out[whole.words[size]]
            size += 1
        return cls(whole.words[:size], "words", spacing=usual.spacing), unknown / max(1, total)

    def __repr__(self) -> str:
        return f"WordTokenizer(words={self.vocab_size}, split={self.split!r}, lowercase={self.lowercase})"

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        pieces = (text.lower() if self.lowercase else text).split()
        if self.split == "words":
            return list(chain.from_iterable(map(self._pieces.__getitem__, pieces)))
        get, unk = self._ids.get, self.unk_id
        return [get(word, unk) for word in pieces]

    def spans(self, text: str) -> list[tuple[int, int]]:
        place: Sequence[int] = range(len(text))  # of each character that is split, in the text as it was given
        if self.lowercase:
            place, text = [i for i, c in enumerate(text) for _ in c.lower()], text.lower()  # İ becomes two characters
        found = (_WORD if self.split == "words" else _NOT_SPACE).finditer(text)
        return [(place[match.start()], place[match.end() - 1] + 1) for match in found]

    def decode(self, ids: Sequence[int]) -> str:
        join = " ".join if self.split == "whitespace" else self._detokenize
        return "\n".join(join([self.token(i) for i in line]) for line in split_at(ids, self.eos_id))

    def _detokenize(self, words: Sequence[str]) -> str:
        out: list[str] = []
        spacing = self.spacing
        for word in words:
            out.append(word if spacing.joins(word) else f" {word}")
            spacing = spacing.after(word)
        return "".join(out)

    def token(self, id: int) -> str:
        return self.words[check_id(id, self.vocab_size)]

    def mark(self, id: int) -> str:
        """Return a token if it changes the spaces around words, "" otherwise."""
        return self.words[id] if self.words[id] in self._marks else ""

    def spell(self, id: int) -> bytes | None:
        """Return a word after a space; `Spacing` says where there is none. None for `<eos>` and `<unk>`."""
        return None if check_id(id, self.vocab_size) in (self.eos_id, self.unk_id) else f" {self.words[id]}".encode()

    def fingerprint(self) -> str:
        return fingerprint_of(self.kind, self.words, self.split, self.lowercase)

    def save(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, "split": self.split, "lowercase": self.lowercase}
        if self.split == "words":
            content |= {name: sorted(getattr(self.spacing, name)) for name in _SPACES}
        text = json.dumps({**content, "words": self.words}, ensure_ascii=False, indent=0)
        write_bytes(folder / "tokenizer.json", text.encode())

    @classmethod
    def from_json(cls, content: dict, where: Path) -> WordTokenizer:
        """Return the tokenizer in the JSON content of the file `where`."""
        if not is_integer(content.get("version"), VERSION):
            raise InputError(f"{where} has version {content.get('version')}; this hmmlm reads {VERSION}: update hmmlm")
        words = content.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError(f"{where} is damaged: its words are not a list of strings; save the tokenizer again")
        if not isinstance(content.get("lowercase"), bool):
            raise InputError(f"{where} is damaged: its lowercase is not true or false; save the tokenizer again")
        try:
            require_like(where, content, {name: [""] for name in _SPACES if name in content})
            spacing = Spacing(True, frozenset(), *(frozenset(content.get(n, getattr(ENGLISH, n))) for n in _SPACES))
            return cls(words, content.get("split", ""), content["lowercase"], spacing)
        except InputError as error:
            raise InputError(f"{where} is damaged: {error}") from None


class _Pieces(dict[str, tuple[int, ...]]):
    """The ids of the words of each piece of text between spaces, found when it is first looked up.

    No word has a space inside, and most pieces of a text occur again: looking them up is several times faster than
    searching the text for words.
    """

    def __init__(self, ids: dict[str, int], unk_id: int) -> None:
        super().__init__()
        self.ids, self.unk_id = ids, unk_id

    def __missing__(self, piece: str) -> tuple[int, ...]:
        if len(self) >= MAX_PIECES:
            self.clear()
        found = self[piece] = tuple(self.ids.get(word, self.unk_id) for word in _WORD.findall(piece))
        return found


def count_words(lines: Iterable[str], split: Split, lowercase: bool) -> Counter[str]:
    """Count the words of a text.

    Where marks are split off, f" {mark}" counts those that no space precedes, and f"{mark} " those that none follows:
    2 each beside a word, and 1 beside another mark, which may be what joins them.
    """
    pieces: Counter[str] = Counter()  # between spaces: see `_Pieces`
    for line in lines:
        pieces.update((line.lower() if lowercase else line).split())
        drop_rare(pieces)
    if split == "whitespace":
        return pieces
    counts: Counter[str] = Counter()
    while pieces:  # emptied, so that both take the room of one
        piece, count = pieces.popitem()
        words = _WORD.findall(piece)
        for word in words:
            counts[word] += count
        for before, after in pairwise(words):
            marks = _is_mark(before), _is_mark(after)
            if marks[0]:
                counts[f"{before} "] += count * (2 - marks[1])
            if marks[1]:
                counts[f" {after}"] += count * (2 - marks[0])
    return counts


def drop_rare(counts: Counter[str], most: int = MAX_COUNTED) -> None:
    """Drop the rarest words if there are more than `most` different ones, until half of that number are left.

    What is dropped may occur again, so that counts are lower bounds; words of a vocabulary are far more frequent.
    """
    rare = 0
    while len(counts) > (most // 2 if rare else most):
        rare += 1
        for word in [word for word, count in counts.items() if count <= rare and word not in (UNK, EOS)]:
            del counts[word]


def fingerprint_of(*content: object) -> str:
    """Return the first 16 hex digits of the sha256 of any JSON content."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check_id(id: int, vocab_size: int) -> int:
    """Return a token id as an int; raise an InputError if it is outside the vocabulary."""
    if not 0 <= id < vocab_size:
        raise InputError(f"token {id} is outside the vocabulary of {vocab_size}")
    return int(id)


def split_at(ids: Sequence[int], eos_id: int) -> list[list[int]]:
    """Split ids into lines without their eos; the ids after the last eos, possibly none, are the last line."""
    lines: list[list[int]] = [[]]
    for id in ids:
        if id == eos_id:
            lines.append([])
        else:
            lines[-1].append(int(id))
    return lines
