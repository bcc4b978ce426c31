"""A trained HMM with its tokenizer: save, load, score, generate and fill in text.

A saved model is a folder: `model.safetensors` (log_start [Z], log_transition [Z,Z], log_emission [Z,V]; for a blocked
HMM its factors instead), `config.json` (sizes, the tokenizer's fingerprint, the configuration it was trained with) and
the tokenizer's own file. No pickle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.data.files import read_json
from hmmlm.data.tokenizer import Tokenizer, load_tokenizer
from hmmlm.data.words import split_at
from hmmlm.errors import InputError
from hmmlm.generation import Choice, say, say_accepted
from hmmlm.hmm import HMM, AnyHMM, BlockedHMM
from hmmlm.hmm.automaton import Automaton
from hmmlm.hmm.checks import check_whole
from hmmlm.hmm.constraints import Guide, Position
from hmmlm.hmm.infilling import infill_words
from hmmlm.modelfolder import CONFIG, MODEL, model_folder, read_tensors, write_folder
from hmmlm.phrases import Phrases, Wanted, check_phrases

FORMAT = "hmmlm language model"
VERSION = 1
PARAMETERS = {
    "dense": ("log_start", "log_transition", "log_emission"),
    "blocked": ("block_of_word", "u", "w", "log_normalizer", "log_start", "log_emission"),
}
_BLANK = re.compile(r"(?<!\w)_{3,}(?!\w)")  # alone: an identifier may have as many underscores inside
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
        self._guide: tuple[tuple[Any, ...], Automaton, Guide] | None = None  # the last one, and what was asked for
        self._phrases = Phrases(tokenizer)

    def __repr__(self) -> str:
        return f"LanguageModel(states={self.hmm.states}, words={self.hmm.vocab_size}, kind={_kind(self.hmm)!r})"

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
        return [token for line in _lines(text) for token in (*self.tokenizer.encode(line), self._eos)]

    def sequences(self, tokens: Sequence[int]) -> list[list[int]]:
        """The tokens of a text as they are read: one sequence, or one a line where the chain restarts."""
        if not self.restarts:
            return [list(tokens)]
        *lines, rest = split_at(tokens, self._eos)
        return [[*line, self._eos] for line in lines] + ([rest] if rest else [])

    @torch.no_grad()
    def score(self, texts: Sequence[str]) -> Tensor:
        """Natural log-likelihood of each text, `<eos>` included, [len(texts)]; a single str is an error."""
        sequences: list[list[int]] = []
        owner: list[int] = []  # the text that a sequence belongs to
        for i, tokens in enumerate(self._encode_all(texts)):
            parts = self.sequences(tokens)
            sequences += parts
            owner += [i] * len(parts)
        scores = torch.zeros(len(texts), dtype=self.hmm.dtype)
        for chosen in _batches([len(tokens) for tokens in sequences]):
            log_likelihood = self.hmm.log_likelihood(*padded([sequences[i] for i in chosen])).cpu()
            scores.index_add_(0, torch.tensor([owner[i] for i in chosen]), log_likelihood)
        return scores

    def perplexity(self, texts: Sequence[str]) -> float:
        """exp(−Σ log p / Σ tokens) over all texts, `<eos>` and `<unk>` counted; infinite if one is impossible."""
        if not len(texts):
            raise InputError("perplexity needs at least one text")
        tokens = sum(map(len, self._encode_all(texts)))
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
        """`prompt` and an exact sample of what follows it, until `<eos>` or `max_new_tokens`.

        temperature 0 takes the likeliest token every time; `top_k` samples among the k likeliest; the same seed gives
        the same text; with unknown=False every token is drawn given that it is not `<unk>`. A prompt that ends with a
        line break asks for a new line; spaces at its end say nothing.

        With `must` or `never` the line is drawn given that it has each of these words or phrases (of several in a
        tuple, must=["runs", ("dog", "dogs")], one) and none of those, the prompt's part included, and that it ends
        within `max_new_tokens`, `<eos>` counted; with unknown=False also given that what is added has no `<unk>`.
        """
        choice = Choice(max_new_tokens, temperature, top_k, seed)
        given = self._encode_prompt(prompt)
        if must or never:
            guide, position = self.guide(must, never, max_new_tokens, prompt, unknown)
            added = say_accepted(guide, position, self._eos, choice)
        else:
            added = say(self.hmm, self._heard(given), self._eos, choice, None if unknown else self.tokenizer.unk_id)
        # The prompt is given back as it was written, though unknown words in it were read as <unk>.
        text = self.tokenizer.decode([*given, *added])[len(self.tokenizer.decode(given)) :]
        return prompt + (text.lstrip(" ") if prompt.endswith((" ", "\t")) else text)

    def guide(
        self, must: Sequence[Wanted] = (), never: Sequence[str] = (), max_new_tokens: int = 100, prompt: str = "",
        unknown: bool = True, ended: bool = True,
    ) -> tuple[Guide, Position]:  # fmt: skip
        """How likely lines under a constraint are, token by token, and where the prompt leaves them.

        To steer another model with this tokenizer, see `Steering`. `ended`: lines end within `max_new_tokens`;
        otherwise they may go on, having said what they must. The guide is kept until another one is asked for.
        """
        check_phrases(must, never)
        given = self._encode_prompt(prompt)
        heard, line = self._heard(given), split_at(given, self._eos)[-1]
        wanted = tuple(text if isinstance(text, str) else tuple(text) for text in must)
        asked = (wanted, tuple(never), max_new_tokens, unknown, ended)
        if self._guide is None or self._guide[0] != asked:
            automaton = self._phrases.lines(must, never, ended)
            check_whole("max_new_tokens", max_new_tokens, 1)
            banned = automaton if unknown or self.tokenizer.unk_id is None else automaton.without(self.tokenizer.unk_id)
            self._guide = asked, automaton, Guide(self.hmm, banned, max_new_tokens)
        _, automaton, guide = self._guide
        position = guide.begin(heard)._replace(automaton=automaton.read(line))
        hopeful = automaton.hopeful()
        if not bool(hopeful[0]):
            raise InputError("what a line must have and what it must not have contradict each other")
        if not bool(hopeful[position.automaton]):
            raise InputError("the prompt has what it must not have: leave that out of it, or allow it")
        if guide.chance(position) == -math.inf:
            raise InputError(
                f"no line that the model can say in {max_new_tokens} tokens{', <eos> counted,' if ended else ''} has "
                "all that it must and none of what it must not: allow more tokens, or ask for less"
            )
        return guide, position

    def _heard(self, given: list[int]) -> list[int]:
        """What the chain has been through before it goes on after these tokens."""
        heard = split_at(given, self._eos)[-1] if self.restarts else given
        if heard and not bool(self.hmm.log_likelihood([heard]).isfinite()):
            raise InputError("the model gives the prompt probability zero, so nothing can follow it")
        return heard

    @torch.no_grad()
    def infill(self, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
        """For every blank `___` of a text the `top` likeliest words (fewer if no more are possible) and how likely.

        `lm.infill("The ___ returns a list.")[0]` may begin with ("function", 0.31). Exact: given all that stands before
        and after, the end of the line included; what stands in the other blanks is summed over. A blank is one token
        (part of a word, if the tokenizer has such), and never `<eos>`.
        """
        if not isinstance(text, str):
            raise InputError(f"the text is a {type(text).__name__}, not a string")
        check_whole("top", top, 1)
        tokens = [token for line in _lines(text) for token in (*self._encode_blanks(line), self._eos)]
        if -1 not in tokens:
            raise InputError("the text has no blank: write ___ where a word is missing")
        found: list[list[tuple[str, float]]] = []
        for sequence in self.sequences(tokens):
            for probs in infill_words(self.hmm, sequence, self._eos).exp() if -1 in sequence else ():
                best = probs.topk(min(top, len(probs)))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                found.append([(self.tokenizer.token(i), p) for i, p in pairs if p > 0])
        return found

    def _encode_blanks(self, line: str) -> list[int]:
        """The tokens of a line, −1 for each blank."""
        first, *others = _BLANK.split(line)
        tokens = self.tokenizer.encode(first.rstrip())
        for part in map(str.rstrip, others):
            after = self.tokenizer.encode(part)
            if self.tokenizer.kind != "word":  # tokens of parts of words differ at the beginning of a text
                word, both = self.tokenizer.encode("a"), self.tokenizer.encode("a" + part)
                after = both[len(word) :] if both[: len(word)] == word else after
            tokens += [-1, *after]
        return tokens

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
        first, *others = (self.tokenizer.encode(line.strip()) for line in prompt.split("\n"))
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
        write_folder(folder, tensors, header, metadata, self.tokenizer)

    @staticmethod
    def load(path: str | Path) -> LanguageModel:
        """The model in the folder `path`, or the best one of a training run there."""
        folder = model_folder(Path(path))
        header = read_json(folder / CONFIG)
        if header.get("format") in ("hmmlm teacher", "hmmlm baseline"):
            raise InputError(f"{path} is of `{header['format']}`: a neural network, not a hidden Markov model")
        if header.get("format") != FORMAT:
            raise InputError(f"{folder / CONFIG} does not belong to an hmmlm model: it may be of another program")
        if header.get("version") != VERSION:
            raise InputError(f"{folder / CONFIG} has version {header.get('version')!r}; this hmmlm reads {VERSION}")
        kind = header.get("model")
        if kind not in PARAMETERS:
            raise InputError(f"{folder / CONFIG} names a model {kind!r}; this hmmlm reads {', '.join(PARAMETERS)}")
        tensors, metadata = read_tensors(folder / MODEL, PARAMETERS[kind])
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
    write_folder(Path(path), tensors, header, {"format": "pt"})


def load_control(path: str | Path) -> tuple[HMM, dict[str, Any]]:
    """The HMM in a folder of that layout, and its configuration (hidden_states, vocab_size, eos_token_id)."""
    folder = Path(path)
    header = read_json(folder / CONFIG)
    tensors, _ = read_tensors(folder / MODEL, ("alpha_exp", "beta", "gamma"))
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


def padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens [B,T] with −1 beyond each length, and lengths [B]."""
    lengths = torch.tensor([len(s) for s in sequences])
    tokens = torch.full((len(sequences), int(lengths.max())), -1)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return tokens, lengths


def _lines(text: str) -> list[str]:
    """The lines of a text without the space around them; an empty text is one empty line."""
    return [line.strip() for line in text.removesuffix("\n").split("\n")]
