"""Alignment of a teacher's tokens with a student's by their character spans in the text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.data.words import split_at
from hmmlm.errors import InputError
from hmmlm.teachers.tokenizers import Encoding, TeacherTokenizer

MAX_UNALIGNED = 0.1
"""Largest fraction of a batch's student tokens that may be in no teacher token; stray symbols are harmless."""
MAX_UNKNOWN = 0.5
"""Largest fraction of unknown tokens in the teacher's input."""


class StudentText(NamedTuple):
    """The text of a chunk of student tokens.

    Attributes:
        text: the decoded chunk, with a line break for each eos.
        spans: [N, 2] character span of each token that is not padding.
        positions: [N] position of these tokens in the chunk.
        length: length of the chunk, padding included.
    """

    text: str
    spans: np.ndarray
    positions: np.ndarray
    length: int


@lru_cache(maxsize=8)
def token_pieces(tokenizer: Tokenizer) -> list[str]:
    """Return the display form of every token."""
    return [tokenizer.token(i) for i in range(tokenizer.vocab_size)]


@lru_cache(maxsize=8)
def same_tokens(teacher: TeacherTokenizer, student: Tokenizer) -> bool:
    """Return whether every student token is the teacher's token with the same id."""
    pieces = token_pieces(student)  # type: ignore[arg-type] # Tokenizer does not declare __hash__
    return pieces == list(teacher.pieces[: len(pieces)])


# --- spans of the student's tokens ----------------------------------------------------------------------------------


def locate_student(tokenizer: Tokenizer, chunk: np.ndarray) -> StudentText:
    """Decode a chunk [T] of student tokens (−1: padding) and locate each token in the text."""
    positions = np.flatnonzero(chunk >= 0)
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    begin = 0
    for number, line in enumerate(split_at(chunk[positions].tolist(), tokenizer.eos_id)):
        if number:
            spans.append((begin - 1, begin))
        text, line_spans = _locate_line(tokenizer, line)
        spans += [(begin + first, begin + last) for first, last in line_spans]
        texts.append(text)
        begin += len(text) + 1
    return StudentText("\n".join(texts), np.array(spans, dtype=np.int64).reshape(-1, 2), positions, len(chunk))


def _locate_line(tokenizer: Tokenizer, line: list[int]) -> tuple[str, list[tuple[int, int]]]:
    text = tokenizer.decode(line)
    pieces = token_pieces(tokenizer)  # type: ignore[arg-type] # as above
    spans = _spans_by_pieces(text, [pieces[i].replace("▁", " ") for i in line])
    return text, _spans_by_decoding(tokenizer, line, text) if spans is None else spans


def _spans_by_pieces(text: str, pieces: Sequence[str]) -> list[tuple[int, int]] | None:
    """Match pieces to the text one after the other; None if the text is not their concatenation.

    A space before a piece may be missing from the piece or from the text.
    """
    spans = []
    end = 0
    for piece in pieces:
        bare = piece.lstrip(" ")
        if piece and text.startswith(piece, end):
            begin, end = end, end + len(piece)
        elif bare and text.startswith(bare, end):  # decoding drops the space at the start of a line
            begin, end = end, end + len(bare)
        elif bare and text.startswith(" " + bare, end):  # pieces of a word tokenizer have no space
            begin, end = end + 1, end + 1 + len(bare)
        else:
            return None
        spans.append((begin, end))
    return spans if end == len(text) else None


def _spans_by_decoding(tokenizer: Tokenizer, line: list[int], text: str) -> list[tuple[int, int]]:
    """Locate each token by the text it adds when ever longer prefixes of the line are decoded.

    Tokens that form one character together all get the span of that character. A token that adds no text gets the span
    of the next character.
    """
    spans = []
    end = 0
    for i in range(len(line)):
        begin, decoded = end, tokenizer.decode(line[: i + 1])
        end = max(end, len(os.path.commonprefix([decoded, text])))  # noqa: RUF071 (characters, not path components)
        if begin == end:
            begin = max(0, min(begin, len(text) - 1))
        spans.append((begin, max(end, min(begin + 1, len(text)))))
    return spans


# --- the teacher's tokens at these spans ----------------------------------------------------------------------------


def align_texts(
    teacher: TeacherTokenizer, students: Sequence[StudentText], align: Literal["read", "predict"]
) -> tuple[list[np.ndarray], Tensor]:
    """Tokenize student texts with the teacher's tokenizer and align the two.

    Returns:
        The teacher's token ids of each text, and for each student token [B, T] the index of a teacher token; −1 is the
        beginning of the text. Padding has index 0.
    """
    encodings = teacher.encode_batch([student.text for student in students])
    _check_known(teacher, students, encodings)
    positions = np.zeros((len(students), max((s.length for s in students), default=0)), dtype=np.int64)
    total, unaligned = 0, list[tuple[int, int]]()
    for row, (student, encoding) in enumerate(zip(students, encodings, strict=True)):
        read, overlaps = reading_positions(student.spans, encoding.spans)
        chosen = read if align == "read" else predicting_positions(student.spans, encoding.spans)
        positions[row, student.positions] = chosen
        for i in np.flatnonzero(~overlaps):
            if _is_word(student, int(i)):
                unaligned.append((row, int(i)))
        total += len(overlaps)
    if len(unaligned) > MAX_UNALIGNED * total:
        row, first = unaligned[0]
        raise InputError(
            f"teacher and text do not align: {len(unaligned)} of {total} tokens of the student are in no token of the "
            f"teacher, the first {_excerpt(students[row], first)} at position {students[row].positions[first]} of "
            f"chunk {row}: use a teacher whose tokenizer covers this text"
        )
    return [encoding.ids for encoding in encodings], torch.from_numpy(positions)


def reading_positions(student: np.ndarray, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find for each student span [N, 2] the last teacher span [M, 2] that overlaps it.

    Returns:
        The index [N] and whether a teacher span overlaps [N]. If none does (whitespace that the teacher drops), the
        index is that of the last teacher span before the student's, −1 if there is none.
    """
    nonempty = np.flatnonzero(teacher[:, 0] < teacher[:, 1])
    begins, ends = teacher[nonempty].T
    last = np.searchsorted(begins, student[:, 1], side="left") - 1  # the last that begins before the student's ends
    overlaps = last >= 0
    overlaps[overlaps] = ends[last[overlaps]] > student[overlaps, 0]
    return _original_index(last, nonempty), overlaps


def predicting_positions(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Find for each student span [N, 2] the last teacher span [M, 2] that ends at or before its begin; −1: none."""
    nonempty = np.flatnonzero(teacher[:, 0] < teacher[:, 1])
    # tokens of one character share its span or overlap, so ends are made monotone before the search
    ends = np.maximum.accumulate(teacher[nonempty, 1])
    return _original_index(np.searchsorted(ends, student[:, 0], side="right") - 1, nonempty)


def _original_index(index: np.ndarray, nonempty: np.ndarray) -> np.ndarray:
    """Convert indices among the nonempty spans to indices among all spans; −1 stays −1."""
    return np.append(nonempty, -1)[index]


def _is_word(student: StudentText, i: int) -> bool:
    begin, end = student.spans[i]
    return any(map(str.isalnum, student.text[begin:end]))


def _excerpt(student: StudentText, i: int) -> str:
    begin, end = student.spans[i]
    return f"{student.text[begin:end]!r} (in {student.text[max(0, begin - 15) : end + 15]!r})"


def _check_known(teacher: TeacherTokenizer, students: Sequence[StudentText], encodings: Sequence[Encoding]) -> None:
    """Raise an InputError if most of the teacher's tokens are unknown."""
    if teacher.unk_id is None:
        return
    unknown = [np.flatnonzero(encoding.ids == teacher.unk_id) for encoding in encodings]
    count, total = sum(map(len, unknown)), sum(len(encoding.ids) for encoding in encodings)
    if count > MAX_UNKNOWN * total:
        row = next(row for row, found in enumerate(unknown) if len(found))
        begin, end = encodings[row].spans[unknown[row][0]]
        raise InputError(
            f"teacher and text do not align: {count} of {total} tokens that the teacher reads are unknown to it, the "
            f"first {students[row].text[begin:end]!r} in chunk {row}: use a teacher whose tokenizer covers this text"
        )
