"""A trained HMM with its tokenizer: save, load, score, generate and infill text.

A saved model is a folder: `model.safetensors` (log_start [Z], log_transition [Z, Z] and log_emission [Z, V], or the
factors of a blocked HMM), `config.json` (sizes, the tokenizer's fingerprint, the training configuration) and the
tokenizer's own file. No pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from hmmlm.arguments import check_arguments, check_keywords, check_type, describe, is_sequence
from hmmlm.checks import check_count, check_text
from hmmlm.constrain.automaton import Automaton
from hmmlm.constrain.constraint import Constraint, ConstraintOptions, Wanted
from hmmlm.constrain.guide import Guide, Position
from hmmlm.constrain.guide_cache import GuideCache
from hmmlm.constrain.steering import Steering
from hmmlm.data.files import is_integer, write_bytes
from hmmlm.data.hmmfolder import load_hmm
from hmmlm.data.modelfolder import CONFIG, LANGUAGE_MODEL, as_folder, save_model
from hmmlm.data.text import split_units
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.data.words import split_at
from hmmlm.device import pick_device
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.lm.blanks import encode_blanks, readable_token
from hmmlm.lm.ctrlg import ctrlg_tokenizer, is_ctrlg_folder, load_ctrlg
from hmmlm.lm.embeddings import long_run, states_of_words
from hmmlm.lm.generation import Rows, SamplingOptions, sample_accepted, sample_continuations
from hmmlm.lm.hub import CARD, model_card
from hmmlm.lm.reading import check_training
from hmmlm.lm.sequences import SequenceModel
from hmmlm.scan.composition import kinds_of


class Page(Protocol):
    """The page of `LanguageModel.explore`."""

    url: str

    def export(self, path: str | Path) -> None:
        """Write the parts of the page that need no server into one file."""

    def close(self) -> None:
        """Stop the server."""


class GuideOptions(ConstraintOptions, total=False):
    """The options of `guide`, beside its constraint."""

    allow_unk: bool
    require_eos: bool


class LanguageModel(SequenceModel):
    """An HMM over the tokens of `tokenizer`; `config` is the training configuration, stored unchanged.

    A text is one example or several, as in training: lines, or paragraphs if the configuration says so (text.unit);
    blank lines are not counted. Every example ends with `<eos>`. The chain continues through it, unless the
    configuration restarts it there in evaluation (batches.eval_reset_at_eos), or after every `length` tokens
    (batches.kind = "chunks"). Every method, `hmmlm eval` included, reads a text in this way.
    """

    @check_arguments
    def __init__(self, hmm: HMM, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> None:
        if hmm.vocab_size != tokenizer.vocab_size:
            raise InputError(
                f"the model has a vocabulary of {hmm.vocab_size}, the tokenizer one of {tokenizer.vocab_size}: "
                "they do not belong together"
            )
        self.hmm, self.tokenizer, self.config = hmm, tokenizer, dict(config or {})
        self.folder: Path | None = None  # that it was loaded from
        self._guides = GuideCache(hmm, tokenizer)

    def __repr__(self) -> str:
        return f"LanguageModel(num_states={self.hmm.num_states}, words={self.hmm.vocab_size}, kind={self.hmm.kind!r})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        trained_on = self.config.get("data")
        facts = {"tokenizer": repr(self.tokenizer)} | ({"trained on": str(trained_on)} if trained_on else {})
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
        return f"<b>LanguageModel</b><table>{rows}</table>{self.hmm._repr_html_()}"

    def to(self, device: str | torch.device) -> LanguageModel:
        """Return the model on another device: "auto" (a GPU if there is one), "cpu", "cuda", or a torch.device."""
        moved = LanguageModel(self.hmm.to(pick_device(device)), self.tokenizer, self.config)
        moved.folder = self.folder
        return moved

    # --- text ---

    @torch.no_grad()
    def next_token(self, text: str = "", top: int = 5) -> list[tuple[str, float]]:
        """Return the `top` most likely tokens after a text with their probabilities; `<eos>` ends the line.

        With subword tokenizers, "…ing" continues the last word; other tokens start a word.
        """
        check_count("top", top, 1)
        given = self._encode_prompt(text)
        context = self.context(given)
        log_probs = self.hmm.next_token([context])[0] if context else self.hmm.emit(self.hmm.begin())
        return self._most_likely(log_probs.exp(), top, bool(given) and given[-1] != self._eos)

    def embeddings(self) -> Tensor:
        """Compute p(state | word) [V, Z] for a word somewhere in a long text; zero for a word of probability zero."""
        return self._embeddings.clone()

    @cached_property
    def _embeddings(self) -> Tensor:
        chain = long_run(self.hmm, self._eos if self.restarts else None)
        return states_of_words(chain).to(self.hmm.dtype)

    def nearest(self, word: str, top: int = 10) -> list[tuple[str, float]]:
        """Return the `top` words that are emitted by the most similar states, by the cosine of `embeddings`."""
        check_count("top", top, 1)
        token = self.token_id(word)
        vectors = torch.nn.functional.normalize(self._embeddings, dim=1)
        similarity = vectors @ vectors[token]
        similarity[token] = -1.0
        best = similarity.topk(min(top, len(similarity) - 1))
        return [(self.tokenizer.token(i), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def token_id(self, word: str) -> int:
        """Return the token of a word; raise an InputError if the vocabulary does not have it."""
        check_text("the word", word)
        alone, anchor = self.tokenizer.encode(word), self.tokenizer.encode("a")
        within = self.tokenizer.encode(f"a {word}")[len(anchor) :]  # subword tokens differ at the beginning of a text
        token = next((tokens[0] for tokens in (within, alone) if len(tokens) == 1), None)
        if token is None or (token == self.tokenizer.unk_id and word != self.tokenizer.token(token)):
            raise InputError(f"{word!r} is not a word of the vocabulary")
        return token

    def _sample(self, given: list[int], asked: Constraint, options: SamplingOptions, allow_unk: bool) -> Iterator[Rows]:
        if asked:
            most = options.max_new_tokens
            guide, position = self._guides.after(given, self.context(given), asked, most, allow_unk)
            return sample_accepted(guide, position, self._eos, options)
        excluded = None if allow_unk else self.tokenizer.unk_id
        return sample_continuations(self.hmm, self.context(given), self._eos, options, excluded, self.chunk)

    @check_keywords
    def guide(
        self,
        must: Sequence[Wanted] = (),
        never: Sequence[str] = (),
        max_new_tokens: int = 100,
        prompt: str = "",
        allow_unk: bool = True,
        require_eos: bool = True,
        **constraint: Unpack[ConstraintOptions],
    ) -> tuple[Guide, Position]:
        """Return the guide of a constraint on lines, and the position after the prompt.

        The constraint is that of `generate`. To steer another model, see `logits_processor`. With `require_eos`,
        lines end within `max_new_tokens`; otherwise they may continue once they satisfy the constraint. The guide is
        cached until another one is requested.
        """
        check_type("allow_unk", allow_unk, bool)
        check_type("require_eos", require_eos, bool)
        given, asked = self._encode_prompt(prompt), Constraint(must, never, **constraint)
        return self._guides.after(given, self.context(given), asked, max_new_tokens, allow_unk, require_eos)

    @check_keywords
    def logits_processor(
        self,
        must: Sequence[Wanted] = (),
        never: Sequence[str] = (),
        max_new_tokens: int = 100,
        prompt: str | Sequence[str] = "",
        weight: float = 1.0,
        **options: Unpack[GuideOptions],
    ) -> Steering:
        """Return what makes another model with these tokens satisfy the constraint of `generate`: see `Steering`.

        Use it in transformers: `model.generate(ids, logits_processor=[lm.logits_processor(must=["a list"])])`.

        Args:
            prompt: one for all rows of a call, or one for each.
            weight: of the log-probability that the constraint will be satisfied; 0 only forbids what would violate it.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not is_sequence(prompts) or not len(prompts):
            raise InputError(f"prompt must be a string, or a list of one for each row, not {describe(prompt)}")
        guided = [self.guide(must, never, max_new_tokens, each, **options) for each in prompts]
        return Steering.batch(guided, weight)

    @check_keywords
    def automaton(
        self, must: Sequence[Wanted] = (), never: Sequence[str] = (), **constraint: Unpack[ConstraintOptions]
    ) -> Automaton:
        """Return the automaton of a constraint over the tokens of a line without `<eos>`.

        Automata are combined with &, | and ~, and given to `generate` and `guide` as `automaton`.
        """
        return self._guides.phrases.whole(Constraint(must, never, **constraint))

    @check_arguments
    def context(self, given: list[int]) -> list[int]:
        """Return the tokens of a prompt that its continuation depends on."""
        context = split_at(given, self._eos)[-1] if self.restarts else given
        context = context if self.chunk is None else context[len(context) // self.chunk * self.chunk :]
        if context and not bool(self.hmm.log_likelihood([context]).isfinite()):
            raise InputError("the prompt has probability zero under the model, so nothing can follow it")
        return context

    @torch.no_grad()
    def infill(self, text: str, top: int = 5, allow_unk: bool = True) -> list[list[tuple[str, float]]]:
        """Return, for every blank `___` of a text, the `top` most likely words with their probabilities.

        `lm.infill("The ___ returns a list.")[0]` may start with ("function", 0.31). Exact: given all text before and
        after the blank, including the end of the line; other blanks are summed over. A blank is one token, and never
        `<eos>`. With subword tokenizers it may be the first part of a word, or continue the word before it: "…ing".
        With allow_unk=False the probabilities are those given that the blank is not `<unk>`.
        """
        check_text("the text", text)
        check_count("top", top, 1)
        check_type("allow_unk", allow_unk, bool)
        units = split_units(text, self._unit)
        tokens = [token for unit in units for token in (*encode_blanks(self.tokenizer, unit), self._eos)]
        if -1 not in tokens:
            raise InputError("the text has no blank: write ___ for a missing word")
        blanks = [i for i, token in enumerate(tokens) if token == -1]
        inside = iter([i > 0 and tokens[i - 1] != self._eos for i in blanks])
        found: list[list[tuple[str, float]]] = []
        for sequence in self.sequences(tokens):
            for log_probs in self.hmm.infill_blanks([sequence], self._eos) if -1 in sequence else ():
                if not allow_unk and self.tokenizer.unk_id is not None:
                    log_probs[self.tokenizer.unk_id] = -math.inf
                    log_probs -= log_probs.logsumexp(0).clamp_min(torch.finfo(log_probs.dtype).min)
                found.append(self._most_likely(log_probs.exp(), top, next(inside)))
        return found

    def _most_likely(self, probs: Tensor, top: int, inside: bool) -> list[tuple[str, float]]:
        """Return the `top` most likely tokens, by probs [V], as words; `inside`: not at the start of a line."""
        best = probs.topk(min(top, len(probs)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(readable_token(self.tokenizer, i, inside), p) for i, p in pairs if p > 0]

    @check_arguments
    def explore(self, other: LanguageModel | None = None, height: int = 760) -> Page:
        """Show the panels of `hmmlm explore` in a notebook; elsewhere, `url` of the result is the page.

        Args:
            other: a second model to compare with; by default an n-gram of the text that the run was trained on.
            height: of the frame, in pixels.
        """
        check_count("height", height, 1, 100_000)
        import hmmlm  # which loads the explorer on first use: it is above

        page: Page = hmmlm.Display(self, other, height)
        return page

    # --- files ---

    def save(self, path: str | Path) -> None:
        """Write the model into the folder `path`. A failure leaves an existing model unchanged."""
        folder = as_folder(path)
        header = {
            **kinds_of(self.hmm),
            "states": self.hmm.num_states,
            "vocab_size": self.hmm.vocab_size,
            "eos_id": self._eos,
            "training": self.config,
        }
        save_model(folder, LANGUAGE_MODEL, header, self.hmm.tensors(), self.tokenizer)

    @check_arguments
    def save_pretrained(self, path: str | Path, results: str | Path | None = None) -> None:
        """Write the model into the folder `path` with a model card, for the Hugging Face hub.

        A README.md that exists there is kept.

        Args:
            results: the `results.json` of the training run, for the figures of the card; that of the run that the
                model was loaded from is found.
        """
        card = model_card(self, results)
        self.save(path)
        if not (file := as_folder(path) / CARD).exists():
            write_bytes(file, card.encode())


def load(path: str | Path, device: str | torch.device = "auto") -> LanguageModel:
    """Return the HMM in the folder `path`, or the best one of a training run there (see `hmmlm.load`)."""
    chosen = pick_device(device)
    if is_ctrlg_folder(as_folder(path)):
        hmm, header = load_ctrlg(path)
        return LanguageModel(hmm.to(chosen), ctrlg_tokenizer(Path(path), header["eos_token_id"]))
    (folder, header, _, tokenizer), model = load_hmm(as_folder(path))
    training = check_training(folder / CONFIG, header.get("training"))
    if not is_integer(header.get("eos_id", tokenizer.eos_id), tokenizer.eos_id):
        raise InputError(
            f"{folder / CONFIG}: eos_id is {header['eos_id']!r:.40}, but the tokenizer has {tokenizer.eos_id}: "
            "files of two models are mixed"
        )
    lm = LanguageModel(model.to(chosen), tokenizer, training)
    lm.folder = Path(path)
    return lm
