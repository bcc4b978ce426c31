"""The neural language models that Chiu & Rush 2020 compare with: a feed-forward n-gram, LSTMs and a relaxed HMM.

Input and output embeddings are tied (E [W, h]). A text is read in consecutive windows; `Hidden`, a tuple of tensors
with a row per sequence, is passed from one window to the next.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from hmmlm.data.modelfolder import CONFIG, MODEL, load_model, load_network, save_model
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.ops.target_log_probs import target_log_probs
from hmmlm.section import Fraction, Layers, ModelSize, Negatives, Section, Width

Hidden = tuple[Tensor, ...]
Penalty = Annotated[float, Field(ge=0, le=1_000)]
FORMAT = "hmmlm baseline"


class BaselineModelConfig(Section, ABC):
    """A neural baseline."""

    hidden: Width = 256
    """Size of word embeddings and layers."""
    layers: Layers = 2
    """Layers between word embeddings and the prediction."""
    dropout: Fraction = 0.3
    """Dropout of word embeddings and of each layer's output."""
    negatives: Negatives = 1_024
    """On a CPU, random words per training step that represent all words outside the batch; 0: use the whole
    vocabulary. Validation and results always do."""

    def size(self, words: int) -> ModelSize:
        """Return a lower bound of what training holds (see `ModelConfig.size`)."""
        return ModelSize((words + self.layers * self.hidden) * self.hidden, 0)

    @abstractmethod
    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        """Create the network."""


class FeedForwardConfig(BaselineModelConfig):
    """A feed-forward network on the last words."""

    kind: Literal["feedforward"] = "feedforward"
    order: Annotated[int, Field(ge=2, le=100)] = 5
    """Words of an n-gram, the predicted one included."""

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        return FeedForward(self, vocabulary, generator)


class LstmConfig(BaselineModelConfig):
    """An LSTM over all previous words."""

    kind: Literal["lstm"] = "lstm"

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        return Lstm(self, vocabulary, generator)


class AwdLstmConfig(BaselineModelConfig):
    """An LSTM with dropout of its recurrent weights and the same dropout mask at every step (Merity et al. 2018)."""

    kind: Literal["awd-lstm"] = "awd-lstm"
    hidden: Width = 1_000
    """Size of the LSTM layers."""
    embedding: Width = 400
    """Size of word embeddings."""
    dropout: Fraction = 0.6
    """Dropout of the last layer's output."""
    input_dropout: Fraction = 0.6
    """Dropout of word embeddings."""
    layer_dropout: Fraction = 0.4
    """Dropout between layers."""
    word_dropout: Fraction = 0.1
    """Fraction of the vocabulary whose embeddings are zero as inputs, drawn for every batch."""
    weight_dropout: Fraction = 0.5
    """Dropout of the recurrent weights."""
    size_penalty: Penalty = 0.0
    """Weight of the mean square of the outputs in the loss, per token (Merity et al. 2018: 2)."""
    change_penalty: Penalty = 0.0
    """Weight of the mean squared change of the outputs from one token to the next (Merity et al. 2018: 1)."""

    def size(self, words: int) -> ModelSize:
        return ModelSize(words * self.embedding + (8 * self.layers - 4) * self.hidden**2, 0)

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        return AwdLstm(self, vocabulary, generator)


class RelaxedHmmConfig(BaselineModelConfig):
    """An HMM without its independence assumptions, which is a recurrent network (after Buys et al. 2018)."""

    kind: Literal["relaxed-hmm"] = "relaxed-hmm"
    hidden: Width = 900
    """Number of states."""
    layers: Annotated[int, Field(ge=1, le=1)] = 1
    """The filter is the only layer."""
    dropout: Fraction = 0.3
    """Dropout of the scores of a word as an input, and of the predicted distribution over states."""

    def build(self, vocabulary: Tokenizer, length: int, generator: torch.Generator | None) -> NeuralBaseline:
        return RelaxedHmm(self, vocabulary, generator)


class NeuralBaseline(nn.Module, ABC):
    """p(w_t | w_<t) = softmax(E f(w_<t)); a text is read as if it followed an `<eos>`."""

    def __init__(self, config: BaselineModelConfig, vocabulary: Tokenizer, width: int | None = None) -> None:
        """`width` of the word embeddings; None: that of the layers."""
        super().__init__()
        self.config, self.first = config, vocabulary.eos_id
        self.embedding = nn.Embedding(vocabulary.vocab_size, config.hidden if width is None else width)
        self.drop = nn.Dropout(config.dropout)

    def score(self, tokens: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Return log p of tokens [B, T], and `hidden` after them; beyond a row's length tokens are −1 and log p is 0.

        If `hidden` has more rows than the tokens, its first rows are used.
        """
        features, after = self.read(tokens, hidden)
        negatives = self.config.negatives if self.training else 0
        flat = self.outputs(features).flatten(0, 1)
        scores = target_log_probs(flat, self.embedding.weight, tokens.flatten(), negatives).view_as(tokens)
        penalty = self.penalty(features) if self.training else None
        if penalty is not None:
            scores = scores - (penalty - penalty.detach())  # in the gradient alone: the value remains log p
        return scores, after

    def draw(
        self, tokens: Tensor, hidden: Hidden | None, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Hidden]:
        """Draw `count` words [B, T, count] in place of each of tokens [B, T], given those before it; see `score`."""
        features, after = self.read(tokens, hidden)
        words = self.logits(features).flatten(0, 1).softmax(1).multinomial(count, replacement=True, generator=generator)
        return words.view(*tokens.shape, count), after

    def read(self, tokens: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        """Return the features [B, T, h] of what precedes each of tokens [B, T], and `hidden` after them."""
        rows = tokens.shape[0]
        hidden = self.start(rows) if hidden is None else tuple(part[:rows] for part in hidden)
        features, after = self.features(tokens.clamp(min=0), hidden)
        return features, tuple(part.detach() for part in after)

    def outputs(self, features: Tensor) -> Tensor:
        """Return what is multiplied with the words [..., h] by features [..., h]."""
        return self.drop(features)

    def penalty(self, features: Tensor) -> Tensor | None:
        """Return what training adds to the loss of each token [B, T] by features [B, T, h]."""
        return None

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of every word [..., V] by features [..., h]."""
        weight = self.embedding.weight
        return F.linear(self.outputs(features), weight).to(weight.dtype)  # bfloat16 in mixed precision

    def next_token(self, hidden: Hidden) -> Tensor:
        """Return log p(next word) [B, V] after `hidden`."""
        features, _ = self.read(torch.zeros_like(hidden[0][:, :1]), hidden)  # they do not depend on the token itself
        return self.logits(features)[:, 0].log_softmax(1)

    @abstractmethod
    def start(self, rows: int) -> Hidden:
        """Return `hidden` before any text."""

    @abstractmethod
    def features(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return f [B, T, h] of the tokens before each of tokens [B, T], and `hidden` after the last."""

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write weights, configuration and tokenizer into a folder, for `load_baseline`."""
        save_model(folder, FORMAT, self.config.model_dump(), self.state_dict(), tokenizer)

    def _first_words(self, rows: int, words: int) -> Tensor:
        return torch.full((rows, words), self.first, device=self.embedding.weight.device)

    def initialize_(self, generator: torch.Generator | None) -> None:
        """Draw Kaiming-uniform weights and set biases to zero, as in the paper."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_uniform_(parameter, generator=generator)
            else:
                nn.init.zeros_(parameter)


class FeedForward(NeuralBaseline):
    """A feed-forward n-gram: f is linear layers with ReLU on the concatenated embeddings of the last words."""

    def __init__(
        self, config: FeedForwardConfig, vocabulary: Tokenizer, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(config, vocabulary)
        self.order = config.order
        sizes = [(self.order - 1) * config.hidden] + config.layers * [config.hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.initialize_(generator)

    def start(self, rows: int) -> Hidden:
        return (self._first_words(rows, self.order - 1),)

    def features(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        history = torch.cat([hidden[0], tokens], 1)
        vectors = self.drop(self.embedding(history[:, :-1])).unfold(1, self.order - 1, 1)  # [B, T, h, order − 1]
        x = vectors.transpose(2, 3).flatten(2)
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(self.drop(x) if i else x))
        return x, (history[:, -(self.order - 1) :],)


class Lstm(NeuralBaseline):
    """An LSTM language model: f is an LSTM over all previous words."""

    def __init__(self, config: LstmConfig, vocabulary: Tokenizer, generator: torch.Generator | None = None) -> None:
        super().__init__(config, vocabulary)
        between = config.dropout if config.layers > 1 else 0.0
        self.lstm = nn.LSTM(config.hidden, config.hidden, config.layers, dropout=between, batch_first=True)
        self.initialize_(generator)

    def start(self, rows: int) -> Hidden:
        empty = self.embedding.weight.new_zeros(rows, self.lstm.num_layers, self.lstm.hidden_size)
        return self._first_words(rows, 1), empty, empty

    def features(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        last, *inner = hidden
        given = torch.cat([last, tokens[:, :-1]], 1)
        before = tuple(part.transpose(0, 1).contiguous() for part in inner)
        x, after = self.lstm(self.drop(self.embedding(given)), before)
        return x, (tokens[:, -1:], *(part.transpose(0, 1) for part in after))


class AwdLstm(NeuralBaseline):
    """An LSTM whose recurrent weights are dropped once per batch, and activations by one mask for all steps."""

    config: AwdLstmConfig

    def __init__(self, config: AwdLstmConfig, vocabulary: Tokenizer, generator: torch.Generator | None = None) -> None:
        super().__init__(config, vocabulary, config.embedding)
        sizes = [config.embedding] + config.layers * [config.hidden]
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in pairwise(sizes))
        same = config.hidden == config.embedding
        self.output = nn.Identity() if same else nn.Linear(config.hidden, config.embedding)
        bound = config.hidden**-0.5  # uniform, as LSTMs are usually initialized; words are outputs too
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1, generator=generator)

    def start(self, rows: int) -> Hidden:
        empty = self.embedding.weight.new_zeros(rows, self.config.hidden)
        return self._first_words(rows, 1), *[empty] * (2 * self.config.layers)

    def features(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        last, *inner = hidden
        given = torch.cat([last, tokens[:, :-1]], 1)
        words = torch.ones_like(self.embedding.weight[:, :1])
        x = self.embedding(given) * F.dropout(words, self.config.word_dropout, self.training)[given]
        x, after = self._drop_locked(x, self.config.input_dropout), [tokens[:, -1:]]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.LSTM)
            if i:
                x = self._drop_locked(x, self.config.layer_dropout)
            inputs, recurrent, *biases = layer.all_weights[0]
            weights = [inputs, F.dropout(recurrent, self.config.weight_dropout, self.training), *biases]
            before = [part[None].contiguous() for part in inner[2 * i : 2 * i + 2]]
            # The function behind nn.LSTM, which takes weights that are not parameters.
            x, *ends = torch._VF.lstm(x, before, weights, True, 1, 0.0, self.training, False, True)  # type: ignore[attr-defined]
            after += [end[0] for end in ends]
        return self.output(self._drop_locked(x, self.config.dropout)), tuple(after)

    def outputs(self, features: Tensor) -> Tensor:
        return features  # dropped already

    def penalty(self, features: Tensor) -> Tensor | None:
        of_size, of_change = self.config.size_penalty, self.config.change_penalty
        if not of_size and not of_change:
            return None
        change = F.pad(features.diff(dim=1), (0, 0, 1, 0))  # the first token of a window has none before it
        return of_size * features.square().mean(2) + of_change * change.square().mean(2)

    def _drop_locked(self, x: Tensor, fraction: float) -> Tensor:
        """Apply dropout to x [B, T, h] with one mask for all T."""
        return x * F.dropout(torch.ones_like(x[:, :1]), fraction, self.training)


class RelaxedHmm(NeuralBaseline):
    """The filter of an HMM with E as scores of emissions, whose transitions see the last word.

    Each softmax follows a sum over states, where that of an HMM precedes it; p_t and q_t are distributions over states:

        p(w_t | w_<t) = softmax(√Z E p_t)               prediction of a word
        q_t = softmax(log p_t + √√Z E[w_t])             Bayes' rule, with scores that are not normalized
        p_t+1 = softmax(√Z A q_t + C E[w_t] + b)        transition

    √Z is the inverse length of a uniform distribution: without it, training hardly begins.
    """

    def __init__(
        self, config: RelaxedHmmConfig, vocabulary: Tokenizer, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(config, vocabulary)
        self.scale = math.sqrt(config.hidden)
        self.transition = nn.Linear(config.hidden, config.hidden, bias=False)
        self.word = nn.Linear(config.hidden, config.hidden)
        self.initialize_(generator)

    def start(self, rows: int) -> Hidden:
        uniform = self.embedding.weight.new_zeros(rows, self.config.hidden).log_softmax(1)
        return self._first_words(rows, 1), uniform

    def features(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        last, predicted = hidden  # log p_t [B, Z]
        scores = self.drop(self.embedding(torch.cat([last, tokens[:, :-1]], 1)))
        words, evidence, steps = self.word(scores), math.sqrt(self.scale) * scores, list[Tensor]()
        for score, word in zip(evidence.unbind(1), words.unbind(1), strict=True):
            filtered = (predicted + score).softmax(1)
            predicted = (self.transition(self.scale * filtered) + word).log_softmax(1)
            steps.append(predicted)
        return self.scale * torch.stack(steps, 1).exp(), (tokens[:, -1:], predicted)


AnyBaselineConfig = Annotated[
    FeedForwardConfig | LstmConfig | AwdLstmConfig | RelaxedHmmConfig, Field(discriminator="kind")
]
"""The registry of baselines."""
_CONFIG: TypeAdapter[Any] = TypeAdapter(AnyBaselineConfig)
_HEADER = ("format", "version", "tokenizer", "fingerprint")


def load_baseline(path: Path) -> tuple[NeuralBaseline, Tokenizer]:
    """Return the baseline in a folder, or the best one of the run in it, and its tokenizer."""
    folder, header, tensors, tokenizer = load_model(path, FORMAT)
    try:
        config = _CONFIG.validate_python({k: v for k, v in header.items() if k not in _HEADER}, strict=True)
    except ValidationError as error:
        raise InputError(f"{folder / CONFIG} is damaged: {' '.join(str(error).split())}") from None
    network: NeuralBaseline = load_network(
        lambda: config.build(tokenizer, 0, None), config.layers, folder / MODEL, tensors
    )
    return network.eval(), tokenizer
