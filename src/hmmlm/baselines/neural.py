"""The neural language models that Chiu & Rush 2020 compare with: a feed-forward n-gram and an LSTM.

Both predict a word with the vectors they read words by (E [W, h], tied). They read windows of a text one after another;
what a window needs of those before it is a state, a tuple of tensors with a row a sequence.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hmmlm.data.files import read_json
from hmmlm.data.tokenizer import Tokenizer, load_tokenizer
from hmmlm.errors import InputError

Kind = Literal["feedforward", "lstm"]
State = tuple[Tensor, ...]
FORMAT, VERSION = "hmmlm baseline", 1
MODEL, CONFIG = "model.safetensors", "config.json"


class NeuralBaseline(nn.Module, ABC):
    """p(w_t | w_<t) = softmax(E f(w_<t)); a text is read as if it followed the word `first`."""

    def __init__(self, vocab_size: int, hidden: int, dropout: float, first: int) -> None:
        super().__init__()
        self.first = first
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.drop = nn.Dropout(dropout)

    def log_probs(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """tokens [B,T], −1 beyond a row's length → log p of each [B,T] (0 there), and the state after them.

        `state` may be of more rows than there are here: then these are the first of them."""
        rows = tokens.shape[0]
        state = self.start(rows) if state is None else tuple(part[:rows] for part in state)
        features, after = self.features(tokens.clamp(min=0), state)
        weight = self.embedding.weight
        logits = F.linear(self.drop(features), weight).flatten(0, 1).to(weight.dtype)  # bfloat16 in mixed precision
        losses = F.cross_entropy(logits, tokens.flatten(), ignore_index=-1, reduction="none")
        return -losses.view_as(tokens), tuple(part.detach() for part in after)

    @abstractmethod
    def start(self, rows: int) -> State:
        """The state before any text."""

    @abstractmethod
    def features(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """f [B,T,h] of what stands before each of tokens [B,T], and the state after the last."""

    def _first(self, rows: int, words: int) -> Tensor:
        return torch.full((rows, words), self.first, device=self.embedding.weight.device)

    def draw_(self, generator: torch.Generator | None) -> None:
        """Kaiming-uniform weights, biases 0, as in the paper."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_uniform_(parameter, generator=generator)
            else:
                nn.init.zeros_(parameter)


class FeedForward(NeuralBaseline):
    """f is `layers` linear layers, each with a ReLU, on the vectors of the last `order` − 1 words side by side."""

    def __init__(
        self, vocab_size: int, hidden: int, layers: int, order: int, dropout: float, first: int,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(vocab_size, hidden, dropout, first)
        if order < 2:
            raise InputError(f"the order of a feed-forward model is {order}: it must be 2 at least, to read a word")
        self.order = order
        sizes = [(order - 1) * hidden] + layers * [hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.draw_(generator)

    def start(self, rows: int) -> State:
        return (self._first(rows, self.order - 1),)

    def features(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        history = torch.cat([state[0], tokens], 1)
        vectors = self.drop(self.embedding(history[:, :-1])).unfold(1, self.order - 1, 1)  # [B,T,h,order−1]
        x = vectors.transpose(2, 3).flatten(2)
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(self.drop(x) if i else x))
        return x, (history[:, -(self.order - 1) :],)


class Lstm(NeuralBaseline):
    """f is an LSTM of `layers` layers over all the words before."""

    def __init__(
        self, vocab_size: int, hidden: int, layers: int, dropout: float, first: int,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__(vocab_size, hidden, dropout, first)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        self.draw_(generator)

    def start(self, rows: int) -> State:
        empty = self.embedding.weight.new_zeros(rows, self.lstm.num_layers, self.lstm.hidden_size)
        return self._first(rows, 1), empty, empty

    def features(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        last, hidden, cell = state
        given = torch.cat([last, tokens[:, :-1]], 1)
        before = tuple(part.transpose(0, 1).contiguous() for part in (hidden, cell))
        x, after = self.lstm(self.drop(self.embedding(given)), before)
        return x, (tokens[:, -1:], *(part.transpose(0, 1) for part in after))


def make_baseline(
    kind: Kind, vocab_size: int, *, hidden: int, layers: int, order: int, dropout: float, first: int,
    generator: torch.Generator | None = None,
) -> NeuralBaseline:  # fmt: skip
    """A model of a kind; `order` is for "feedforward" alone."""
    if kind == "lstm":
        return Lstm(vocab_size, hidden, layers, dropout, first, generator)
    return FeedForward(vocab_size, hidden, layers, order, dropout, first, generator)


def save_baseline(folder: Path, model: NeuralBaseline, settings: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Weights, the settings that `make_baseline` was given, and the tokenizer into `folder`, for `load_baseline`."""
    save_file({name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}, folder / MODEL)
    content = {"format": FORMAT, "version": VERSION, **settings, "fingerprint": tokenizer.fingerprint()}
    (folder / CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tokenizer.save(folder)


def load_baseline(folder: Path) -> tuple[NeuralBaseline, Tokenizer]:
    """What `save_baseline` wrote, without dropout."""
    content = read_json(folder / CONFIG)
    if content.pop("format", None) != FORMAT or content.pop("version", None) != VERSION:
        raise InputError(f"{folder / CONFIG} is not of a baseline that this hmmlm reads")
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint() != content.pop("fingerprint", None):
        raise InputError(f"the tokenizer in {folder} is not the one the model was trained with: put that one back")
    try:
        model = make_baseline(**content, vocab_size=tokenizer.vocab_size, first=tokenizer.eos_id)
        model.load_state_dict(load_file(folder / MODEL))
    except (OSError, SafetensorError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{folder} is damaged or of another model: {reason}") from None
    return model.eval(), tokenizer
