"""Words and phrases that a line must have or must not have, as automata over the tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.errors import InputError
from hmmlm.hmm.automaton import Automaton, anything, containing, spelling

Wanted = str | Sequence[str]
"""A word or phrase, or several of which one is enough: ("dog", "dogs")."""


class Phrases:
    """With a tokenizer of words, a phrase is its tokens in a row. With others it is looked for as it is written,
    between characters that are not of words, whatever tokens write it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces: list[str] | None = None  # what each token adds to a text

    def lines(self, must: Sequence[Wanted], never: Sequence[str], ended: bool = True) -> Automaton:
        """Lines that have each of `must`, of several one, and none of `never`; unless they must have `ended`, also such
        as go on after what is said here."""
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
                raise InputError(f"{what} has a word that the model does not know, so it cannot be asked for")
            automaton &= reduce(or_, each)
        return automaton.until(self.tokenizer.eos_id, ended)

    def _finds(self, text: str, said: bool = False) -> Automaton | None:
        """Texts that have the phrase; None where they cannot, or it cannot be `said`, for want of a word."""
        tokenizer = self.tokenizer
        tokens = self._encode(text)
        if tokenizer.unk_id in tokens and (said or tokenizer.kind == "word"):
            return None
        if tokenizer.kind == "word":
            return containing(tokens, tokenizer.vocab_size)
        if self._pieces is None:
            anchor = tokenizer.encode("a")  # a token may write less at the beginning of a text
            before = len(tokenizer.decode(anchor))
            self._pieces = [tokenizer.decode([*anchor, token])[before:] for token in range(tokenizer.vocab_size)]
        return spelling(text.strip(), self._pieces)

    def _encode(self, text: str) -> list[int]:
        tokens = self.tokenizer.encode(text.strip())
        if not tokens or "\n" in text or self.tokenizer.eos_id in tokens:
            raise InputError(f"{text!r} is not a word or a phrase within a line, so it cannot be asked for")
        return tokens


def check_phrases(must: Sequence[Wanted], never: Sequence[str]) -> None:
    _check("must", must, several=True)
    _check("never", never)


def _check(name: str, texts: object, several: bool = False) -> None:
    """`several`: lists of texts may stand in place of one."""
    if not isinstance(texts, (list, tuple)):
        raise InputError(f"{name} must be a list of words or phrases, not {texts!r}")
    for text in texts:
        if several and isinstance(text, (list, tuple)):
            _check(f"a part of {name}", text)
            if not text:
                raise InputError(f"{name} has a list of no words, of which none can be said: leave it out")
        elif not isinstance(text, str):
            raise InputError(f"{name} must be a list of words or phrases, not {texts!r}")
