"""A logits processor that makes another language model satisfy a constraint, with an HMM."""

from __future__ import annotations

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.constraints import Guide, Position


class Steering:
    """A logits processor that adds the HMM's log-probability of acceptance after each token to the token's score.

    The result is the product of the other model and this probability. Its text is always accepted, and follows the
    other model given the constraint as closely as the HMM approximates that model. Use it in transformers,
    `model.generate(…, logits_processor=[Steering(*lm.guide(…))])`, or in a loop of your own. Both models need the same
    tokens. The guide's position is the one after the prompt, which all rows (samples or beams) share. One object serves
    one call of `generate`, with as many new tokens as the guide has: with fewer, a text may end before it is accepted.
    """

    def __init__(self, guide: Guide, position: Position) -> None:
        self.guide = guide
        self._settled = guide.automaton.settled()
        self._prompt: int | None = None  # number of tokens
        self._positions: dict[tuple[int, ...], Position] = {(): position}  # by generated tokens

    def __repr__(self) -> str:
        return f"Steering({self.guide!r})"

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return steered scores [B, V] for prompt and generated tokens [B, T], and scores [B, V] of the next token.

        V may exceed the HMM's vocabulary: tokens outside it are forbidden until every continuation is accepted.
        """
        words = self.guide.automaton.vocab_size
        if scores.shape[1] < words:
            raise InputError(
                f"the scores are for {scores.shape[1]:,} tokens, but the guide is for {words:,}: both models need "
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
        """Return the position after `tokens`; once every continuation is accepted, further tokens are not read."""
        known = self._positions.get(tokens)
        if known is not None:
            return known
        if not tokens:
            raise InputError(
                "the text does not continue the previous one: create a new Steering for every call of generate"
            )
        before = self._after(tokens[:-1])
        return before if self._settled[before.automaton] else self.guide.advance(before, tokens[-1])
