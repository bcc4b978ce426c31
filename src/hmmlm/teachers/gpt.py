"""GPT: the small decoder-only transformer that `hmmlm teacher` trains.

Pre-norm blocks with causal attention and rotary positions; the output head is tied to the token embeddings. Every chunk
of text is read after an eos token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from hmmlm.data.files import parse_json
from hmmlm.data.modelfolder import CONFIG, MODEL, load_model, load_network, require_size, save_model
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.ops.target_log_probs import target_log_probs
from hmmlm.section import Layers, ModelSize, Negatives, Section, Width
from hmmlm.teachers.checks import check_vocabulary, layer_index
from hmmlm.teachers.tokenizers import TeacherTokenizer, gpt_tokenizer

FORMAT = "hmmlm teacher"
ROPE_BASE = 10_000.0


class GPTConfig(Section):
    """A small decoder-only transformer."""

    hidden: Width = 128
    """Width."""
    layers: Layers = 3
    """Blocks of attention and an MLP."""
    heads: Annotated[int, Field(gt=0, le=1_024)] = 4
    """Attention heads per block."""
    negatives: Negatives = 1_024
    """On a CPU, random words per training step that represent all words outside the batch; 0: use the whole
    vocabulary. Validation always does."""

    @model_validator(mode="after")
    def _heads_fit(self) -> GPTConfig:
        self.shape(1, 1)
        return self

    def shape(self, words: int, context: int) -> GPTShape:
        """Return the sizes of the network."""
        return GPTShape(words, self.hidden, self.layers, self.heads, context)

    def size(self, words: int) -> ModelSize:
        """Return a lower bound of what training holds (see `ModelConfig.size`)."""
        return ModelSize((words + self.layers * 12 * self.hidden) * self.hidden, 0)

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> GPT:
        """Create the network; `length` is its longest context."""
        return GPT(self.shape(vocabulary.vocab_size, length), vocabulary.eos_id, generator, self.negatives)


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT; `context` is the chunk length it is trained on."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"the teacher's {name} is {value!r}: it must be an integer of at least 1")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise InputError(
                f"hidden ({self.hidden}) must be a multiple of twice the heads ({self.heads}): rotary positions rotate "
                "pairs of dimensions of each head"
            )


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(
        self, shape: GPTShape, eos_id: int, generator: torch.Generator | None = None, negatives: int = 0
    ) -> None:
        super().__init__()
        self.shape, self.eos_id, self.negatives = shape, eos_id, negatives
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.blocks = nn.ModuleList(GPTBlock(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # the residual stream sums 2·layers of these outputs, so they start smaller
                scale = (2 * shape.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale, generator=generator)
            elif name.endswith("bias"):  # nn.Linear draws its bias from the global generator
                nn.init.zeros_(parameter)

    def embed_tokens(self, tokens: Tensor, layer: int) -> Tensor:
        """Compute contextual embeddings [B, T, H] of tokens [B, T]; layer 0 is the token embeddings."""
        return self.embed_vectors(self.embedding(tokens), layer)

    def embed_vectors(self, vectors: Tensor, layer: int) -> Tensor:
        """Compute contextual embeddings [B, T, H] of vectors [B, T, H] used in place of token embeddings."""
        angles = _rotary_angles(vectors.shape[1], self.shape.hidden // self.shape.heads, vectors.device)
        rotation = angles.cos(), angles.sin()
        hidden = vectors
        for block in self.blocks[:layer]:
            hidden = block(hidden, rotation)
        return self.norm(hidden) if layer == len(self.blocks) else hidden

    def score(self, tokens: Tensor, hidden: tuple[Tensor, ...] | None = None) -> tuple[Tensor, None]:
        """Compute the log-likelihood [B] in nats of tokens [B, T] read after an eos (−1 is padding), and no carry."""
        known = tokens.clamp(min=0)
        inputs = torch.cat([torch.full_like(known[:, :1], self.eos_id), known[:, :-1]], 1)
        features = self.embed_tokens(inputs, len(self.blocks)).flatten(0, 1)
        negatives = self.negatives if self.training else 0
        log_probs = target_log_probs(features, self.embedding.weight, tokens.flatten(), negatives)
        return log_probs.view_as(tokens).sum(1), None

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write weights, sizes and tokenizer into a folder, which `open_teacher` reads."""
        save_model(folder, FORMAT, asdict(self.shape), self.state_dict(), tokenizer)


class GPTBlock(nn.Module):
    """Causal self-attention and a perceptron of four times the width, each added to its input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention_in, self.attention_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp_in, self.mlp_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        projected = self.attention_in(self.attention_norm(x))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, T, D]
        attended = F.scaled_dot_product_attention(
            _rotate(query, *rotation), _rotate(key, *rotation), value, is_causal=True
        )
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def _rotary_angles(length: int, size: int, device: torch.device) -> Tensor:
    """Return the rotation angle [T, D/2] of each pair of a head's `size` dimensions at each position."""
    position = torch.arange(length, device=device, dtype=torch.float32)
    frequency = ROPE_BASE ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    return position[:, None] * frequency


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [..., T, D] by angles of cosine and sine [T, D/2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class GPTTeacher:
    """A GPT as a `Teacher`."""

    def __init__(self, name: str, model: GPT, tokenizer: TeacherTokenizer, device: torch.device) -> None:
        self.name, self.device, self.tokenizer = name, device, tokenizer
        shape = model.shape
        self.vocab_size, self.hidden_size, self.layers = shape.vocab_size, shape.hidden, shape.layers
        self.context = shape.context + 1  # a chunk and the eos before it
        check_vocabulary(name, len(tokenizer.pieces), self.vocab_size)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device, dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def embed(self, tokens: Tensor, layer: int = -1) -> Tensor:
        # attention is causal and padding is on the right: no token sees it
        return self.model.embed_tokens(tokens.to(self.device).clamp(min=0), layer_index(layer, self.layers))

    def head(self) -> Tensor:
        return self.model.embedding.weight


def is_gpt_folder(path: Path) -> bool:
    """Return whether `path` is a folder written by `GPT.save`, or a run folder that contains one."""
    return _read_config(path) is not None or _read_config(path / "best") is not None


def _gpt_folder(path: Path) -> Path:
    """Return the folder of a GPT: `path`, or its best one if it is a run."""
    return path if _read_config(path) is not None else path / "best"


def check_gpt(path: Path, random: bool) -> None:
    """Raise an InputError if the weights of the GPT in `path` are missing."""
    file = _gpt_folder(path) / MODEL
    if not random and not file.exists():
        raise InputError(f"the teacher {path} has no weights: {file} is missing; train it again, or use random weights")


def load_gpt(path: Path, *, random: bool, device: torch.device, seed: int) -> GPTTeacher:
    """Load the GPT in `path`, or the best one of the run in `path`; with `random`, weights drawn from `seed`."""
    check_gpt(path, random)
    folder, header, tensors, tokenizer = load_model(_gpt_folder(path), FORMAT, weights=not random)
    shape = GPTShape(*(require_size(folder / CONFIG, header, name) for name in GPTShape.__dataclass_fields__))
    if random:
        model = GPT(shape, tokenizer.eos_id, torch.Generator().manual_seed(seed))
    else:
        model = load_network(lambda: GPT(shape, tokenizer.eos_id), shape.layers, folder / MODEL, tensors)
    return GPTTeacher(str(folder), model, gpt_tokenizer(tokenizer, folder), device)


def _read_config(folder: Path) -> dict | None:
    """Return the configuration of a saved GPT; None if `folder` is something else."""
    if not (folder / CONFIG).is_file():
        return None
    try:
        content = parse_json(folder / CONFIG)
    except InputError:  # not ours: open_huggingface reports what is wrong with it
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None
