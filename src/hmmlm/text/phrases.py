"""Words and phrases that a line must or must not contain, as automata over the tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.errors import InputError
from hmmlm.hmm.automaton import Automaton, anything, containing, spelling

Wanted = str | Sequence[str]
"""A word or phrase, or alternatives: ("dog", "dogs")."""


class Phrases:
    """The automata of phrases, for one tokenizer.

    With a word tokenizer, a phrase is its tokens in a row. With others it is whole words, however they are tokenized.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces: list[str] | None = None  # the text of each token

    def lines(self, must: Sequence[Wanted], never: Sequence[str], ended: bool = True) -> Automaton:
        """Return the automaton of lines that contain each of `must` (one of alternatives) and none of `never`.

        With ended=False, lines that may continue are accepted too.
        """
        check_phrases(must, never)
        automaton = anything(self.tokenizer.vocab_size)
        for text in never:
            if (found := self._finds(text)) is not None:
                automaton &= found.complement()
        for wanted in must:
            texts = [wanted] if isinstance(wanted, str) else wanted
            each = [found for text in texts if (found := self._finds(text, said=True)) is not None]
            if not each:
                what = " or ".join(map(repr, texts))
                raise InputError(
                    f"{what} has a word outside the vocabulary, so the model cannot generate it: remove it from must"
                )
            automaton &= reduce(or_, each)
        return automaton.until(self.tokenizer.eos_id, ended)

    def _finds(self, text: str, said: bool = False) -> Automaton | None:
        """Return the automaton of texts with the phrase; None if it has unknown words and is not matched by characters.

        A phrase to be `said` may not have unknown words even if it is matched by characters.
        """
        tokenizer = self.tokenizer
        tokens = self._encode(text)
        if tokenizer.unk_id in tokens and (said or tokenizer.kind == "word"):
            return None
        if tokenizer.kind == "word":
            return containing(tokens, tokenizer.vocab_size)
        if self._pieces is None:
            anchor = tokenizer.encode("a")  # a token may decode to less at the start of a text
            before = len(tokenizer.decode(anchor))
            self._pieces = [tokenizer.decode([*anchor, token])[before:] for token in range(tokenizer.vocab_size)]
        return spelling(text.strip(), self._pieces)

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a phrase; raise an InputError unless it is within one line."""
        tokens = self.tokenizer.encode(text.strip())
        if not tokens or "\n" in text or self.tokenizer.eos_id in tokens:
            raise InputError(
                f"{text!r} is not a word or phrase within a line: give at least one word, without a line break"
            )
        return tokens


def check_phrases(must: Sequence[Wanted], never: Sequence[str]) -> None:
    """Raise an InputError unless `must` and `never` are lists of words and phrases."""
    _check("must", must, several=True)
    _check("never", never)


def _check(name: str, texts: object, several: bool = False) -> None:
    """Raise an InputError unless `texts` is a list of strings; with `several`, its items may be lists of strings."""
    if not isinstance(texts, (list, tuple)):
        raise InputError(f"{name}: give a list of words or phrases, not {texts!r}")
    for text in texts:
        if several and isinstance(text, (list, tuple)):
            _check(f"an item of {name}", text)
            if not text:
                raise InputError(f"{name} has an empty list: remove it")
        elif not isinstance(text, str):
            raise InputError(f"{name}: give a list of words or phrases, not {texts!r}")
