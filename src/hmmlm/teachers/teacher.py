"""The Teacher protocol, and how to open a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hmmlm.device import pick_device
from hmmlm.teachers.checks import require_readers
from hmmlm.teachers.gpt import check_gpt, is_gpt_folder, load_gpt
from hmmlm.teachers.huggingface import locate, open_huggingface
from hmmlm.teachers.tokenizers import TeacherTokenizer


class Teacher(Protocol):
    """A pretrained language model with its own tokenizer.

    Layer 0 is the token embeddings, layer l the output of block l; −1 is the last layer.
    """

    name: str
    hidden_size: int
    layers: int
    vocab_size: int
    """Rows of the embedding table; token ids are below this."""
    context: int
    """Maximum number of tokens per sequence."""
    device: torch.device

    @property
    def tokenizer(self) -> TeacherTokenizer: ...

    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        """Compute contextual embeddings without gradients.

        Args:
            tokens: [B, T] token ids; −1 is padding, which is not attended to.
            layer: which layer's output to return.

        Returns:
            [B, T, H] on `device`; bfloat16 on a GPU, float32 on the CPU.
        """

    def head(self) -> Tensor:
        """Return the weights of the language-model head [V, H]; the token embeddings if there is no head."""


def open_teacher(
    path_or_name: str, *, random: bool = False, gguf_file: str | None = None, device: str = "auto", seed: int = 0
) -> Teacher:
    """Open a teacher.

    Args:
        path_or_name: a folder written by `hmmlm teacher`, a Hugging Face folder or hub name, or a GGUF file.
        random: use random weights drawn from `seed`; only the configuration and the tokenizer must exist.
        gguf_file: name of a GGUF file in the folder or hub repository.
        device: "auto", "cpu" or "cuda".
        seed: seed of the random weights.
    """
    target = pick_device(device)
    path = Path(path_or_name)
    if gguf_file is None and is_gpt_folder(path):
        return load_gpt(path, random=random, device=target, seed=seed)
    return open_huggingface(path_or_name, random=random, gguf_file=gguf_file, device=target, seed=seed)


def check_teacher(path_or_name: str, *, random: bool = False, gguf_file: str | None = None) -> None:
    """Raise an InputError if local files of a teacher are missing, without reading its weights."""
    path = Path(path_or_name)
    if gguf_file is None and is_gpt_folder(path):
        check_gpt(path, random)
    else:
        require_readers(path_or_name, gguf_file)
        locate(path_or_name, gguf_file, random)
