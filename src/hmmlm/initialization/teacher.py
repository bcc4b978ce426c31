"""Teachers: networks whose contextual embeddings of a text an HMM starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.initialization.offsets import TeacherTokenizer
from hmmlm.initialization.transformer_lm import is_teacher, load_teacher


class Teacher(Protocol):
    """A language model that reads tokens of its own tokenizer. Layer 0 is its token embeddings, layer l what comes
    out of block l; negative layers count from the last."""

    name: str
    hidden_size: int
    layers: int
    vocab_size: int
    """Rows of its embedding table: ids below this can be read."""
    context: int
    """Most tokens it can read at once."""
    device: torch.device

    @property
    def tokenizer(self) -> TeacherTokenizer: ...

    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        """Contextual embeddings [B,T,H] of tokens [B,T] (−1: padding, not attended to) in a layer, without gradients;
        on `device`, in bfloat16 on a GPU, float32 on the CPU."""

    def head(self) -> Tensor:
        """The language-model head [V,H] (the token embeddings, where it has none of its own)."""


def open_teacher(
    path_or_name: str, *, random: bool = False, gguf_file: str | None = None, device: str = "auto", seed: int = 0
) -> Teacher:
    """A teacher from a folder that `hmmlm teacher` made, a Hugging Face folder or hub name, or a GGUF file (its path,
    or `gguf_file` in the folder or hub name).

    With `random`, one of the same shape with parameters drawn from `seed`, for which only the configuration and the
    tokenizer have to be there.
    """
    where = teacher_device(device)
    path = Path(path_or_name)
    if gguf_file is None and is_teacher(path):
        return load_teacher(path, random=random, device=where, seed=seed)
    from hmmlm.initialization.huggingface import open_huggingface  # here: transformers is optional and slow to import

    return open_huggingface(path_or_name, random=random, gguf_file=gguf_file, device=where, seed=seed)


def teacher_device(name: str) -> torch.device:
    """Where a teacher is trained or read: auto, cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device {name!r} for a teacher: use 'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("the teacher's device is 'cuda', but there is no CUDA device here: use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
