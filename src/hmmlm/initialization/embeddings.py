"""Contextual embeddings of a student's tokens by a teacher, whatever the two tokenizers are."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.errors import InputError
from hmmlm.initialization.alignment import align_texts, same_tokens, student_spans
from hmmlm.initialization.decoder import layer_index
from hmmlm.initialization.teacher import Teacher

Align = Literal["read", "predict"]
"""read: the state at the token itself; predict: the state that predicts it, one position before."""


def student_embeddings(
    teacher: Teacher, student_tokenizer: Tokenizer, tokens: Tensor, *, align: Align, layer: int = -1
) -> Tensor:
    """The teacher's embedding [B,T,H] of every token of chunks [B,T] of the student's tokens; zeros where it is −1.

    Where both have the same tokens, the teacher reads the chunk as it is; otherwise it reads its text, and each of the
    student's tokens has the state of the last teacher token that overlaps it (read), or of the last one that ends
    before it begins (predict). Every chunk is read after the teacher's beginning-of-text token if it has one; if it
    has none, the first token's prediction is the first state.
    """
    if align not in get_args(Align):
        raise InputError(f"unknown alignment {align!r}: use 'read' or 'predict'")
    layer = layer_index(layer, teacher.layers)
    tokens = tokens.cpu()
    if same_tokens(teacher.tokenizer, student_tokenizer):  # type: ignore[arg-type] # protocols say nothing of hashing
        places = torch.arange(tokens.shape[1]).expand(tokens.shape) - int(align == "predict")
        given = list(tokens.numpy())
    else:
        students = [student_spans(student_tokenizer, row) for row in tokens.numpy()]
        given, places = align_texts(teacher.tokenizer, students, align)
    return _gather(teacher, given, places, tokens >= 0, layer)


def _gather(teacher: Teacher, given: list[np.ndarray], places: Tensor, known: Tensor, layer: int) -> Tensor:
    """States [B,T,H] at `places` [B,T] of the rows `given`; place −1 is the beginning of text.

    The odd row that is longer than the teacher can read is read in pieces: a rare long word must not end a long run.
    """
    before, after = teacher.tokenizer.before, teacher.tokenizer.after
    lead = [] if before is None else [before]
    trail = [] if after is None else [after]
    room = teacher.context - len(lead) - len(trail)
    usual = int(np.median([len(row) for row in given]))
    if usual > room:
        raise InputError(
            f"the teacher {teacher.name} reads at most {room} tokens at once, and a chunk of {known.shape[1]} of the "
            f"student's tokens is usually {usual} of its own: use shorter chunks (batches.length)"
        )
    pieces = [[row[i : i + room] for i in range(0, max(1, len(row)), room)] for row in given]
    first = torch.tensor([0, *map(len, pieces)]).cumsum(0)[:-1, None]  # [B,1]: where the pieces of a row begin
    rows = [piece for row in pieces for piece in row]
    # filled as an array: a tensor a row and padding them takes longer than a small teacher
    block = np.full((len(rows), len(lead) + max(map(len, rows)) + len(trail)), -1, dtype=np.int64)
    block[:, : len(lead)] = lead
    for line, row in zip(block, rows, strict=True):
        end = len(lead) + len(row)
        line[len(lead) : end] = row
        line[end : end + len(trail)] = trail
    states = teacher.embed(torch.from_numpy(block), layer)
    within = (places - places.clamp(min=0) // room * room + len(lead)).clamp(min=0)
    piece = first + places.clamp(min=0) // room
    found = states[piece.to(states.device), within.to(states.device)]
    return found.masked_fill(~known.to(states.device)[..., None], 0.0)
