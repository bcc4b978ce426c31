"""Samples of a causal language model's texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hmmlm.data.tokenizers import HuggingFaceTokenizer
from hmmlm.errors import InputError
from hmmlm.teachers.checks import check_vocabulary
from hmmlm.teachers.gpt import is_gpt_folder
from hmmlm.teachers.huggingface import fast_tokenizer, load_network

CHECK_EVERY = 16  # steps between two looks at which texts have ended: each waits for the device
KEPT_ROWS = 0.8  # largest fraction of texts still going on at which those that have ended are removed from the batch
# Without cuDNN, which plans attention anew for every number and length of texts: 40 ms per token instead of 7 ms.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WIDTH = 128  # tokens of a block of the vocabulary: a draw sums blocks, then the tokens of one


class SampledText(NamedTuple):
    """A sampled text: `tokens` [T], the end token included if the text has ended, and their `log_probs` [T]."""

    tokens: np.ndarray
    log_probs: np.ndarray


class TextSampler:
    """A causal language model with its own tokenizer, which texts are sampled from.

    Attributes:
        vocab_size: tokens of the tokenizer; rows of the embedding table beyond them are never drawn.
        context: maximum number of tokens of prompt and text together.
        ends: tokens that end a text: the end-of-text tokens, and the beginning-of-text token, with which some models
            start the next text instead.
        eos: the tokenizer's own end-of-text token.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, device: torch.device) -> None:
        self.name, self.device, self._tokenizer = name, device, tokenizer
        self._fast = fast_tokenizer(name, tokenizer)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        config = self.model.config.get_text_config()
        self.context = int(getattr(config, "max_position_embeddings", None) or 1 << 31)
        self.vocab_size = len(self._fast.pieces)
        check_vocabulary(name, self.vocab_size, self.model.get_input_embeddings().weight.shape[0])
        self.eos, self.ends = self._find_ends(config)
        if "past_key_values" not in inspect.signature(self.model.forward).parameters:
            raise InputError(f"the model {name} keeps no key-value cache, so it cannot be sampled: use a transformer")
        self._parameters = inspect.signature(self.model.forward).parameters.keys()

    def _find_ends(self, config: Any) -> tuple[int, list[int]]:
        sources = [self._tokenizer, config, getattr(self.model, "generation_config", None)]
        found = [value for source in sources for value in _as_list(getattr(source, "eos_token_id", None))]
        eos = [token for token in dict.fromkeys(found) if 0 <= token < self.vocab_size]
        if not eos:
            raise InputError(
                f"the model {self.name} has no end-of-text token in its vocabulary: name one as eos_token in its "
                "tokenizer_config.json"
            )
        begin = _as_list(self._tokenizer.bos_token_id)
        return eos[0], [*eos, *(token for token in begin if token not in eos)]

    def student_tokenizer(self, eos: int) -> HuggingFaceTokenizer:
        """Return the model's tokenizer as the one of a student whose texts end with the token `eos`."""
        backend = tokenizers.Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        return HuggingFaceTokenizer(backend, backend.id_to_token(eos))

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt after the beginning-of-text token; "": that token alone."""
        begin = _as_list(self._tokenizer.bos_token_id) or [self.eos]
        return [*begin, *self._fast.encode_batch([text])[0].ids.tolist()]

    def bytes_per_text(self, length: int) -> int:
        """Return the size of the key-value cache of one text of `length` tokens, with as much again for its growth."""
        config = self.model.config.get_text_config()
        heads = int(getattr(config, "num_attention_heads", 1))
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kept = int(getattr(config, "num_key_value_heads", None) or heads) * width
        return 2 * 2 * int(config.num_hidden_layers) * kept * length * self.model.dtype.itemsize

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Sequence[int]], length: int, seed: int, on_tokens: Callable[[int], None]
    ) -> list[SampledText]:
        """Draw one continuation of each prompt (tokens, at least one), of at most `length` tokens.

        A text depends on the seed, its row and the prompts. `on_tokens` is called often with the number of new tokens.
        """
        uniform = torch.rand(length, len(prompts), generator=torch.Generator().manual_seed(seed)).to(self.device)
        ends = torch.tensor(self.ends, device=self.device)
        tokens = torch.full((len(prompts), length), -1, device=self.device)
        log_probs = torch.zeros(len(prompts), length, device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        from hmmlm.teachers.growing_cache import grow_in_place  # loads transformers

        read, mask = _left_padded(prompts, self.device)
        cache: Any = None
        counted = torch.zeros((), dtype=torch.int64, device=self.device)
        for step in range(length):
            logits, cache = self._next(read, mask, cache)
            if step == 0:
                grow_in_place(cache)
            drawn, log_probs[rows, step] = draw_tokens(logits, uniform[step, rows])
            tokens[rows, step] = drawn
            counted += (~ended).sum()
            ended |= torch.isin(drawn, ends)
            read = drawn[:, None]
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
            if (step + 1) % CHECK_EVERY == 0 or step + 1 == length:
                on_tokens(int(counted))
                counted.zero_()
                going = torch.nonzero(~ended).flatten()
                if not len(going):
                    break
                if len(going) <= KEPT_ROWS * len(rows):
                    cache.batch_select_indices(going)
                    rows, ended, read = rows[going], ended[going], read[going]
                    mask = None if mask is None else mask[going]
        return _cut(tokens.cpu().numpy(), log_probs.cpu().numpy(), self.ends)

    def _next(self, read: Tensor, mask: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits [B, V] after the tokens `read` [B, T], which follow those in the cache, and the cache."""
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if mask is not None:
            arguments["attention_mask"] = mask
            if "position_ids" in self._parameters:
                arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -read.shape[1] :]
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = 1
        with sdpa_kernel(ATTENTION):
            output = self.model(input_ids=read, **arguments)
        return output.logits[:, -1, : self.vocab_size], output.past_key_values


def open_sampler(name: str, *, gguf_file: str | None = None, device: torch.device) -> TextSampler:
    """Open a causal language model with transformers: a folder, a name on the hub or a GGUF file."""
    if is_gpt_folder(Path(name)):
        raise InputError(f"{name} is a run of `hmmlm teacher`: give a causal language model of Hugging Face")
    model, tokenizer = load_network(name, gguf_file, generates=True)
    return TextSampler(name, model, tokenizer, device)


def draw_tokens(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token per row of logits [B, V] by inverting the distribution function at `uniform` [B], below 1.

    Ten times faster on a CPU than torch.multinomial, which draws a random number per token of the vocabulary.

    Returns:
        Tokens [B], and their log-probabilities [B].
    """
    probs = logits.float().softmax(-1)
    rows = torch.arange(len(probs), device=probs.device)
    blocks = torch.nn.functional.pad(probs, (0, -probs.shape[1] % WIDTH)).view(len(probs), -1, WIDTH)
    block, rest = _invert(blocks.sum(-1), uniform)
    token, _ = _invert(blocks[rows, block], rest)
    drawn = block * WIDTH + token
    return drawn, probs[rows, drawn].log()


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of weights [B, N] the index at which the fraction `uniform` of their sum is reached.

    Also return the fraction of that entry's own weight which is reached, below 1.
    """
    sums = weights.double().cumsum(-1)
    target = uniform.double() * sums[:, -1]
    index = (sums <= target[:, None]).sum(-1, keepdim=True)
    before = sums.gather(1, index) - weights.gather(1, index)
    inside = (target[:, None] - before) / weights.gather(1, index)
    return index[:, 0], inside[:, 0].clamp(0, 1 - 2**-40)  # a product with the sum must not round to it


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return tokens [B, T] of prompts that all end in the last column, and 1 where there is a token, 0 elsewhere.

    The second is None if all prompts have the same length: attention is faster without a mask.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return tokens, None if min(map(len, prompts)) == longest else mask


def _cut(tokens: np.ndarray, log_probs: np.ndarray, ends: Sequence[int]) -> list[SampledText]:
    """Return the rows [B, T] up to and including their first end token."""
    found = np.isin(tokens, ends)
    lengths = np.where(found.any(1), found.argmax(1) + 1, tokens.shape[1])
    return [SampledText(t[:n], p[:n]) for t, p, n in zip(tokens, log_probs, lengths, strict=True)]


def _as_list(value: Any) -> list[int]:
    """Return token ids, given as none, one or several."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [int(value)]
