"""What a mixture interpolates: HMMs, networks, n-grams and a cache, each as a predictor of the next token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.baselines.neural import FORMAT as BASELINE
from hmmlm.baselines.neural import Hidden, NeuralBaseline, load_baseline
from hmmlm.baselines.ngram import NgramModel
from hmmlm.checks import check_count, padded
from hmmlm.data.files import read_json
from hmmlm.data.modelfolder import CONFIG, find_model, load_model
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.ops.common import NEG_INF

_WINDOW = 4_096  # tokens that a network reads at once
_ROWS = 64  # texts that a network reads at once


class Predictor(ABC):
    """A component of a mixture: log p(token | tokens before it), and the same one token at a time."""

    kind: ClassVar[str]

    @abstractmethod
    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute log p(token | tokens before it) of each text, given as tokens: [T] float64, on the CPU."""

    @abstractmethod
    def begin(self) -> Any:
        """Return the context before any token."""

    @abstractmethod
    def advance(self, context: Any, token: int) -> Any:
        """Return the context after one more token."""

    @abstractmethod
    def next_token(self, context: Any) -> Tensor:
        """Compute log p(next token) [V] float64, on the CPU."""

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Write what has files of its own into `folder`; return JSON values and tensors for the mixture's files."""
        return {}, {}


class HmmContext(NamedTuple):
    """The prediction of an HMM."""

    log_state: Tensor  # [Z]
    read: int
    """Tokens since the chain started."""


class HmmPredictor(Predictor):
    """An HMM, which starts again where it does on its own.

    After a token of probability zero it predicts every word alike until it starts again: a mixture needs distributions.
    """

    kind = "hmm"

    @check_arguments
    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        batches = lm.config.get("batches", {})
        self.length = int(batches["length"]) if batches.get("kind") == "chunks" else None

    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        uniform = -math.log(self.lm.tokenizer.vocab_size)
        result = self.lm.token_log_probs(encoded)
        for tokens, log_probs in zip(encoded, result, strict=True):
            if bool((log_probs == NEG_INF).any()):
                for part in log_probs.split([len(sequence) for sequence in self.lm.sequences(tokens)]):
                    lost = (part == NEG_INF).cumsum(0) > 1
                    part[lost] = uniform
        return result

    def begin(self) -> HmmContext:
        return HmmContext(self.lm.hmm.begin(), 0)

    def advance(self, context: HmmContext, token: int) -> HmmContext:
        read = context.read + 1
        if read == self.length or (self.lm.restarts and token == self.lm.tokenizer.eos_id):
            return self.begin()
        return HmmContext(self.lm.hmm.advance(context.log_state, token), read)

    def next_token(self, context: HmmContext) -> Tensor:
        if not bool((context.log_state > NEG_INF).any()):
            return torch.full((self.lm.hmm.vocab_size,), -math.log(self.lm.hmm.vocab_size), dtype=torch.float64)
        return self.lm.hmm.emit(context.log_state).double().log_softmax(0).cpu()

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self.lm.save(folder)
        return {}, {}


class NetworkPredictor(Predictor):
    """A feed-forward network or an LSTM, which reads a text from its beginning."""

    kind = "network"

    @check_arguments
    def __init__(self, network: NeuralBaseline) -> None:
        self.network = network.eval()

    @torch.no_grad()
    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        result = [torch.zeros(0, dtype=torch.float64)] * len(encoded)
        longest_first = sorted((i for i, tokens in enumerate(encoded) if len(tokens)), key=lambda i: -len(encoded[i]))
        for begin in range(0, len(longest_first), _ROWS):
            chosen = longest_first[begin : begin + _ROWS]
            tokens, lengths = padded([encoded[i] for i in chosen])
            tokens, hidden, parts = tokens.to(self.device), None, []
            for first in range(0, tokens.shape[1], _WINDOW):
                rows = int((lengths > first).sum())  # the longest texts come first
                scores, hidden = self.network.score(tokens[:rows, first : first + _WINDOW], hidden)
                parts.append(torch.nn.functional.pad(scores.double().cpu(), (0, 0, 0, len(chosen) - rows)))
            for row, i in zip(torch.cat(parts, 1), chosen, strict=True):
                result[i] = row[: len(encoded[i])]
        return result

    @property
    def device(self) -> torch.device:
        return self.network.embedding.weight.device

    def begin(self) -> Hidden:
        return self.network.start(1)

    @torch.no_grad()
    def advance(self, context: Hidden, token: int) -> Hidden:
        return self.network.score(torch.tensor([[token]], device=self.device), context)[1]

    @torch.no_grad()
    def next_token(self, context: Hidden) -> Tensor:
        return self.network.next_token(context)[0].double().cpu()

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self.network.save(folder, tokenizer)
        return {}, {}


class NgramPredictor(Predictor):
    """A Kneser-Ney n-gram of a training text, which is stored and counted again."""

    kind = "ngram"

    @check_arguments
    def __init__(self, text: np.ndarray, vocab_size: int, order: int, restart: int | None) -> None:
        """`restart`: the token after which the context starts again; None: nowhere."""
        self.model = NgramModel(text, vocab_size, order, restart)
        self.text = np.asarray(text).astype(np.int64)

    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.from_numpy(self.model.log_probs(np.array(tokens, dtype=np.int64))) for tokens in encoded]

    def begin(self) -> list[int]:
        return []

    def advance(self, context: list[int], token: int) -> list[int]:
        return [*context, token][-self.model.order :]

    def next_token(self, context: list[int]) -> Tensor:
        return torch.from_numpy(self.model.next_token(np.array(context, dtype=np.int64)))

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        header = {"order": self.model.order, "restarts": self.model.eos is not None}
        return header, {f"{folder.name}.text": torch.from_numpy(self.text)}


class CachePredictor(Predictor):
    """The frequencies of the last `size` tokens; before the first token every word is as likely."""

    kind = "cache"

    @check_arguments
    def __init__(self, size: int, vocab_size: int) -> None:
        check_count("size", size, 1)
        check_count("vocab_size", vocab_size, 1)
        self.size, self.vocab_size = size, vocab_size

    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.from_numpy(self._log_probs(tokens)) for tokens in encoded]

    def _log_probs(self, tokens: Sequence[int]) -> np.ndarray:
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        found, kept = np.ones(len(tokens)), np.minimum(np.arange(len(tokens)), self.size)
        for t, token in enumerate(tokens):
            if t:
                found[t] = counts[token]
            counts[token] += 1
            if t >= self.size:
                counts[tokens[t - self.size]] -= 1
        kept[:1] = self.vocab_size
        with np.errstate(divide="ignore"):
            return np.log(found / kept)

    def begin(self) -> list[int]:
        return []

    def advance(self, context: list[int], token: int) -> list[int]:
        return [*context, token][-self.size :]

    def next_token(self, context: list[int]) -> Tensor:
        if not context:
            return torch.full((self.vocab_size,), -math.log(self.vocab_size), dtype=torch.float64)
        counts = torch.bincount(torch.tensor(context), minlength=self.vocab_size)
        return (counts.double() / len(context)).log()

    def save(self, folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"size": self.size}, {}


def open_predictor(path: Path, device: torch.device) -> Predictor:
    """Return the HMM or the network in a folder, or the best one of the run there, as a component."""
    if _format(path) == BASELINE:
        network, _ = load_baseline(path)
        return NetworkPredictor(network.to(device))
    return HmmPredictor(load(path, device))


def predictor_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of the HMM or network in a folder."""
    folder = find_model(path)
    return load_model(folder, str(_format(folder)), weights=False).tokenizer


def _format(path: Path) -> Any:
    return read_json(find_model(path) / CONFIG).get("format")


def _ngram(predictors: Sequence[Predictor]) -> NgramModel | None:
    """Return the first n-gram among the components."""
    return next((part.model for part in predictors if isinstance(part, NgramPredictor)), None)


def context_classes(predictors: Sequence[Predictor]) -> int:
    """Return the number of classes of contexts that have weights of their own."""
    ngram = _ngram(predictors)
    return 1 if ngram is None else ngram.context_classes


def known_contexts(predictors: Sequence[Predictor], tokens: Sequence[int]) -> np.ndarray:
    """Return the class of the context of each token, and of the token after the last: [N + 1]."""
    ngram = _ngram(predictors)
    return np.zeros(len(tokens) + 1, np.int64) if ngram is None else ngram.known_contexts(np.array(tokens, np.int64))
