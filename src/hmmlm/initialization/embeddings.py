"""Contextual embeddings of a student's tokens by a teacher, whatever the two tokenizers are."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.errors import InputError
from hmmlm.initialization.alignment import align_texts, same_tokens, student_spans
from hmmlm.initialization.teacher import Teacher
from hmmlm.initialization.transformer_lm import layer_index

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
    """States [B,T,H] at `places` [B,T] of the rows `given`; place −1 is the beginning of text."""
    before, after = teacher.tokenizer.before, teacher.tokenizer.after
    lead = [] if before is None else [before]
    trail = [] if after is None else [after]
    rows = [np.concatenate([lead, row, trail]) for row in given]
    width = max(map(len, rows))
    if width > teacher.context:
        raise InputError(
            f"the teacher {teacher.name} reads at most {teacher.context} tokens at once, and a chunk of "
            f"{known.shape[1]} of the student's tokens is {width} of its own: use shorter chunks (batches.length)"
        )
    padded = torch.full((len(rows), max(width, 1)), -1, dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
    states = teacher.embed(padded, layer)
    index = (places + len(lead)).clamp(min=0).to(states.device)
    found = states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
    return found.masked_fill(~known.to(states.device)[..., None], 0.0)
