"""Which teacher tokens lie where the student's do: both are placed in the text by characters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.data.words import split_at
from hmmlm.errors import InputError
from hmmlm.initialization.offsets import Encoding, TeacherTokenizer

UNALIGNED = 0.1
"""Share of the student's words in a batch that the teacher may not see at all: a stray symbol is no reason to stop."""
UNKNOWN = 0.5
"""Share of unknown tokens in what the teacher reads above which it reads nothing of use."""


class Student(NamedTuple):
    """A chunk of the student's tokens as text; token `places[i]` of the chunk is text[spans[i, 0]:spans[i, 1]]."""

    text: str
    spans: np.ndarray  # [N,2]
    places: np.ndarray  # [N]: those that are not −1
    length: int


@lru_cache(maxsize=8)
def pieces_of(tokenizer: Tokenizer) -> list[str]:
    """How each token is shown."""
    return [tokenizer.token(i) for i in range(tokenizer.vocab_size)]


@lru_cache(maxsize=8)
def same_tokens(teacher: TeacherTokenizer, student: Tokenizer) -> bool:
    """Whether every token of the student is the teacher's token of the same id."""
    pieces = pieces_of(student)  # type: ignore[arg-type] # a protocol says nothing of hashing
    return pieces == list(teacher.pieces[: len(pieces)])


# --- where the student's tokens are -------------------------------------------------------------------------------


def student_spans(tokenizer: Tokenizer, chunk: np.ndarray) -> Student:
    """The text of a chunk [T] (−1 left out) and where in it each token is; eos is the line break."""
    places = np.flatnonzero(chunk >= 0)
    lines = split_at(chunk[places].tolist(), tokenizer.eos_id)
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    begin = 0
    for number, line in enumerate(lines):
        if number:
            spans.append((begin - 1, begin))
        text, found = _line_spans(tokenizer, line)
        spans += [(begin + a, begin + b) for a, b in found]
        texts.append(text)
        begin += len(text) + 1
    return Student("\n".join(texts), np.array(spans, dtype=np.int64).reshape(-1, 2), places, len(chunk))


def _line_spans(tokenizer: Tokenizer, line: list[int]) -> tuple[str, list[tuple[int, int]]]:
    text = tokenizer.decode(line)
    pieces = pieces_of(tokenizer)  # type: ignore[arg-type] # as above
    found = _by_pieces(text, [pieces[i].replace("▁", " ") for i in line])
    return text, _by_decoding(tokenizer, line, text) if found is None else found


def _by_pieces(text: str, pieces: Sequence[str]) -> list[tuple[int, int]] | None:
    """Spans where the text is its pieces one after the other, a space between words come or gone; else None."""
    spans = []
    end = 0
    for piece in pieces:
        bare = piece.lstrip(" ")
        if piece and text.startswith(piece, end):
            begin, end = end, end + len(piece)
        elif bare and text.startswith(bare, end):  # the first of a line: its space is not written
            begin, end = end, end + len(bare)
        elif bare and text.startswith(" " + bare, end):  # words, which have no space of their own
            begin, end = end + 1, end + 1 + len(bare)
        else:
            return None
        spans.append((begin, end))
    return spans if end == len(text) else None


def _by_decoding(tokenizer: Tokenizer, line: list[int], text: str) -> list[tuple[int, int]]:
    """Spans by what each token adds to the text of those before it.

    Bytes that are only together a character all have the span of that character, and a token that adds nothing, the
    character after it.
    """
    spans = []
    end = 0
    for i in range(len(line)):
        begin, so_far = end, tokenizer.decode(line[: i + 1])
        end = max(end, len(os.path.commonprefix([so_far, text])))  # noqa: RUF071 (characters are what we want)
        if begin == end:
            begin = max(0, min(begin, len(text) - 1))
        spans.append((begin, max(end, min(begin + 1, len(text)))))
    return spans


# --- the teacher's tokens beside them -----------------------------------------------------------------------------


def align_texts(
    teacher: TeacherTokenizer, students: Sequence[Student], align: Literal["read", "predict"]
) -> tuple[list[np.ndarray], Tensor]:
    """The teacher's tokens of each chunk, and for each of the student's tokens [B,T] the place of one of them.

    −1 is the beginning of the text. An InputError says where teacher and text do not align.
    """
    encodings = teacher.encode_batch([student.text for student in students])
    _check_known(teacher, students, encodings)
    places = np.zeros((len(students), max((s.length for s in students), default=0)), dtype=np.int64)
    words, unseen = 0, list[tuple[int, int]]()
    for row, (student, encoding) in enumerate(zip(students, encodings, strict=True)):
        read, seen = read_places(student.spans, encoding.spans)
        chosen = read if align == "read" else predict_places(student.spans, encoding.spans)
        places[row, student.places] = chosen
        for i in np.flatnonzero(~seen):
            if _is_word(student, int(i)):
                unseen.append((row, int(i)))
        words += len(seen)
    if len(unseen) > UNALIGNED * words:
        row, first = unseen[0]
        raise InputError(
            f"teacher and text do not align: {len(unseen)} of {words} tokens of the student are in no token of the "
            f"teacher, the first {_shown(students[row], first)} at position {students[row].places[first]} of chunk "
            f"{row}: use a teacher whose tokenizer covers this text"
        )
    return [encoding.ids for encoding in encodings], torch.from_numpy(places)


def read_places(student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each student span [N,2] the last teacher span [M,2] that overlaps it [N], and whether one does [N].

    Where none does (white space that a teacher leaves out), it is the last one before it, −1 if there is none.
    """
    solid = np.flatnonzero(teacher[:, 0] < teacher[:, 1])
    begins, ends = teacher[solid].T
    last = np.searchsorted(begins, student[:, 1], side="left") - 1  # the last that begins before the student's ends
    seen = last >= 0
    seen[seen] = ends[last[seen]] > student[seen, 0]
    return _original(last, solid), seen


def predict_places(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """For each student span [N,2] the last teacher span [M,2] that ends at or before its begin [N]; −1: none."""
    solid = np.flatnonzero(teacher[:, 0] < teacher[:, 1])
    # the tokens of one character share its span, or overlap: from the first that is not over, none is
    ends = np.maximum.accumulate(teacher[solid, 1])
    return _original(np.searchsorted(ends, student[:, 0], side="right") - 1, solid)


def _original(place: np.ndarray, solid: np.ndarray) -> np.ndarray:
    """Places among the spans that are not empty, as places among all; −1 stays."""
    return np.append(solid, -1)[place]


def _is_word(student: Student, i: int) -> bool:
    begin, end = student.spans[i]
    return any(map(str.isalnum, student.text[begin:end]))


def _shown(student: Student, i: int) -> str:
    begin, end = student.spans[i]
    return f"{student.text[begin:end]!r} (in {student.text[max(0, begin - 15) : end + 15]!r})"


def _check_known(teacher: TeacherTokenizer, students: Sequence[Student], encodings: Sequence[Encoding]) -> None:
    if teacher.unk_id is None:
        return
    unknown = [np.flatnonzero(encoding.ids == teacher.unk_id) for encoding in encodings]
    count, total = sum(map(len, unknown)), sum(len(encoding.ids) for encoding in encodings)
    if count > UNKNOWN * total:
        row = next(row for row, found in enumerate(unknown) if len(found))
        begin, end = encodings[row].spans[unknown[row][0]]
        raise InputError(
            f"teacher and text do not align: {count} of {total} tokens that the teacher reads are unknown to it, the "
            f"first {students[row].text[begin:end]!r} in chunk {row}: use a teacher whose tokenizer covers this text"
        )
