"""A small decoder-only transformer: the teacher that hmmlm can train itself.

Pre-norm blocks, rotary positions, causal attention, and a head tied to the token embeddings. Every chunk is read after
an eos, as a line is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hmmlm.data.files import read_bytes
from hmmlm.data.tokenizer import Tokenizer, load_tokenizer
from hmmlm.errors import InputError
from hmmlm.initialization.decoder import Decoder, DecoderTeacher, rotate
from hmmlm.initialization.offsets import own_tokenizer

FORMAT = "hmmlm teacher"
VERSION = 1
MODEL, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a transformer; it is trained on chunks of `context` tokens."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"a transformer's {name} is {value!r}: it must be a whole number, at least 1")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise InputError(
                f"hidden ({self.hidden}) must be a multiple of twice the heads ({self.heads}): rotary positions turn "
                "pairs of each head's values"
            )


class TransformerLM(Decoder):
    """log p of every token given those before it."""

    def __init__(self, shape: TransformerShape, generator: torch.Generator | None = None) -> None:
        super().__init__(shape.hidden // shape.heads)
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.blocks = nn.ModuleList(_Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # what is added to the residual stream 2·layers times starts smaller
                scale = (2 * shape.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale, generator=generator)
            elif name.endswith("bias"):  # drawn by the framework from another generator
                nn.init.zeros_(parameter)

    def log_likelihood(self, tokens: Tensor, first: int) -> Tensor:
        """Natural log-likelihood [B] of tokens [B,T] read after the token `first`; −1 beyond a row's length."""
        known = tokens.clamp(min=0)
        given = torch.cat([torch.full_like(known[:, :1], first), known[:, :-1]], 1)
        logits = F.linear(self.states(given, len(self.blocks)), self.embedding.weight)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), ignore_index=-1, reduction="none")
        return -losses.view_as(tokens).sum(1)


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention_in, self.attention_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp_in, self.mlp_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        projected = self.attention_in(self.attention_norm(x))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B,heads,T,D]
        mixed = F.scaled_dot_product_attention(
            rotate(query, *rotation), rotate(key, *rotation), value, is_causal=True
        )
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def save_teacher(folder: Path, model: TransformerLM, tokenizer: Tokenizer) -> None:
    """Weights, sizes and tokenizer into `folder`, for `open_teacher`."""
    save_file({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, folder / MODEL)
    content = {
        "format": FORMAT, "version": VERSION, **asdict(model.shape), "fingerprint": tokenizer.fingerprint()
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tokenizer.save(folder)


def is_teacher(path: Path) -> bool:
    """Whether `path` is a folder of `save_teacher`, or the folder of a run that made one."""
    return _config(path) is not None or _config(path / "best") is not None


def load_teacher(path: Path, *, random: bool, device: torch.device, seed: int) -> DecoderTeacher:
    """The teacher in `path`, or the best one of the run in `path`."""
    folder = path if _config(path) is not None else path / "best"
    content = _config(folder)
    assert content is not None  # the caller asked is_teacher
    if content.get("version") != VERSION:
        raise InputError(f"{folder / CONFIG} has version {content.get('version')!r}; this hmmlm reads {VERSION}")
    try:
        shape = TransformerShape(*(content[name] for name in TransformerShape.__dataclass_fields__))
    except KeyError as error:
        raise InputError(f"{folder / CONFIG} is damaged: it has no {error.args[0]}") from None
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint() != content.get("fingerprint"):
        raise InputError(f"the tokenizer in {folder} is not the one the teacher was trained with: put that one back")
    model = TransformerLM(shape, torch.Generator().manual_seed(seed))
    if not random:
        _load_weights(model, folder)
    context = shape.context + 1  # and the eos before a chunk
    return DecoderTeacher(str(folder), model, own_tokenizer(tokenizer, folder), context, device)


def _load_weights(model: TransformerLM, folder: Path) -> None:
    if not (folder / MODEL).exists():
        raise InputError(f"the teacher {folder} has no weights: {MODEL} is missing; train it again, or use random")
    try:
        model.load_state_dict(load_file(folder / MODEL))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{folder / MODEL} is truncated or of another model: {reason}") from None


def _config(folder: Path) -> dict | None:
    """The configuration of a saved teacher, None if `folder` is something else."""
    if not (folder / CONFIG).is_file():
        return None
    try:
        content = json.loads(read_bytes(folder / CONFIG))
    except ValueError:  # an unreadable or foreign file: others will say what is wrong with it
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None
