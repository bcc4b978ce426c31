"""A trained HMM with its tokenizer: save, load, score and generate text.

A saved model is a folder: `model.safetensors` (log_start [Z], log_transition [Z,Z], log_emission [Z,V]; for a blocked
HMM its factors instead), `config.json` (sizes, the tokenizer's fingerprint, the configuration it was trained with) and
the tokenizer's own file. No pickle.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hmmlm.data.tokenizer import Tokenizer, load_tokenizer
from hmmlm.data.words import split_at
from hmmlm.errors import InputError
from hmmlm.hmm import HMM, AnyHMM, BlockedHMM

FORMAT = "hmmlm language model"
VERSION = 1
MODEL, CONFIG = "model.safetensors", "config.json"
PARAMETERS = {
    "dense": ("log_start", "log_transition", "log_emission"),
    "blocked": ("block_of_word", "u", "w", "log_normalizer", "log_start", "log_emission"),
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_BATCH_TOKENS = 1 << 13  # tokens scored side by side: bounds memory at tokens × states


class LanguageModel:
    """An HMM over the tokens of `tokenizer`; `config` is the training configuration, kept as it is given.

    A text is a line or several: every line ends with `<eos>`, as in training. The chain runs on through it, unless the
    configuration says that it restarts there in evaluation (batches.eval_reset_at_eos).
    """

    def __init__(self, hmm: AnyHMM, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> None:
        if hmm.vocab_size != tokenizer.vocab_size:
            raise InputError(
                f"the model has a vocabulary of {hmm.vocab_size}, the tokenizer one of {tokenizer.vocab_size}: "
                "they do not belong together"
            )
        self.hmm, self.tokenizer, self.config = hmm, tokenizer, dict(config or {})

    def to(self, device: str | torch.device) -> LanguageModel:
        """The same model on another device."""
        return LanguageModel(self.hmm.to(device), self.tokenizer, self.config)

    @property
    def restarts(self) -> bool:
        """Whether the chain restarts from the start distribution after every `<eos>`."""
        batches = self.config.get("batches", {})
        return batches.get("kind") == "stream" and bool(batches.get("eval_reset_at_eos"))

    # --- text -----------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as they are scored: each line's, and `<eos>` after it; an empty text is one `<eos>`."""
        lines = text.removesuffix("\n").split("\n")
        return [token for line in lines for token in (*self.tokenizer.encode(line.strip()), self._eos)]

    @torch.no_grad()
    def score(self, texts: Sequence[str]) -> Tensor:
        """Natural log-likelihood of each text, `<eos>` included, [len(texts)]; a single str is an error."""
        # A sequence is a text, or one line of it where the chain restarts; `owner` is the text it belongs to.
        sequences: list[list[int]] = []
        owner: list[int] = []
        for i, tokens in enumerate(self._encode_all(texts)):
            parts = [[*line, self._eos] for line in split_at(tokens, self._eos)[:-1]] if self.restarts else [tokens]
            sequences += parts
            owner += [i] * len(parts)
        scores = torch.zeros(len(texts), dtype=self.hmm.dtype)
        for chosen in _batches([len(tokens) for tokens in sequences]):
            log_likelihood = self.hmm.log_likelihood(*_padded([sequences[i] for i in chosen])).cpu()
            scores.index_add_(0, torch.tensor([owner[i] for i in chosen]), log_likelihood)
        return scores

    def perplexity(self, texts: Sequence[str]) -> float:
        """exp(−Σ log p / Σ tokens) over all texts, `<eos>` and `<unk>` counted; infinite if one is impossible."""
        if not len(texts):
            raise InputError("perplexity needs at least one text")
        tokens = sum(map(len, self._encode_all(texts)))
        loss = -float(self.score(texts).double().sum()) / tokens
        return math.exp(loss) if loss < 700 else math.inf

    @torch.no_grad()
    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> str:
        """`prompt` and an exact sample of what follows it, until `<eos>` or `max_new_tokens`.

        temperature 0 takes the likeliest token every time; `top_k` samples among the k likeliest; the same seed gives
        the same text. A prompt that ends with a line break asks for a new line.
        """
        _check_sampling(max_new_tokens, temperature, top_k)
        generator = torch.Generator()
        generator.manual_seed(seed) if seed is not None else generator.seed()
        given = self._encode_prompt(prompt)
        tokens = list(given)
        heard = split_at(given, self._eos)[-1] if self.restarts else given
        if heard and not bool(self.hmm.log_likelihood([heard]).isfinite()):
            raise InputError("the model gives the prompt probability zero, so nothing can follow it")
        state = self.hmm.begin()
        for token in heard:
            state = self.hmm.advance(state, token)
        for _ in range(max_new_tokens):
            token = _choose(self.hmm.emit(state).cpu().exp(), temperature, top_k, generator)
            if token == self._eos:
                break
            tokens.append(token)
            state = self.hmm.advance(state, token)
        # The prompt is given back as it was written, though unknown words in it were read as <unk>.
        return prompt + self.tokenizer.decode(tokens)[len(self.tokenizer.decode(given)) :]

    @property
    def _eos(self) -> int:
        return self.tokenizer.eos_id

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        if isinstance(texts, str):
            raise InputError("texts must be a list of strings: write [text] for a single one")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"texts[{i}] is a {type(text).__name__}, not a string")
        return [self.encode(text) for text in texts]

    def _encode_prompt(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise InputError(f"the prompt is a {type(prompt).__name__}, not a string")
        first, *others = map(self.tokenizer.encode, prompt.split("\n"))
        return [*first, *(token for line in others for token in (self._eos, *line))]

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Into the folder `path`. A failure (a full disk) leaves a model that was there before as it was."""
        folder = Path(path)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "model": _kind(self.hmm),
            "states": self.hmm.states,
            "vocab_size": self.hmm.vocab_size,
            "eos_id": self._eos,
            "tokenizer": self.tokenizer.fingerprint(),
            "training": self.config,
        }
        source = self.hmm.factors if isinstance(self.hmm, BlockedHMM) else self.hmm
        names = PARAMETERS[_kind(self.hmm)]
        tensors = {name: getattr(source, name).detach().cpu().contiguous() for name in names}
        metadata = {"format": FORMAT, "tokenizer": self.tokenizer.fingerprint()}
        _write_folder(folder, tensors, header, metadata, self.tokenizer)

    @staticmethod
    def load(path: str | Path) -> LanguageModel:
        """The model in the folder `path`, or the best one of a training run there."""
        folder = _model_folder(Path(path))
        header = _read_json(folder / CONFIG)
        if header.get("format") != FORMAT:
            raise InputError(f"{folder / CONFIG} does not belong to an hmmlm model: it may be of another program")
        if header.get("version") != VERSION:
            raise InputError(f"{folder / CONFIG} has version {header.get('version')!r}; this hmmlm reads {VERSION}")
        kind = header.get("model")
        if kind not in PARAMETERS:
            raise InputError(f"{folder / CONFIG} names a model {kind!r}; this hmmlm reads {', '.join(PARAMETERS)}")
        tensors, metadata = _read_tensors(folder / MODEL, PARAMETERS[kind])
        tokenizer = load_tokenizer(folder)
        states, vocab_size = header.get("states"), header.get("vocab_size")
        shapes = {"log_start": [states], "log_transition": [states, states], "log_emission": [states, vocab_size]}
        if kind == "blocked":
            shapes = {"log_start": [states], "block_of_word": [vocab_size]}
        for name, shape in shapes.items():
            if list(tensors[name].shape) != shape:
                raise InputError(
                    f"{folder / MODEL}: {name} has shape {list(tensors[name].shape)}, {CONFIG} says {shape}: "
                    "files of two models are mixed; save the model again"
                )
        fingerprint = tokenizer.fingerprint()
        if fingerprint != header.get("tokenizer") or fingerprint != metadata.get("tokenizer"):
            raise InputError(
                f"{folder}: the tokenizer's vocabulary ({tokenizer.vocab_size} tokens, {fingerprint}) is not the one "
                f"the model was trained with ({vocab_size} tokens, {header.get('tokenizer')}): put its own file back"
            )
        values = [tensors[name] for name in PARAMETERS[kind]]
        hmm: AnyHMM = BlockedHMM(*values) if kind == "blocked" else HMM(values[0], values[1], values[2])
        return LanguageModel(hmm, tokenizer, header.get("training"))


def _kind(hmm: AnyHMM) -> str:
    return "blocked" if isinstance(hmm, BlockedHMM) else "dense"


def load(path: str | Path) -> LanguageModel:
    """The language model in the folder `path`, or the best one of a training run there."""
    return LanguageModel.load(path)


def save_control(hmm: HMM, path: str | Path, eos_token_id: int) -> None:
    """Write the layout that libraries for controlled generation read (Ctrl-G, GeLaTo).

    `alpha_exp` [Z,Z] transition probabilities, `beta` [Z,V] log-emissions, `gamma` [Z] log-start."""
    tensors = {
        "alpha_exp": hmm.log_transition.detach().exp().cpu().contiguous(),
        "beta": hmm.log_emission.detach().cpu().contiguous(),
        "gamma": hmm.log_start.detach().cpu().contiguous(),
    }
    header = {"hidden_states": hmm.states, "vocab_size": hmm.vocab_size, "eos_token_id": eos_token_id}
    _write_folder(Path(path), tensors, header, {"format": "pt"})


def load_control(path: str | Path) -> tuple[HMM, dict[str, Any]]:
    """The HMM in a folder of that layout, and its configuration (hidden_states, vocab_size, eos_token_id)."""
    folder = Path(path)
    header = _read_json(folder / CONFIG)
    tensors, _ = _read_tensors(folder / MODEL, ("alpha_exp", "beta", "gamma"))
    states, vocab_size = header.get("hidden_states"), header.get("vocab_size")
    for name, shape in {"alpha_exp": [states, states], "beta": [states, vocab_size], "gamma": [states]}.items():
        if list(tensors[name].shape) != shape:
            got = list(tensors[name].shape)
            raise InputError(f"{folder / MODEL}: {name} has shape {got}, {CONFIG} says {shape}: get the files again")
    hmm = HMM(tensors["gamma"], tensors["alpha_exp"].log(), tensors["beta"])
    try:
        hmm.validate()
    except InputError as error:
        raise InputError(f"{folder / MODEL}: {error}") from None
    return hmm, header


def _write_folder(
    folder: Path,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    metadata: dict[str, str],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Everything is written beside its place first, then moved: a full disk changes nothing that was there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
            fresh = Path(temporary)
            if tokenizer is not None:
                tokenizer.save(fresh)
            (fresh / CONFIG).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
            save_file(tensors, fresh / MODEL, metadata=metadata)
            for file in fresh.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            stale = [name for name in _TOKENIZER_FILES if tokenizer is not None and not (fresh / name).exists()]
            for file in sorted(fresh.iterdir()):
                os.replace(file, folder / file.name)
            for name in stale:
                (folder / name).unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot save to {folder}: {reason}; what was there before is kept") from error


def _model_folder(path: Path) -> Path:
    """`path` itself if a model lies there, its best model if it is a training run."""
    if not path.exists():
        raise InputError(f"no model at {path}: there is no such folder")
    if not path.is_dir():
        raise InputError(f"{path} is a file, a model is a folder with {MODEL} and {CONFIG}: give the folder")
    for folder in (path, path / "best"):
        if (folder / MODEL).exists():
            return folder
    if (path / "history.jsonl").exists():
        raise InputError(f"the training run {path} has no model yet: its first validation check writes one")
    raise InputError(f"no model in {path}: it should hold {MODEL} and {CONFIG}, or be the folder of a training run")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is truncated or not JSON ({error}): save or copy the model again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object: it may be of another program")
    return content


def _read_tensors(path: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The named tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            missing = [name for name in names if name not in present]
            if missing:
                raise InputError(f"{path} has no {missing[0]}: it is of another kind of model")
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"{path} is missing, truncated or not safetensors ({reason}): save it again") from None


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts of like length, at most _BATCH_TOKENS padded tokens together (or one text)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens [B,T] with −1 beyond each length, and lengths [B]."""
    lengths = torch.tensor([len(s) for s in sequences])
    tokens = torch.full((len(sequences), int(lengths.max())), -1)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return tokens, lengths


def _check_sampling(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise InputError(f"temperature must be a number of 0 or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be 1 or more, not {top_k}")


def _choose(probs: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """A token from probs [V]. Drawn on the CPU, so that a seed means the same text on every device."""
    if temperature == 0:
        return int(probs.argmax())
    candidates = torch.arange(len(probs))
    if top_k is not None and top_k < len(probs):
        probs, candidates = probs.topk(top_k)
    # The largest is 1 before the power: a low temperature underflows the others, never all of them.
    weights = (probs.double() / probs.max()) ** (1 / temperature)
    return int(candidates[torch.multinomial(weights, 1, generator=generator)])
