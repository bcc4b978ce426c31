"""Llama networks from their weights, safetensors or GGUF: our own decoder, which needs no other library to run.

Most open language models of the size of a teacher have this shape. As a parameterization it can be recorded in a CUDA
graph, which those of transformers cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hmmlm.data.files import read_bytes
from hmmlm.errors import InputError
from hmmlm.initialization.decoder import Decoder, DecoderTeacher, rotate
from hmmlm.initialization.offsets import FastTokenizer

CONFIG, MODEL, TOKENIZER, SETTINGS = "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
SPREAD = 0.02  # of random weights, as Llama's are drawn
NAMES = {
    "embedding": ("embed_tokens", "token_embd"), "norm": ("norm", "output_norm"), "head": ("lm_head", "output"),
    "attention_norm": ("input_layernorm", "attn_norm"), "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "queries": ("self_attn.q_proj", "attn_q"), "keys": ("self_attn.k_proj", "attn_k"),
    "values": ("self_attn.v_proj", "attn_v"), "attended": ("self_attn.o_proj", "attn_output"),
    "gate": ("mlp.gate_proj", "ffn_gate"), "up": ("mlp.up_proj", "ffn_up"), "down": ("mlp.down_proj", "ffn_down"),
}  # fmt: skip
"""Ours, Hugging Face's and GGUF's."""
NORMAL = 1  # the type of a token in a GGUF that is a piece of text


@dataclass(frozen=True)
class LlamaShape:
    vocab_size: int
    hidden: int
    inner: int
    """Width of the perceptrons."""
    layers: int
    heads: int
    pairs: int
    """Heads of keys and values, each read by heads / pairs heads."""
    context: int
    base: float
    eps: float
    tied: bool
    first: int | None = None
    """The id that a text begins with."""

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Llama(Decoder):
    """Weights are as they come from the framework: give it its own with `load_state_dict(…, assign=True)`."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape.head_size, shape.base)
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        if not shape.tied:
            self.head = nn.Linear(shape.hidden, shape.vocab_size, bias=False)


class _Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        hidden, pairs = shape.hidden, shape.pairs * shape.head_size
        self.heads, self.pairs = shape.heads, shape.pairs
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(hidden, shape.eps) for _ in range(2))
        self.queries, self.attended = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.keys, self.values = nn.Linear(hidden, pairs, bias=False), nn.Linear(hidden, pairs, bias=False)
        self.gate, self.up = (nn.Linear(hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (  # [B,heads,T,D]
            linear(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for linear, heads in ((self.queries, self.heads), (self.keys, self.pairs), (self.values, self.pairs))
        )
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        readers = self.heads // self.pairs
        key, value = (each.unsqueeze(2).expand(-1, -1, readers, -1, -1).flatten(1, 2) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


# --- opening ------------------------------------------------------------------------------------------------------

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Names as in `Llama.state_dict`, and tensors."""


@dataclass(frozen=True)
class LlamaFiles:
    """A Llama on the disk."""

    shape: LlamaShape
    weights: Weights
    tokenizer: FastTokenizer | None
    """None where only transformers can read it."""

    def open(
        self, name: str, tokenizer: FastTokenizer, random: bool, device: torch.device, seed: int
    ) -> DecoderTeacher:
        with torch.device("meta"):
            model = Llama(self.shape)
        given = dict(_random_weights(model.state_dict(), seed) if random else self.weights())
        if "head.weight" not in given:  # as in a network saved without one
            model.head = None
        wanted = model.state_dict()
        missing = sorted(wanted.keys() - given.keys())
        if missing:
            raise InputError(
                f"the teacher {name} lacks {len(missing)} of its weights, such as {_foreign_name(missing[0], 0)}"
            )
        for key, tensor in wanted.items():
            if given[key].shape != tensor.shape:
                raise InputError(
                    f"the teacher {name} cannot be loaded: {_foreign_name(key, 0)} has the shape "
                    f"{list(given[key].shape)}, and by its configuration {list(tensor.shape)}"
                )
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model.load_state_dict({key: given.pop(key).to(device, dtype) for key in wanted}, assign=True)
        return DecoderTeacher(name, model, tokenizer, self.shape.context, device)


def _random_weights(wanted: dict[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for key, like in wanted.items():
        yield key, torch.ones(like.shape) if like.dim() == 1 else SPREAD * torch.randn(like.shape, generator=generator)


def _foreign_name(own: str, kind: int) -> str:
    """What Hugging Face (0) or GGUF (1) calls one of our parameters."""
    *block, name, weight = own.split(".")
    theirs = NAMES[name][kind]
    if block:
        return f"{('model.layers', 'blk')[kind]}.{block[1]}.{theirs}.{weight}"
    return f"{'model.' if kind == 0 and name != 'head' else ''}{theirs}.{weight}"


def llama_folder(folder: Path) -> LlamaFiles | None:
    """The Llama in a Hugging Face folder; None if what is there is another network, or has more than a Llama has."""
    try:
        config = json.loads(read_bytes(folder / CONFIG))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        odd = config.get("attention_bias") or config.get("mlp_bias") or config.get("quantization_config")
        if config["model_type"] != "llama" or odd or config.get("hidden_act", "silu") != "silu":
            return None
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            return None
        heads = config["num_attention_heads"]
        shape = LlamaShape(
            vocab_size=config["vocab_size"], hidden=config["hidden_size"], inner=config["intermediate_size"],
            layers=config["num_hidden_layers"], heads=heads, pairs=config.get("num_key_value_heads") or heads,
            context=config.get("max_position_embeddings", 2048),
            base=rope.get("rope_theta") or config.get("rope_theta", 10_000.0), eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False), first=config.get("bos_token_id"),
        )  # fmt: skip
    except (ValueError, KeyError, AttributeError, TypeError):
        return None  # transformers says what is wrong with it
    if (config.get("head_dim") or shape.head_size) != shape.head_size or shape.hidden % heads:
        return None
    files = sorted(folder.glob("*.safetensors"))
    if not files and next(folder.glob("*.bin"), None):
        return None
    return LlamaFiles(shape, lambda: _safetensors(files, shape), _folder_tokenizer(folder, shape.first))


def _safetensors(files: list[Path], shape: LlamaShape) -> Iterator[tuple[str, Tensor]]:
    with torch.device("meta"):
        ours = {_foreign_name(key, 0).removeprefix("model."): key for key in Llama(shape).state_dict()}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if (key := ours.get(name.removeprefix("model."))) is not None:
                        yield key, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"the teacher {path.parent} cannot be loaded: {path.name}: {error}") from None


def _folder_tokenizer(folder: Path, first: int | None) -> FastTokenizer | None:
    if (folder / TOKENIZER).exists():
        settings = json.loads(read_bytes(folder / SETTINGS)) if (folder / SETTINGS).exists() else None
        return FastTokenizer.from_file(folder / TOKENIZER, settings, first)
    path = folder / "tokenizer.model"
    return FastTokenizer.from_sentencepiece(path, first) if path.exists() else None


def save_llama(folder: Path, teacher: DecoderTeacher) -> None:
    """A Llama as a Hugging Face folder with weights in float16, which opens in seconds where a GGUF takes a minute."""
    model, tokenizer = teacher.model, teacher.tokenizer
    assert isinstance(model, Llama) and isinstance(tokenizer, FastTokenizer)
    shape = model.shape
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "float16",
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.pairs,
        "max_position_embeddings": shape.context, "rope_theta": shape.base, "rms_norm_eps": shape.eps,
        "tie_word_embeddings": shape.tied, "bos_token_id": tokenizer.before,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_foreign_name(key, 0): t.cpu().half().contiguous() for key, t in model.state_dict().items()}
    save_file(tensors, folder / MODEL, {"format": "pt"})
    tokenizer.save(folder / TOKENIZER, folder / SETTINGS)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


# --- GGUF ---------------------------------------------------------------------------------------------------------


def llama_gguf(path: Path) -> LlamaFiles | None:
    """The Llama in a GGUF file; None if it is of another architecture. Needs the package gguf."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # of numpy and of its own, by where the file ends
        raise InputError(f"the teacher {path} cannot be loaded: it is no whole GGUF file ({error})") from None

    def field(name: str, default: Any = None) -> Any:
        found = reader.fields.get(name)
        return default if found is None else found.contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    turned = field("llama.rope.dimension_count")
    if field("general.architecture") != "llama" or "rope_freqs.weight" in tensors or field("llama.rope.scaling.type"):
        return None
    if turned not in (None, hidden // heads):
        return None
    tokens = field("tokenizer.ggml.tokens")
    shape = LlamaShape(
        vocab_size=len(tokens), hidden=hidden, inner=field("llama.feed_forward_length"),
        layers=field("llama.block_count"), heads=heads, pairs=field("llama.attention.head_count_kv", heads),
        context=field("llama.context_length"), base=field("llama.rope.freq_base", 10_000.0),
        eps=field("llama.attention.layer_norm_rms_epsilon"), tied="output.weight" not in tensors,
        first=field("tokenizer.ggml.bos_token_id"),
    )  # fmt: skip

    def weight(key: str) -> tuple[str, Tensor]:
        tensor = tensors[_foreign_name(key, 1)]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".queries." in key or ".keys." in key:  # pairs that are turned lie side by side there
            values = values.unflatten(0, (-1, shape.head_size // 2, 2)).transpose(1, 2).flatten(0, 2)
        return key, values

    def weights() -> Iterator[tuple[str, Tensor]]:
        with torch.device("meta"):
            keys = [key for key in Llama(shape).state_dict() if _foreign_name(key, 1) in tensors]
        with ThreadPoolExecutor() as pool:
            yield from pool.map(weight, keys)

    if field("tokenizer.ggml.model") == "llama":  # sentencepiece
        special = [kind != NORMAL for kind in field("tokenizer.ggml.token_type")]
        scores = field("tokenizer.ggml.scores")
        return LlamaFiles(shape, weights, FastTokenizer.from_pieces(tokens, scores, special, shape.first))
    beside = _folder_tokenizer(path.parent, shape.first)  # which may be of another file there
    return LlamaFiles(shape, weights, beside if beside is not None and beside.has_pieces(tokens) else None)
