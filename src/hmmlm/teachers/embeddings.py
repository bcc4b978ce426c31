"""Contextual embeddings of a student's tokens, computed by a teacher with any tokenizer."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.teachers.alignment import align_texts, locate_student, same_tokens
from hmmlm.teachers.checks import layer_index
from hmmlm.teachers.teacher import Teacher

Align = Literal["read", "predict"]
"""read: the hidden state at the token itself; predict: the hidden state that predicts it, one position earlier."""


def student_embeddings(
    teacher: Teacher, student_tokenizer: Tokenizer, tokens: Tensor, *, align: Align, layer: int = -1
) -> Tensor:
    """Compute the teacher's embedding of every student token.

    If both tokenizers have the same tokens, the teacher reads the ids as they are. Otherwise it reads the decoded text,
    and a student token gets the embedding of the last teacher token that overlaps it (read) or of the last one that
    ends before it begins (predict). Every chunk is read after the teacher's prefix token; without one, "predict" gives
    the first student token the first embedding of the chunk.

    Args:
        tokens: [B, T] chunks of student tokens; −1 is padding.
        align: see `Align`.
        layer: layer of the teacher.

    Returns:
        [B, T, H] embeddings; zeros for padding.
    """
    if align not in get_args(Align):
        raise InputError(f"unknown alignment {align!r}: use 'read' or 'predict'")
    layer = layer_index(layer, teacher.layers)
    tokens = tokens.cpu()
    if same_tokens(teacher.tokenizer, student_tokenizer):  # type: ignore[arg-type] # protocols declare no __hash__
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape) - int(align == "predict")
        rows = list(tokens.numpy())
    else:
        students = [locate_student(student_tokenizer, row) for row in tokens.numpy()]
        rows, positions = align_texts(teacher.tokenizer, students, align)
    return _embed_rows(teacher, rows, positions, tokens >= 0, layer)


def _embed_rows(teacher: Teacher, rows: list[np.ndarray], positions: Tensor, known: Tensor, layer: int) -> Tensor:
    """Embed rows of teacher tokens and return the embeddings [B, T, H] at `positions` [B, T]; −1 is the prefix.

    A row that exceeds the teacher's context is split, so that one rare long word does not end a long run.
    """
    tokenizer = teacher.tokenizer
    prefix = [] if tokenizer.prefix_id is None else [tokenizer.prefix_id]
    suffix = [] if tokenizer.suffix_id is None else [tokenizer.suffix_id]
    room = teacher.context - len(prefix) - len(suffix)
    typical = int(np.median([len(row) for row in rows]))
    if typical > room:
        raise InputError(
            f"the teacher {teacher.name} reads at most {room} tokens at once, and a chunk of {known.shape[1]} of the "
            f"student's tokens is usually {typical} of its own: use shorter chunks (batches.length)"
        )
    parts = [[row[i : i + room] for i in range(0, max(1, len(row)), room)] for row in rows]
    first_part = torch.tensor([0, *map(len, parts)]).cumsum(0)[:-1, None]  # [B, 1]
    flat = [part for row in parts for part in row]
    # one array for all rows: a tensor per row and padding would take longer than a small teacher
    block = np.full((len(flat), len(prefix) + max(map(len, flat)) + len(suffix)), -1, dtype=np.int64)
    block[:, : len(prefix)] = prefix
    for line, part in zip(block, flat, strict=True):
        end = len(prefix) + len(part)
        line[len(prefix) : end] = part
        line[end : end + len(suffix)] = suffix
    hidden = teacher.embed(torch.from_numpy(block), layer)
    part_index = positions.clamp(min=0) // room
    within = (positions - part_index * room + len(prefix)).clamp(min=0)
    found = hidden[(first_part + part_index).to(hidden.device), within.to(hidden.device)]
    return found.masked_fill(~known.to(hidden.device)[..., None], 0.0)
