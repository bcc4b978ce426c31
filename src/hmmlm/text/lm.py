"""A trained HMM with its tokenizer: save, load, score, generate and infill text.

A saved model is a folder: `model.safetensors` (log_start [Z], log_transition [Z, Z] and log_emission [Z, V], or the
factors of a blocked HMM), `config.json` (sizes, the tokenizer's fingerprint, the training configuration) and the
tokenizer's own file. No pickle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.data.files import require_like
from hmmlm.data.modelfolder import (
    CONFIG,
    MODEL,
    load_model,
    require_dtype,
    require_size,
    require_tensors,
    save_model,
)
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.data.words import split_at
from hmmlm.errors import InputError
from hmmlm.hmm import KINDS, HiddenMarkovModel, hmm_from_tensors
from hmmlm.hmm.automaton import Automaton
from hmmlm.hmm.checks import check_count
from hmmlm.hmm.constraints import Guide, Position
from hmmlm.text.generation import SamplingOptions, sample_accepted, sample_continuation
from hmmlm.text.phrases import Phrases, Wanted, check_phrases

FORMAT = "hmmlm language model"
_BLANK = re.compile(r"(?<!\w)_{3,}(?!\w)")  # not inside a word: identifiers may contain three underscores
_BATCHES = {"kind": "", "batch_size": 0, "length": 0, "reset_at_eos": False, "eval_reset_at_eos": False}
"""Settings of a training configuration that evaluation uses, with a value of the type of each."""
_BATCH_TOKENS = 1 << 13  # tokens scored together: bounds memory at tokens × states


class LanguageModel:
    """An HMM over the tokens of `tokenizer`; `config` is the training configuration, stored unchanged.

    A text is one line or several: every line ends with `<eos>`, as in training. The chain continues through it, unless
    the configuration restarts it there in evaluation (batches.eval_reset_at_eos).
    """

    def __init__(self, hmm: HiddenMarkovModel, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> None:
        if hmm.vocab_size != tokenizer.vocab_size:
            raise InputError(
                f"the model has a vocabulary of {hmm.vocab_size}, the tokenizer one of {tokenizer.vocab_size}: "
                "they do not belong together"
            )
        self.hmm, self.tokenizer, self.config = hmm, tokenizer, dict(config or {})
        self._guide: tuple[tuple[Any, ...], Automaton, Guide] | None = None  # the cached guide and its arguments
        self._phrases = Phrases(tokenizer)

    def __repr__(self) -> str:
        return f"LanguageModel(states={self.hmm.states}, words={self.hmm.vocab_size}, kind={self.hmm.kind!r})"

    def to(self, device: str | torch.device) -> LanguageModel:
        """Return the model on another device."""
        try:
            where = torch.device(device)
        except (RuntimeError, TypeError):
            raise InputError(f"unknown device {device!r}: use 'cpu' or 'cuda'") from None
        return LanguageModel(self.hmm.to(where), self.tokenizer, self.config)

    @property
    def restarts(self) -> bool:
        """Whether the chain restarts from the start distribution after every `<eos>`."""
        batches = self.config.get("batches", {})
        return batches.get("kind") == "stream" and bool(batches.get("eval_reset_at_eos"))

    # --- text ---

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text as they are scored: each line's, then `<eos>`; an empty text is one `<eos>`."""
        _check_text("the text", text)
        return [token for line in _lines(text) for token in (*self.tokenizer.encode(line), self._eos)]

    def sequences(self, tokens: Sequence[int]) -> list[list[int]]:
        """Split the tokens of a text into the sequences that are scored: one, or one per line if the chain restarts."""
        if not self.restarts:
            return [list(tokens)]
        *lines, rest = split_at(tokens, self._eos)
        return [[*line, self._eos] for line in lines] + ([rest] if rest else [])

    @torch.no_grad()
    def score(self, texts: Sequence[str]) -> Tensor:
        """Compute the natural log-likelihood of each text, `<eos>` included, [len(texts)]; a single str is an error."""
        sequences: list[list[int]] = []
        owner: list[int] = []  # the text that a sequence belongs to
        encoded = self._encode_all(texts)
        for i, tokens in enumerate(encoded):
            parts = self.sequences(tokens)
            sequences += parts
            owner += [i] * len(parts)
        scores = torch.zeros(len(encoded), dtype=self.hmm.dtype)
        for chosen in _batches([len(tokens) for tokens in sequences]):
            log_likelihood = self.hmm.log_likelihood(*padded([sequences[i] for i in chosen])).cpu()
            scores.index_add_(0, torch.tensor([owner[i] for i in chosen]), log_likelihood)
        return scores

    def perplexity(self, texts: Sequence[str]) -> float:
        """Compute exp(−Σ log p / Σ tokens) over all texts, `<eos>` and `<unk>` counted.

        It is infinite if a text is impossible.
        """
        tokens = sum(map(len, self._encode_all(texts)))
        if not tokens:
            raise InputError("perplexity needs at least one text")
        loss = -float(self.score(texts).double().sum()) / tokens
        return math.exp(loss) if loss < 700 else math.inf

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        unknown: bool = True,
        must: Sequence[Wanted] = (),
        never: Sequence[str] = (),
    ) -> str:
        """Return `prompt` and an exact sample of its continuation, until `<eos>` or `max_new_tokens`.

        Temperature 0 takes the most likely token every time; `top_k` samples among the k most likely; the same seed
        gives the same text; with unknown=False every token is drawn given that it is not `<unk>`. A prompt that ends
        with a line break starts a new line; spaces at its end are ignored.

        With `must` or `never` the line, including the prompt's part, is drawn given that it contains every word or
        phrase in `must` (one of each tuple: must=["runs", ("dog", "dogs")]) and none in `never`, and ends within
        `max_new_tokens`, `<eos>` counted. With unknown=False the new part is also given to have no `<unk>`.
        """
        options = SamplingOptions(max_new_tokens, temperature, top_k, seed)
        given = self._encode_prompt(prompt)
        if must or never:
            guide, position = self.guide(must, never, max_new_tokens, prompt, unknown)
            added = sample_accepted(guide, position, self._eos, options)
        else:
            excluded = None if unknown else self.tokenizer.unk_id
            added = sample_continuation(self.hmm, self._context(given), self._eos, options, excluded)
        # The prompt is returned as it was written, though its unknown words were read as <unk>.
        text = self.tokenizer.decode([*given, *added])[len(self.tokenizer.decode(given)) :]
        return prompt + (text.lstrip(" ") if prompt.endswith((" ", "\t")) else text)

    def guide(
        self,
        must: Sequence[Wanted] = (),
        never: Sequence[str] = (),
        max_new_tokens: int = 100,
        prompt: str = "",
        unknown: bool = True,
        ended: bool = True,
    ) -> tuple[Guide, Position]:
        """Return the guide of a constraint on lines, and the position after the prompt.

        To steer another model with this tokenizer, see `Steering`. With `ended`, lines end within `max_new_tokens`;
        otherwise they may continue once they satisfy the constraint. The guide is cached until another one is
        requested.
        """
        check_phrases(must, never)
        given = self._encode_prompt(prompt)
        context, line = self._context(given), split_at(given, self._eos)[-1]
        wanted = tuple(text if isinstance(text, str) else tuple(text) for text in must)
        check_count("max_new_tokens", max_new_tokens, 1)
        asked = (wanted, tuple(never), max_new_tokens, unknown, ended)
        cached = self._guide  # read once: another thread may replace it
        if cached is None or cached[0] != asked:
            automaton = self._phrases.lines(must, never, ended)
            banned = automaton if unknown or self.tokenizer.unk_id is None else automaton.without(self.tokenizer.unk_id)
            cached = self._guide = asked, automaton, Guide(self.hmm, banned, max_new_tokens)
        _, automaton, guide = cached
        position = guide.begin(context)._replace(automaton=automaton.read(line))
        hopeful = automaton.hopeful()
        if not bool(hopeful[0]):
            raise InputError("must and never contradict each other")
        if not bool(hopeful[position.automaton]):
            raise InputError("the prompt contains a phrase of never: remove it from the prompt, or allow it")
        if guide.chance(position) == -math.inf:
            raise InputError(
                f"no line of at most {max_new_tokens} tokens{', <eos> counted,' if ended else ''} satisfies must and "
                "never under this model: allow more tokens, or fewer phrases"
            )
        return guide, position

    def _context(self, given: list[int]) -> list[int]:
        """Return the tokens of a prompt that its continuation depends on."""
        context = split_at(given, self._eos)[-1] if self.restarts else given
        if context and not bool(self.hmm.log_likelihood([context]).isfinite()):
            raise InputError("the prompt has probability zero under the model, so nothing can follow it")
        return context

    @torch.no_grad()
    def infill(self, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
        """Return, for every blank `___` of a text, the `top` most likely words with their probabilities.

        `lm.infill("The ___ returns a list.")[0]` may start with ("function", 0.31). Exact: given all text before and
        after the blank, including the end of the line; other blanks are summed over. A blank is one token (part of a
        word, with subword tokenizers), and never `<eos>`.
        """
        _check_text("the text", text)
        check_count("top", top, 1)
        tokens = [token for line in _lines(text) for token in (*self._encode_blanks(line), self._eos)]
        if -1 not in tokens:
            raise InputError("the text has no blank: write ___ for a missing word")
        found: list[list[tuple[str, float]]] = []
        for sequence in self.sequences(tokens):
            for probs in self.hmm.infill_blanks([sequence], self._eos).exp() if -1 in sequence else ():
                best = probs.topk(min(top, len(probs)))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                found.append([(self.tokenizer.token(i), p) for i, p in pairs if p > 0])
        return found

    def _encode_blanks(self, line: str) -> list[int]:
        """Return the tokens of a line, −1 for each blank."""
        first, *others = _BLANK.split(line)
        tokens = self.tokenizer.encode(first.rstrip())
        for part in map(str.rstrip, others):
            after = self.tokenizer.encode(part)
            if self.tokenizer.kind != "word":  # subword tokens differ at the beginning of a text
                word, both = self.tokenizer.encode("a"), self.tokenizer.encode("a" + part)
                after = both[len(word) :] if both[: len(word)] == word else after
            tokens += [-1, *after]
        return tokens

    @property
    def _eos(self) -> int:
        return self.tokenizer.eos_id

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; raise an InputError unless `texts` is a list of strings."""
        if isinstance(texts, str):
            raise InputError("texts must be a list of strings: write [text] for a single one")
        if isinstance(texts, bytes) or not (hasattr(texts, "__getitem__") and hasattr(texts, "__len__")):
            raise InputError(f"texts must be a list of strings, not a {type(texts).__name__}: write list(texts)")
        for i, text in enumerate(texts):
            _check_text(f"texts[{i}]", text)
        return [self.encode(text) for text in texts]

    def _encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, with `<eos>` between its lines."""
        _check_text("the prompt", prompt)
        first, *others = (self.tokenizer.encode(line.strip()) for line in prompt.split("\n"))
        return [*first, *(token for line in others for token in (self._eos, *line))]

    # --- files ---

    def save(self, path: str | Path) -> None:
        """Write the model into the folder `path`. A failure leaves an existing model unchanged."""
        folder = _as_path(path)
        header = {
            "model": self.hmm.kind,
            "states": self.hmm.states,
            "vocab_size": self.hmm.vocab_size,
            "eos_id": self._eos,
            "training": self.config,
        }
        save_model(folder, FORMAT, header, self.hmm.tensors(), self.tokenizer)

    @staticmethod
    def load(path: str | Path) -> LanguageModel:
        """Return the model in the folder `path`, or the best one of a training run there."""
        folder, header, tensors, tokenizer = load_model(_as_path(path), FORMAT)
        config, file, kind = folder / CONFIG, folder / MODEL, str(header.get("model"))[:40]
        if kind not in KINDS:
            raise InputError(f"{config} has a model of kind {kind!r}; this hmmlm reads {', '.join(KINDS)}")
        states, words = (require_size(config, header, name) for name in ("states", "vocab_size"))
        training = _check_training(config, header.get("training"))
        shapes: dict[str, list[int | None]] = {"log_start": [states]}
        if kind == "blocked":
            shapes |= {"block_of_word": [words], "u": [states, None], "w": [states, None], "log_normalizer": [states]}
            shapes |= {"log_emission": [words, None]}
        else:
            shapes |= {"log_transition": [states, states], "log_emission": [states, words]}
        require_tensors(file, tensors, shapes)
        require_dtype(file, tensors, [n for n in shapes if n != "block_of_word"], torch.float32, torch.float64)
        if kind == "blocked":
            require_dtype(file, tensors, ["block_of_word"], torch.int64)
        try:
            hmm = hmm_from_tensors(kind, tensors)
            hmm.validate()
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        return LanguageModel(hmm, tokenizer, training)


def load(path: str | Path) -> LanguageModel:
    """Return the language model in the folder `path`, or the best one of a training run there."""
    return LanguageModel.load(path)


def _as_path(path: object) -> Path:
    """Return the path of a model's folder; raise an InputError for anything else."""
    if not isinstance(path, str | Path):
        raise InputError(f"a model is a folder, not a {type(path).__name__}: give its path")
    return Path(path)


def _check_text(name: str, text: object) -> None:
    """Raise an InputError unless `text` is a string of valid Unicode."""
    if not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} has a lone surrogate, {text[error.start]!r}, at position {error.start}") from None


def _check_training(path: Path, training: Any) -> dict[str, Any]:
    """Return the training configuration in the model file `path`, of any version; its batches say how text is read."""
    if training is None:
        return {}
    require_like(path, training, {}, "training")
    batches = training.get("batches", {})
    require_like(path, batches, {}, "training.batches")
    like = {name: example for name, example in _BATCHES.items() if name in batches}
    require_like(path, batches, like, "training.batches")
    return dict(training)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of texts of similar length, at most _BATCH_TOKENS padded tokens together (or one text)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens [B, T] with −1 beyond each length, and lengths [B]."""
    lengths = torch.tensor([len(s) for s in sequences])
    tokens = torch.full((len(sequences), int(lengths.max())), -1)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return tokens, lengths


def _lines(text: str) -> list[str]:
    """Return the stripped lines of a text; an empty text is one empty line."""
    return [line.strip() for line in text.removesuffix("\n").split("\n")]
