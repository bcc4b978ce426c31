"""Linear interpolation of language models, token by token, as one model.

p(x_t | x_<t) = Σ_m w_m p_m(x_t | x_<t) of HMMs, networks, n-grams and caches of recent words, to which HMMs may adapt.
With an n-gram, the weights depend on how much of the context it has seen. This is not an HMM: it scores and samples,
but does not answer questions about later tokens.

A saved mixture is a folder: `config.json` (kinds and weights), `model.safetensors` (the text that an n-gram counts,
the frequencies of words), the tokenizer's file, and a folder for each HMM or network.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments
from hmmlm.baselines.mixture import fit_weights_by_class, mix
from hmmlm.baselines.neural import FORMAT as BASELINE
from hmmlm.checks import check_count
from hmmlm.constrain.constraint import Constraint
from hmmlm.data.files import read_json
from hmmlm.data.modelfolder import CONFIG, MIXTURE, MODEL, as_folder, load_model, save_model
from hmmlm.data.tensorfiles import check_checksum
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.device import pick_device
from hmmlm.errors import InputError, QueryError
from hmmlm.lm.generation import Rows, SamplingOptions, sample_predicted
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.lm.predictors import (
    CachePredictor,
    HmmPredictor,
    NetworkPredictor,
    NgramPredictor,
    Predictor,
    context_classes,
    known_contexts,
    open_predictor,
    predictor_tokenizer,
)
from hmmlm.lm.reading import check_training
from hmmlm.lm.recent import MAX_HALF_LIFE, AdaptedHmmPredictor, RecentPredictor
from hmmlm.lm.textmodel import TextModel

MAX_COMPONENTS = 1_000


class MixtureModel(TextModel):
    """Predictors over the tokens of one tokenizer with their weights; `config` says how text was prepared.

    The weights are [M], or [K, M] for the K classes of contexts that the first n-gram distinguishes (see
    `NgramModel.known_contexts`).
    """

    @check_arguments
    def __init__(
        self,
        predictors: Sequence[Predictor],
        weights: Sequence[float] | Sequence[Sequence[float]],
        tokenizer: Tokenizer,
        config: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        try:
            values = np.atleast_2d(np.array(weights, dtype=np.float64))
        except (TypeError, ValueError, OverflowError):
            raise InputError("weights must be a list of numbers, or equally long lists of numbers") from None
        if not len(predictors) or values.shape[1] != len(predictors):
            raise InputError(f"{values.shape[1]} weights for {len(predictors)} models: give one for each")
        if values.ndim != 2 or len(values) not in (1, context_classes(predictors)):
            raise InputError(f"weights for {len(values)} classes of contexts: the n-gram has others")
        if not (values >= 0).all() or not (abs(values.sum(1) - 1) < 1e-6).all():
            raise InputError("the weights of a mixture must be probabilities that sum to one")
        self.predictors, self.weights = list(predictors), values / values.sum(1, keepdims=True)
        self.tokenizer, self.config = tokenizer, dict(config or {})
        self._device = device or torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(LanguageModel, name):
            raise AttributeError(f"'MixtureModel' object has no attribute {name!r}")
        raise QueryError(f"{self._name} is not an HMM, so it has no {name}: use an HMM, as in predictors[…].lm")

    def __repr__(self) -> str:
        parts = zip(self.weights.mean(0), self.predictors, strict=True)
        return f"MixtureModel({' + '.join(f'{weight:.3f} {part.kind}' for weight, part in parts)})"

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def _name(self) -> str:
        return "a network" if [part.kind for part in self.predictors] == ["network"] else "a mixture"

    # --- text ---

    @check_arguments
    def token_log_probs(self, encoded: Sequence[Sequence[int]]) -> list[Tensor]:
        parts = [part.token_log_probs(encoded) for part in self.predictors]
        return [
            torch.from_numpy(mix(_stack(each), self._weights(tokens)[:, :-1]))
            for tokens, *each in zip(encoded, *parts, strict=True)
        ]

    def _weights(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the weights [M, N + 1] of each token of a text and of the token after it."""
        if len(self.weights) == 1:
            return np.repeat(self.weights.T, len(tokens) + 1, 1)
        return self.weights[known_contexts(self.predictors, tokens)].T

    def score(self, texts: Sequence[str]) -> Tensor:
        """Compute the natural log-likelihood of each text, `<eos>` included, float64 [len(texts)]."""
        totals = [float(log_probs.sum()) for log_probs in self.token_log_probs(self._encode_all(texts))]
        return torch.tensor(totals, dtype=torch.float64)

    def next_token(self, text: str = "", top: int = 5) -> list[tuple[str, float]]:
        """Return the `top` most likely tokens after a text with their probabilities; `<eos>` ends the line."""
        check_count("top", top, 1)
        best = self._predict([self._read(self._encode_prompt(text))])[0].exp().topk(min(top, self.tokenizer.vocab_size))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(self.tokenizer.token(i), p) for i, p in pairs if p > 0]

    def _sample(self, given: list[int], asked: Constraint, options: SamplingOptions, allow_unk: bool) -> Iterator[Rows]:
        if asked:
            raise InputError(f"{self._name} is not an HMM, so it cannot sample under a constraint: use an HMM")
        excluded = None if allow_unk else self.tokenizer.unk_id
        return sample_predicted(self._predict, self._advance, self._read(given), self._eos, options, excluded)

    def _read(self, tokens: Sequence[int]) -> tuple[Any, ...]:
        context = tuple(part.begin() for part in self.predictors)
        for token in tokens:
            context = self._advance(context, token)
        return context

    def _advance(self, context: tuple[Any, ...], token: int) -> tuple[Any, ...]:
        return tuple(part.advance(own, token) for part, own in zip(self.predictors, context, strict=True))

    def _predict(self, contexts: Sequence[tuple[Any, ...]]) -> Tensor:
        """Compute log p(next token) [n, V] after each context."""
        rows: dict[int, Tensor] = {}  # samples of one prompt begin with the same context
        for context in contexts:
            if id(context) not in rows:
                each = [part.next_token(own) for part, own in zip(self.predictors, context, strict=True)]
                pairs = zip(self.predictors, context, strict=True)
                before: list[int] = next((own for part, own in pairs if isinstance(part, NgramPredictor)), [])
                rows[id(context)] = torch.from_numpy(mix(_stack(each), self._weights(before)[:, -1]))
        return torch.stack([rows[id(context)] for context in contexts])

    # --- files ---

    def save(self, path: str | Path) -> None:
        """Write the model into the folder `path`."""
        folder, components, tensors = as_folder(path), list[dict[str, Any]](), dict[str, Tensor]()
        new = [folder / str(i) for i in range(len(self.predictors)) if not (folder / str(i)).exists()]
        try:
            for i, part in enumerate(self.predictors):
                header, own = part.save(folder / str(i), self.tokenizer)
                components.append({"kind": part.kind, **header, **_identity(folder / str(i))})
                tensors |= own
            content = {"components": components, "weights": self.weights.tolist(), "training": self.config}
            tensors["config"] = _as_bytes(components, content["weights"])
            save_model(folder, MIXTURE, content, tensors, self.tokenizer)
        except BaseException:  # a folder with parts of a model would be refused as the place of another
            for part_folder in new:
                shutil.rmtree(part_folder, ignore_errors=True)
            raise


def _identity(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of a component, by which it is known again; none without files."""
    files = [folder / name for name in (CONFIG, MODEL) if (folder / name).is_file()]
    return {file.name: f"crc32:{zlib.crc32(file.read_bytes()):08x}" for file in files}


def _as_bytes(components: Any, weights: Any) -> Tensor:
    """Return components and weights as bytes [n], for the checksum of the tensors to cover what config.json says."""
    text = json.dumps([components, weights], sort_keys=True)
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)


def _stack(log_probs: Sequence[Tensor]) -> np.ndarray:
    return torch.stack(list(log_probs)).numpy()


def _load_part(
    folder: Path, number: int, header: Any, tensors: dict[str, Tensor], tokenizer: Tokenizer, device: torch.device
) -> Predictor:
    """Return component `number` of the mixture in `folder`."""
    kind, words = header.get("kind") if isinstance(header, dict) else None, tokenizer.vocab_size
    where = f"{folder / CONFIG}: component {number}"
    half_life: Any = header.get("half_life") if isinstance(header, dict) else None
    if kind in (HmmPredictor.kind, NetworkPredictor.kind, AdaptedHmmPredictor.kind):
        part = open_predictor(folder / str(number), device)
        if kind == AdaptedHmmPredictor.kind and isinstance(part, HmmPredictor):
            frequencies = tensors.get(f"{number}.frequencies")
            if frequencies is None or not _is_half_life(half_life):
                raise InputError(f"{where} is damaged: save the mixture again")
            part = AdaptedHmmPredictor(part.lm, half_life, frequencies)
        changed = _identity(folder / str(number)).items() - header.items()
        if (
            changed
            or part.kind != kind
            or predictor_tokenizer(folder / str(number)).fingerprint() != tokenizer.fingerprint()
        ):
            raise InputError(f"{where} does not fit the model in {folder / str(number)}: files of two models are mixed")
        return part
    if kind == CachePredictor.kind and _is_count(header.get("size")):
        return CachePredictor(header["size"], words)
    if kind == RecentPredictor.kind and _is_half_life(half_life):
        return RecentPredictor(half_life, words)
    text = tensors.get(f"{number}.text")
    if kind == NgramPredictor.kind and _is_count(header.get("order")) and header["order"] <= 10 and text is not None:
        restart = tokenizer.eos_id if header.get("restarts") is True else None
        return NgramPredictor(text.numpy(), words, header["order"], restart)
    raise InputError(f"{where} is damaged: save the mixture again")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_half_life(value: Any) -> bool:
    return _is_count(value) and value <= MAX_HALF_LIFE


def load_text_model(path: str | Path, device: str | torch.device = "auto") -> LanguageModel | MixtureModel:
    """Return the model in the folder `path`, or the best one of a training run there; a network as its own mixture."""
    folder = as_folder(path)
    header = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if header.get("format") == MIXTURE:
        return _load_mixture(folder, device)
    best = folder / "best" / CONFIG
    run = header if "data" in header and best.is_file() else {}
    if (read_json(best) if run else header).get("format") == BASELINE:
        chosen = pick_device(device)
        return MixtureModel([open_predictor(folder, chosen)], [1.0], predictor_tokenizer(folder), run, chosen)
    return load(folder, device)


def _load_mixture(path: Path, device: str | torch.device) -> MixtureModel:
    """Return the mixture in the folder `path`."""
    chosen = pick_device(device)
    folder, header, tensors, tokenizer = load_model(path, MIXTURE)
    where, components, weights = folder / CONFIG, header.get("components"), header.get("weights")
    training = check_training(where, header.get("training"))
    check_checksum(folder / MODEL, tensors)
    if not isinstance(components, list) or not 0 < len(components) <= MAX_COMPONENTS:
        raise InputError(f"{where} has no list of components: save the mixture again")
    rows: list[Any] = weights if isinstance(weights, list) and weights and isinstance(weights[0], list) else [weights]
    if not all(isinstance(row, list) and all(isinstance(w, float | int) for w in row) for row in rows):
        raise InputError(f"{where} has no list of weights: save the mixture again")
    if len({len(row) for row in rows}) != 1:
        raise InputError(f"{where} has weights for different numbers of components: save the mixture again")
    parts = [_load_part(folder, i, each, tensors, tokenizer, chosen) for i, each in enumerate(components)]
    try:
        model = MixtureModel(parts, rows, tokenizer, training, chosen)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    known = tensors.get("config")
    if known is None or not torch.equal(known, _as_bytes(components, weights)):
        raise InputError(f"{where} does not fit {MODEL} beside it: it was changed; save the mixture again")
    return model


def fit_mixture(
    predictors: Sequence[Predictor], tokens: Sequence[int], weights: Sequence[float] | None = None
) -> tuple[list[list[float]], list[float], float]:
    """Return weights [K, M], and the log-likelihood of a text under each component and mixed.

    The weights are those of the highest likelihood of the text for each class of contexts, unless they are given.
    """
    log_probs = _stack([part.token_log_probs([tokens])[0] for part in predictors])
    classes = known_contexts(predictors, tokens)[:-1]
    if weights is None:
        chosen = fit_weights_by_class(log_probs, classes, context_classes(predictors))
    else:
        chosen, classes = np.array([weights]), np.zeros_like(classes)
    return chosen.tolist(), log_probs.sum(1).tolist(), float(mix(log_probs, chosen[classes].T).sum())
