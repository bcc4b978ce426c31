"""Words and phrases that a line must have or must not have, as automata over the tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hmmlm.data.tokenizer import Tokenizer
from hmmlm.errors import InputError
from hmmlm.hmm.automaton import Automaton, anything, containing, spelling


class Phrases:
    """With a tokenizer of words, a phrase is its tokens in a row. With others it is looked for as it is written,
    between characters that are not of words, whatever tokens write it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pieces: list[str] | None = None  # what each token adds to a text

    def lines(self, must: Sequence[str], never: Sequence[str], ended: bool = True) -> Automaton:
        """Lines that have each phrase of `must` and none of `never`; unless they must have `ended`, also those that go
        on after what is said here."""
        check_phrases(must, never)
        tokenizer = self.tokenizer
        automaton = anything(tokenizer.vocab_size)
        for text in never:
            tokens = self._encode(text)
            if tokenizer.kind != "word" or tokenizer.unk_id not in tokens:  # else it is never said anyway
                automaton &= self._finds(text, tokens).complement()
        for text in must:
            tokens = self._encode(text)
            if tokenizer.unk_id in tokens:
                raise InputError(f"{text!r} has a word that the model does not know, so it cannot be asked for")
            automaton &= self._finds(text, tokens)
        return automaton.until(tokenizer.eos_id, ended)

    def _encode(self, text: str) -> list[int]:
        tokens = self.tokenizer.encode(text.strip())
        if not tokens or "\n" in text or self.tokenizer.eos_id in tokens:
            raise InputError(f"{text!r} is not a word or a phrase within a line, so it cannot be asked for")
        return tokens

    def _finds(self, text: str, tokens: list[int]) -> Automaton:
        if self.tokenizer.kind == "word":
            return containing(tokens, self.tokenizer.vocab_size)
        if self._pieces is None:
            anchor = self.tokenizer.encode("a")  # a token may write less at the beginning of a text
            before = len(self.tokenizer.decode(anchor))
            every = range(self.tokenizer.vocab_size)
            self._pieces = [self.tokenizer.decode([*anchor, token])[before:] for token in every]
        return spelling(text.strip(), self._pieces)


def check_phrases(must: Iterable[str], never: Iterable[str]) -> None:
    for name, texts in {"must": must, "never": never}.items():
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{name} must be a list of words or phrases, not {texts!r}")
