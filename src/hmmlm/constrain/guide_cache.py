"""Guides of constraints on lines: their automata over the tokens of a model, and how likely they are satisfied."""

from __future__ import annotations

import math
from typing import Any

from hmmlm.checks import check_count
from hmmlm.constrain.automaton import Automaton
from hmmlm.constrain.budget import construction
from hmmlm.constrain.constraint import Constraint
from hmmlm.constrain.guide import Guide, Position
from hmmlm.constrain.phrases import Phrases
from hmmlm.data.tokenizers import Tokenizer
from hmmlm.data.words import split_at
from hmmlm.errors import InputError
from hmmlm.hmm import HMM


class GuideCache:
    """The guides of an HMM over the tokens of a tokenizer; the last one is kept."""

    def __init__(self, hmm: HMM, tokenizer: Tokenizer) -> None:
        self.hmm, self.tokenizer, self.phrases = hmm, tokenizer, Phrases(tokenizer)
        self._line: tuple[Constraint, Automaton] | None = None  # the kept automaton of whole lines
        self._guide: tuple[tuple[Any, ...], Guide] | None = None  # the kept guide and its arguments

    @construction()
    def after(
        self,
        given: list[int],
        context: list[int],
        constraint: Constraint,
        max_new_tokens: int,
        allow_unk: bool,
        require_eos: bool = True,
    ) -> tuple[Guide, Position]:
        """Return the guide of a constraint on lines, and the position after the tokens of a prompt.

        Args:
            given: the tokens of the prompt.
            context: those that the continuation depends on.
            allow_unk: whether the new part may have `<unk>`.
            require_eos: whether lines end within `max_new_tokens`.
        """
        begun, end = split_at(given, self.tokenizer.eos_id)[-1], self.tokenizer.eos_id
        check_count("max_new_tokens", max_new_tokens, 1)
        most = constraint.tokens[1]
        if most is not None:
            if not require_eos:
                raise InputError("tokens: a largest number needs a text that ends: leave out require_eos=False")
            max_new_tokens = min(max_new_tokens, most + 1)  # with <eos>
        too_short = InputError(
            f"no line of at most {max_new_tokens} token{'s' if max_new_tokens > 1 else ''}"
            f"{', <eos> counted,' if require_eos else ''} satisfies "
            f"{' and '.join(constraint.names)} under this model: allow more tokens, or relax the constraint"
        )
        words = constraint.words[0]
        if words and words > max_new_tokens * self.phrases.most_words:
            raise too_short  # which is more to the point than too many steps
        kept_line = self._line  # read once: another thread may replace it
        if kept_line is None or kept_line[0] != constraint:
            kept_line = self._line = constraint, self.phrases.line(constraint)
        line = kept_line[1]
        state = line.read(begun)
        if not bool(line.hopeful()[state]):
            if not constraint.never:
                raise InputError('no continuation of the prompt has the whole words of must: use match="substring"')
            raise InputError("the prompt contains a phrase of never: remove it from the prompt, or allow it")
        new = self.phrases.new_text(constraint, begun)
        start = None if new is None else (state, bool(begun), self.phrases.spacing_after(begun))
        asked = (constraint, max_new_tokens, allow_unk, require_eos, start)
        kept = self._guide
        if kept is None or kept[0] != asked:
            automaton = line if new is None else (line.starting_at(state) & new).minimized()
            forbidden = [] if allow_unk or self.tokenizer.unk_id is None else [self.tokenizer.unk_id]
            if constraint and constraint.automaton is None:
                # Inside a phrase they would be part of the text; and a model may end a text with one of them.
                forbidden += self.phrases.without_text
            if forbidden:
                automaton = automaton.without(*forbidden)
            guide = Guide(self.hmm, automaton.until(end, require_eos), max_new_tokens)
            guide.end = end if require_eos else None
            kept = self._guide = asked, guide
        guide = kept[1]
        position = guide.begin(context)._replace(automaton=state if new is None else 0, prompt=tuple(begun))
        if guide.log_prob_accept(position) == -math.inf:
            raise too_short
        return guide, position
