"""What the panels show: a model, its run, a second model, and an index of its states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hmmlm.baselines.ngram import NgramModel
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.explorer.index import StateIndex
from hmmlm.explorer.layout import Layout, lay_out
from hmmlm.explorer.tokens import display
from hmmlm.lm.lm import LanguageModel
from hmmlm.report.results import run_folder, typical_sentence
from hmmlm.training.prepare import reopen

NGRAM_ORDER = 5
NGRAM_TOKENS = 5_000_000  # training tokens that the n-gram is counted on
WARM_STATES = 4096  # most states of a model that answers a constraint at the start: with more, it would take seconds
SENTENCE_TOKENS = 12  # of a sampled sentence, where there is no text to take one from


class Scorer(NamedTuple):
    """A model to compare with."""

    name: str
    encode: Callable[[str], list[int]]  # a text as it is scored, <eos> after each line
    tokenizer: Tokenizer
    log_probs: Callable[[list[int]], list[float]]  # log p(token | tokens before it) of each token


class Explorer:
    """A model and what its panels need. The map and the n-gram are computed in the background."""

    def __init__(self, lm: LanguageModel, folder: Path | None = None, other: LanguageModel | None = None) -> None:
        """`folder` is that of the model, or of the run; `other` is a second model, by default an n-gram of the run."""
        self.lm, self.folder, self.run = lm, folder, None if folder is None else run_folder(folder)
        self.name = _name(self.run or folder, "model")
        self.index = StateIndex(lm)
        self.text, self.sentence = self._open_text()
        self.layout: Future[Layout] = Future()
        self.second: Future[Scorer] = Future()
        if other is not None:
            self.second.set_result(model_scorer(other, _name(other.folder, "second model")))
        elif self.text is None:
            self.second.set_exception(
                InputError("there is no second model: give one (hmmlm explore RUN RUN2), or a run with its token files")
            )
        self._stopped = Event()
        self._thread = Thread(target=self._prepare, name="explorer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop what is computed in the background: a process that ends in the middle of it may crash."""
        self._stopped.set()
        self._thread.join(timeout=20)

    @cached_property
    def vocabulary(self) -> list[str]:
        """The tokens as the page shows them, each once."""
        tokenizer = self.lm.tokenizer
        return list(dict.fromkeys(display(tokenizer, token) for token in range(tokenizer.vocab_size)))

    def _open_text(self) -> tuple[TokenFile | None, str]:
        """Return the training text of the run, if it is there, and a sentence to start with."""
        try:
            data = None if self.run is None else reopen(self.run)
        except InputError:  # damaged, or of another version: the other panels work without it
            data = None
        if data is None or data.tokenizer.fingerprint() != self.lm.tokenizer.fingerprint():
            return None, self.lm.generate(max_new_tokens=SENTENCE_TOKENS, seed=0)
        return data.tokens["train"], typical_sentence(data)

    def _prepare(self) -> None:
        """Compute the map and the n-gram, and before them what the model keeps of its first answers."""
        self.lm.next_token("", top=1)
        # How tokens are spelled depends on whether a word precedes them.
        for prompt in ("", self.sentence.split(" ")[0]) if self.lm.hmm.num_states <= WARM_STATES else ():
            with contextlib.suppress(InputError):  # of a model that never ends a line
                self.lm.generate(prompt, regex=".*", max_new_tokens=2, seed=0)
        if not self.second.done():
            _fulfil(self.second, self._ngram)
        _fulfil(self.layout, lambda: lay_out(self.index, self._stopped))

    def _ngram(self) -> Scorer:
        assert self.text is not None
        tokenizer = self.lm.tokenizer
        ids = np.asarray(self.text.tokens[:NGRAM_TOKENS])
        ngram = NgramModel(ids, tokenizer.vocab_size, NGRAM_ORDER, tokenizer.eos_id if self.lm.restarts else None)
        part = f" of {len(ids):,} tokens" if len(self.text) > len(ids) else ""
        return Scorer(
            f"Kneser-Ney {NGRAM_ORDER}-gram{part}",
            self.lm.encode,
            tokenizer,
            lambda tokens: ngram.log_probs(np.asarray(tokens)).tolist(),
        )


def model_scorer(lm: LanguageModel, name: str) -> Scorer:
    """Return a language model as a scorer."""

    def log_probs(tokens: list[int]) -> list[float]:
        (scores,) = lm.token_log_probs([tokens])
        assert isinstance(scores, Tensor)
        return scores.tolist()

    return Scorer(name, lm.encode, lm.tokenizer, log_probs)


def _name(folder: Path | None, default: str) -> str:
    """Return the name of a run or model: that of its folder."""
    return default if folder is None else folder.resolve().name or str(folder)


def _fulfil(future: Future[Any], compute: Callable[[], Any]) -> None:
    """Set the result of a future, or the error."""
    try:
        future.set_result(compute())
    except Exception as error:  # shown by the panel that needs the result
        future.set_exception(error)
