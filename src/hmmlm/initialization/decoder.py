"""What our decoders have in common: blocks over token embeddings, causal, with rotary positions; and as a teacher."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hmmlm.errors import InputError
from hmmlm.initialization.offsets import TeacherTokenizer


class Decoder(nn.Module):
    """`blocks` over `embedding`, normalised at the end; `head` where it is not tied to the embedding.

    A block maps (x [B,T,H], rotation) to [B,T,H].
    """

    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear | None

    def __init__(self, head_size: int, base: float = 10_000.0) -> None:
        """`head_size` of attention; `base` of the speeds at which rotary positions turn."""
        super().__init__()
        self.head_size, self.base, self.head = head_size, base, None

    def states(self, tokens: Tensor, layer: int) -> Tensor:
        """tokens [B,T] → contextual embeddings [B,T,H]: layer 0 the token embeddings, the last one normalised."""
        return self.read(self.embedding(tokens), layer)

    def read(self, x: Tensor, layer: int) -> Tensor:
        """The same from vectors [B,T,H] in the place of token embeddings."""
        turned = rotation(x.shape[1], self.head_size, self.base, x)
        for block in self.blocks[:layer]:
            x = block(x, turned)
        return self.norm(x) if layer == len(self.blocks) else x

    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def without_words(self) -> None:
        """Leave out what only words are read and predicted with, which is large."""
        self.embedding, self.head = nn.Identity(), None  # type: ignore[assignment]


def rotation(length: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T,D/2] of the angle by which each pair of a head's values is turned at each position."""
    place = torch.arange(length, device=like.device, dtype=torch.float32)
    speed = base ** -(torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angle = place[:, None] * speed
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of x [...,T,D]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class DecoderTeacher:
    """A `Decoder` as a `Teacher`; in bfloat16 on a GPU."""

    def __init__(
        self, name: str, model: Decoder, tokenizer: TeacherTokenizer, context: int, device: torch.device
    ) -> None:
        self.name, self.device, self.context, self.tokenizer = name, device, context, tokenizer
        self.vocab_size, self.hidden_size = model.embedding.weight.shape
        self.layers = len(model.blocks)
        check_vocabulary(name, tokenizer, self.vocab_size)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device, dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        # causal, and padding is on the right: nothing that is asked for sees it
        return self.model.states(tokens.to(self.device).clamp(min=0), layer_index(layer, self.layers))

    def head(self) -> Tensor:
        return self.model.head_weight()


def check_vocabulary(name: str, tokenizer: TeacherTokenizer, rows: int) -> None:
    if len(tokenizer.pieces) > rows:
        raise InputError(
            f"the tokenizer of the teacher {name} has {len(tokenizer.pieces)} tokens and its network {rows}: they do "
            "not belong together"
        )


def layer_index(layer: int, layers: int) -> int:
    """0 (token embeddings) to `layers` (the last); negative ones count from the last, −1."""
    if not -layers - 1 <= layer <= layers:
        raise InputError(
            f"the teacher has no layer {layer}: 0 is its token embeddings, 1 to {layers} its layers, -1 the last"
        )
    return layer if layer >= 0 else layers + 1 + layer
