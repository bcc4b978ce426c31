"""Constraints as automata over the tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import or_

import torch

from hmmlm.checks import check_text
from hmmlm.constrain.automaton import Automaton, anything, at_least, containing
from hmmlm.constrain.budget import construction
from hmmlm.constrain.constraint import Constraint
from hmmlm.constrain.spelling import SpacedSpelling, Spelling, containing_text
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.data.words import Spacing, WordTokenizer
from hmmlm.errors import InputError

_KEPT = 64  # compiled constraints


class Phrases:
    """The automata of constraints, for one tokenizer.

    With a word tokenizer, a phrase is its tokens in a row. With others it is whole words, however they are tokenized.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[tuple[Constraint, bool, Spacing], Automaton | None] = {}
        self._in_bytes: dict[Spacing, Spelling | SpacedSpelling] = {}

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        """The tokens as bytes."""
        return [self.tokenizer.spell(token) for token in range(self.tokenizer.vocab_size)]

    @cached_property
    def most_words(self) -> int:
        """The largest number of words in one token."""
        return max((len(spelling.split()) for spelling in self._bytes if spelling), default=1)

    @cached_property
    def without_text(self) -> list[int]:
        """The tokens that are no text, except `<eos>` and `<unk>`: those for the start of a text, padding, a chat."""
        named = (self.tokenizer.eos_id, self.tokenizer.unk_id)
        return [token for token, spelling in enumerate(self._bytes) if spelling is None and token not in named]

    @cached_property
    def _characters(self) -> Spelling | SpacedSpelling:
        """The tokens as characters, and bytes that are no whole character; these and `<unk>` are parts of words."""
        unknown = self.tokenizer.unk_id
        texts = ["" if spelling is None else spelling.decode(errors="surrogateescape") for spelling in self._bytes]
        if unknown is not None:
            texts[unknown] = " \ufffd" if self.tokenizer.kind == "word" else "\ufffd"
        return self._spelling(texts, self.spacing_after([]))

    def _spelling(self, spellings: Sequence[bytes | str | None], start: Spacing) -> Spelling | SpacedSpelling:
        """Return the spelling of the tokens as `decode` joins them, from the spacing `start` on."""
        tokenizer = self.tokenizer
        marks = (
            [tokenizer.mark(id) for id in range(tokenizer.vocab_size)] if isinstance(tokenizer, WordTokenizer) else []
        )
        if not any(marks):
            return Spelling(spellings)
        kinds = sorted(set(marks))
        spacings = [start]
        for spacing in spacings:
            spacings += [after for after in dict.fromkeys(map(spacing.after, kinds)) if after not in spacings]
        return SpacedSpelling(
            spellings,
            torch.tensor([kinds.index(mark) for mark in marks]),
            torch.tensor([[spacing.joins(kind) for kind in kinds] for spacing in spacings]),
            torch.tensor([[spacings.index(spacing.after(kind)) for kind in kinds] for spacing in spacings]),
        )

    @cached_property
    def _strips(self) -> bool:
        """Whether the space of the first word of a line is not part of its text."""
        first = self.tokenizer.encode("a")
        return self.tokenizer.kind == "word" or (self.tokenizer.spell(first[0]) or b"").startswith(b" ")

    @construction()
    def line(self, constraint: Constraint) -> Automaton:
        """Return the automaton of lines that contain each of `must` (one of alternatives) and none of `never`."""
        automaton = anything(self.tokenizer.vocab_size)
        if (found := self._finds(constraint.never, constraint)) is not None:
            automaton &= ~found
        for wanted in constraint.must:
            texts = [wanted] if isinstance(wanted, str) else wanted
            if (found := self._finds(texts, constraint, said=True)) is None:
                what = " or ".join(map(repr, texts))
                raise InputError(
                    f"{what} has a word outside the vocabulary, so the model cannot generate it: remove it from must"
                )
            automaton &= found
        if not bool(automaton.hopeful()[0]):
            raise InputError("must and never contradict each other")
        return automaton.minimized()

    @construction()
    def whole(self, constraint: Constraint) -> Automaton:
        """Return the automaton of the lines that satisfy a constraint."""
        line, new = self.line(constraint), self.new_text(constraint, begun=[])
        return line if new is None else line & new

    @construction()
    def new_text(self, constraint: Constraint, begun: Sequence[int]) -> Automaton | None:
        """Return the automaton of the tokens that follow a prompt; None if they are free.

        `begun`: the tokens of the prompt's last line. A space may separate them from those that follow.
        """
        spacing, kept = self.spacing_after(begun), self._texts
        key = constraint, bool(begun), spacing
        if key not in kept:
            if len(kept) == _KEPT:
                kept = self._texts = {}  # another thread may still read the earlier ones
            kept[key] = self._compile(constraint, bool(begun) or self._strips, spacing)
        return kept[key]

    def spacing_after(self, begun: Sequence[int]) -> Spacing:
        """Return what the spaces after the tokens of a line depend on."""
        spacing = Spacing()
        if isinstance(self.tokenizer, WordTokenizer):
            spacing = self.tokenizer.spacing
            for token in begun:
                spacing = spacing.after(self.tokenizer.mark(token))
        return spacing

    def _compile(self, constraint: Constraint, optional_space: bool, spacing: Spacing) -> Automaton | None:
        parts = []
        spelled = constraint.byte_automaton(optional_space)
        names = [name for name in constraint.names if name in ("choice", "regex", "json", "words", "suffix")]
        if spelled is not None:
            if not bool(spelled.hopeful()[0]):
                raise InputError(f"no text satisfies {' and '.join(names)}: {_remedy(names)}")
            if spacing not in self._in_bytes:
                self._in_bytes[spacing] = self._spelling(self._bytes, spacing)
            tokens = self._in_bytes[spacing].automaton(spelled, rejects=True).minimized()
            if not bool(tokens.hopeful()[0]):
                raise InputError(f"the tokens of this model cannot spell a text that satisfies {' and '.join(names)}")
            parts.append(tokens)
        if constraint.tokens[0]:
            parts.append(at_least(constraint.tokens[0], self.tokenizer.vocab_size))
        if constraint.automaton is not None:
            parts.append(constraint.automaton)
        if not parts:
            return None
        joined = reduce(lambda one, other: one & other, parts)
        if not bool(joined.hopeful()[0]):
            raise InputError(f"no text satisfies {' and '.join(constraint.names)}: {_remedy(constraint.names)}")
        return joined

    def _finds(self, texts: Sequence[str], constraint: Constraint, said: bool = False) -> Automaton | None:
        """Return the automaton of lines with one of some phrases; None if none is possible.

        A phrase of unknown words is possible where it is matched by characters, unless it is to be `said`.
        """
        tokenizer, whole = self.tokenizer, constraint.match == "word"
        in_tokens, in_characters, found = list[list[int]](), list[str](), list[Automaton]()
        for text in texts:
            tokens = self._encode(text)
            if not said and tokenizer.unk_id is not None and text.strip() == tokenizer.token(tokenizer.unk_id):
                in_tokens.append([tokenizer.unk_id])
            elif tokenizer.unk_id not in tokens or not whole or not (said or tokenizer.kind == "word"):
                if tokenizer.kind == "word" and whole:
                    in_tokens.append(tokens)
                else:
                    in_characters.append(text.strip())
        if in_tokens:
            found.append(containing(in_tokens[0], tokenizer.vocab_size, *in_tokens[1:]))
        if in_characters:
            left = constraint.match != "substring"
            found.append(containing_text(in_characters, self._characters, left=left, right=whole))
        possible = [automaton for automaton in found if bool(automaton.hopeful()[0])]
        return reduce(or_, possible) if possible else None

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a phrase; raise an InputError unless it is within one line."""
        check_text("a phrase", text)
        tokens = self.tokenizer.encode(text.strip())
        if not tokens or "\n" in text or self.tokenizer.eos_id in tokens:
            raise InputError(
                f"{text!r} is not a word or phrase within a line: give at least one word, without a line break"
            )
        return tokens


def _remedy(names: list[str]) -> str:
    return "they contradict each other" if len(names) > 1 else "change it"
