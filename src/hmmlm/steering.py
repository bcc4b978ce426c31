"""Another language model kept to a constraint by an HMM: a processor of its scores."""

from __future__ import annotations

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.constraints import Guide, Position


class Steering:
    """Adds to the scores of every next token the log of the HMM's chance that all will be accepted after it.

    What comes out is the product of the other model and that chance: its own text given the constraint, as far as the
    HMM resembles it, and always accepted. For `model.generate(…, logits_processor=[Steering(*lm.guide(…))])` of
    transformers, or a loop of your own. Both models read the same tokens; the guide's position is that after the
    prompt, which is the same for all rows, be they samples or beams. One object serves one call of `generate`, with as
    many new tokens as the guide has: with fewer, a text may end before it is accepted.
    """

    def __init__(self, guide: Guide, position: Position) -> None:
        self.guide = guide
        self._settled = guide.automaton.settled()
        self._prompt: int | None = None  # how many tokens it has
        self._positions: dict[tuple[int, ...], Position] = {(): position}  # after what has been said

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [B, T], those of the prompt and what was said, and scores [B, V] of what is next; returns [B, V].

        V may be larger than the HMM's vocabulary: what it does not know is not said until all is accepted anyway.
        """
        words = self.guide.automaton.vocab_size
        if scores.shape[1] < words:
            raise InputError(
                f"there are scores for {scores.shape[1]:,} tokens, and the guide is for {words:,}: both models need "
                "the same tokenizer"
            )
        self._prompt = input_ids.shape[1] if self._prompt is None else self._prompt
        said = [tuple(row) for row in input_ids[:, self._prompt :].tolist()]
        self._positions = {tokens: self._after(tokens) for tokens in dict.fromkeys(said)}
        steered = scores.clone()
        unsettled = {tokens: where for tokens, where in self._positions.items() if not self._settled[where.automaton]}
        if unsettled:
            chances = dict(zip(unsettled, self.guide.chances_of(list(unsettled.values())).to(scores), strict=True))
            for row, tokens in enumerate(said):
                if tokens in chances:
                    steered[row, :words] += chances[tokens]
                    steered[row, words:] = -torch.inf
        return steered

    def _after(self, tokens: tuple[int, ...]) -> Position:
        """Where these leave it; once nothing can go wrong any more, the rest is not read."""
        known = self._positions.get(tokens)
        if known is not None:
            return known
        if not tokens:
            raise InputError("this text does not go on from the last one: make a Steering for every call of generate")
        before = self._after(tokens[:-1])
        return before if self._settled[before.automaton] else self.guide.advance(before, tokens[-1])
