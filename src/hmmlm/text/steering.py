"""A logits processor that makes another language model satisfy constraints, with an HMM."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.arguments import check_arguments, is_sequence
from hmmlm.errors import InputError, InputWarning
from hmmlm.hmm.checks import check_number
from hmmlm.hmm.constraints import Guide, Position, advance_states, chances_of
from hmmlm.hmm.guided_step import StepRow
from hmmlm.ops.common import NEG_INF

_DOUBTFUL = 4  # calls whose sums may have underflowed in the kernels of a step, after which these are not tried again
_KEPT_TOKENS = 64  # positions of texts shorter than the current ones by more are computed again if needed

Text = tuple[int, ...]


class SteeringReport(NamedTuple):
    """What steering did to a model's choices."""

    tokens: int
    """Number of scored tokens that were still constrained, over all rows."""
    changed: int
    """Number of these for which the most likely token became another."""


@dataclass
class _Row:
    """A text and its position under the constraint."""

    root: int  # the number of its prompt's guide
    position: Position
    settled: bool


@dataclass
class _Progress:
    """The texts of the last call, to find those that stopped too early."""

    rows: dict[tuple[int, Text], _Row]
    guides: Sequence[Guide]
    last: Sequence[tuple[int, Text]] = ()  # the rows of the last call
    reordered: bool = False  # by beams, of which complete ones are rows no more, or by drafts: no text may be final


class Steering:
    """A logits processor that adds the HMM's log-probability of acceptance after each token to the token's score.

    The result is the product of the other model and this probability, normalized. Its text is always accepted, and
    follows the other model given the constraint as closely as the HMM approximates that model. Use it in transformers,
    `model.generate(…, logits_processor=[Steering(*lm.guide(…))])`, or in a loop of your own. Both models need the same
    tokens. All rows of a call (samples or beams) share the guide; `Steering.batch` has one per prompt. A call whose
    rows do not continue those of the previous call starts from the prompt again.

    Args:
        weight: factor of the log-probability of acceptance; 0 only forbids tokens that cannot be accepted any more.
    """

    def __init__(self, guide: Guide, position: Position, weight: float = 1.0) -> None:
        self._set([(guide, position)], weight)

    @classmethod
    def batch(cls, guided: Sequence[tuple[Guide, Position]], weight: float = 1.0) -> Steering:
        """Return a processor for a batch of prompts, each with the guide and position of `lm.guide`.

        Prompts are in the order of the rows; with several samples or beams, each prompt has as many rows in a row.
        """
        if not is_sequence(guided) or not len(guided):
            raise InputError("give a list of at least one pair of a guide and its position")
        steering = cls.__new__(cls)
        steering._set(guided, weight)
        return steering

    def _set(self, guided: Sequence[tuple[Guide, Position]], weight: float) -> None:
        kinds = (Guide, Position)
        pairs = (pair if isinstance(pair, tuple | list) else () for pair in guided)
        if not all(len(pair) == 2 and all(map(isinstance, pair, kinds)) for pair in pairs):
            raise InputError(
                "a guide and its position are needed: Steering(*lm.guide(…)), or Steering.batch([lm.guide(…), …])"
            )
        check_number("weight", weight)
        self.guides, self.weight = [guide for guide, _ in guided], float(weight)
        if any(guide.hmm is not self.guides[0].hmm for guide in self.guides):
            raise InputError("the guides of a batch need the same HMM: make them with one LanguageModel")
        distinct = {id(guide): guide for guide in self.guides}
        self._settled = {key: guide.automaton.settled().tolist() for key, guide in distinct.items()}
        self._roots = [self._row(number, position) for number, (_, position) in enumerate(guided)]
        self._prompts: list[Text] = []  # the rows of the first call
        self._length = 0  # of the rows of the last call
        self._changed: int | Tensor = 0
        self._steps = self.guides[0].hmm.guided_steps()
        self._doubtful = 0  # calls for which they did not serve
        self._tokens = 0
        self._progress = _Progress({}, self.guides)
        weakref.finalize(self, _warn_unmet, self._progress)

    def __repr__(self) -> str:
        return f"Steering({self.guides[0]!r}{f', prompts={len(self.guides)}' if len(self.guides) > 1 else ''})"

    @property
    def report(self) -> SteeringReport:
        """How often the most likely token became another, over all calls."""
        return SteeringReport(self._tokens, int(self._changed))

    @torch.no_grad()
    @check_arguments
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return steered scores [B, V] for prompt and generated tokens [B, T], and scores [B, V] of the next token.

        V may exceed the HMM's vocabulary: tokens outside it are forbidden until every continuation is accepted.
        """
        words = self.guides[0].automaton.vocab_size
        whole = not (input_ids.dtype.is_floating_point or input_ids.dtype.is_complex or input_ids.dtype == torch.bool)
        if input_ids.dim() != 2 or not whole or scores.dim() != 2 or not 0 < len(input_ids) == len(scores):
            raise InputError(
                f"input_ids must be integers [rows, tokens] and scores [rows, words], not {list(input_ids.shape)} of "
                f"{str(input_ids.dtype).removeprefix('torch.')} and {list(scores.shape)}"
            )
        if not scores.dtype.is_floating_point:
            raise InputError(f"scores must be log-probabilities, not {str(scores.dtype).removeprefix('torch.')}")
        if scores.shape[1] < words:
            raise InputError(
                f"the scores are for {scores.shape[1]:,} tokens, but the guide is for {words:,}: both models need "
                "the same tokenizer"
            )
        keys, progress = self._keys(input_ids), self._progress
        pairs = zip(keys, progress.last, strict=False)
        progress.reordered |= any(now[1] and now[1][:-1] != then[1] for now, then in pairs)
        progress.last = keys
        steered = self._replay(keys, scores)
        if steered is None:
            self._advance_to(keys)
            steered = self._score(keys, scores)
        longest = len(keys[0][1])
        if not longest % _KEPT_TOKENS:
            kept = {
                key: row for key, row in progress.rows.items() if not key[1] or len(key[1]) > longest - _KEPT_TOKENS
            }
            progress.rows = kept
        return steered

    def _replay(self, keys: Sequence[tuple[int, Text]], scores: Tensor) -> Tensor | None:
        """Advance to `keys` and return steered scores [B, V], by the kernels of a step; None if these do not serve."""
        if self._steps is None or scores.device != self.guides[0].hmm.device:
            return None
        rows, requests, afters = self._progress.rows, list[StepRow](), list[_Row]()
        begins, words, constrained = keys[0] in rows, self.guides[0].automaton.vocab_size, 0
        for key in keys:
            root, text = key
            row = rows.get(key if begins else (root, text[:-1]))
            if row is None:
                return None
            token, plan, table = -1, None, None
            if not begins and not row.settled:
                token = text[-1]
                if not 0 <= token < words:
                    return None
                row = self._after(row, token, row.position.log_state)
            position = row.position
            if not row.settled:
                plan, table = self.guides[root].plan(position.automaton, position.remaining)
                constrained += 1
            requests.append(StepRow(position.log_state, token, plan, table))
            afters.append(row)
        result = self._steps.run(requests, scores, self.weight) if constrained else None
        if constrained and result is None:
            self._doubtful += 1
            if self._doubtful == _DOUBTFUL:
                self._steps = None
            return None
        if result is not None and not begins:
            for row, log_state in zip(afters, result.log_states.unbind(), strict=True):
                if not row.settled:
                    row.position = Position(log_state, *row.position[1:])
        rows.update(zip(keys, afters, strict=True))
        if result is None:
            return scores
        self._tokens, self._changed = self._tokens + constrained, self._changed + result.changed
        return result.scores

    def _score(self, keys: Sequence[tuple[int, Text]], scores: Tensor) -> Tensor:
        """Return steered scores [B, V] of texts whose positions are known."""
        progress = self._progress
        rows = [progress.rows[key] for key in keys]
        open_rows = [number for number, row in enumerate(rows) if not row.settled]
        if not open_rows:
            return scores
        distinct = {key: number for number, key in enumerate(dict.fromkeys(keys[number] for number in open_rows))}
        of_key = [(self.guides[row.root], row.position) for row in (progress.rows[key] for key in distinct)]
        chances = chances_of(of_key).to(scores)
        if len(distinct) < len(open_rows):
            chances = chances[[distinct[keys[number]] for number in open_rows]]
        whole = len(open_rows) == len(scores)
        before = scores if whole else scores[open_rows]
        after = self._combine(before, chances)
        self._tokens += len(open_rows)
        # Faster on a CPU than argmax.
        both = (after == after.amax(1, keepdim=True)) & (before == before.amax(1, keepdim=True))
        self._changed = self._changed + (len(both) - both.any(1).sum())
        return after if whole else scores.index_copy(0, torch.tensor(open_rows, device=scores.device), after)

    def _combine(self, scores: Tensor, chances: Tensor) -> Tensor:
        """Return normalized scores [n, V] weighted by chances [n, W ≤ V]."""
        if self.weight != 1:
            # A weight of 0 would make NaN of impossible tokens.
            chances = torch.where(chances == NEG_INF, NEG_INF, self.weight * chances)
        words = chances.shape[1]
        steered = scores[:, :words] + chances
        if words < scores.shape[1]:
            steered = torch.nn.functional.pad(steered, (0, scores.shape[1] - words), value=NEG_INF)
        # Normalized, so that the scores of beams, which are sums over tokens, are log-probabilities.
        return steered.log_softmax(1)

    def _row(self, root: int, position: Position) -> _Row:
        guide = self.guides[root]
        return _Row(root, position, bool(self._settled[id(guide)][position.automaton]))

    def _keys(self, input_ids: Tensor) -> list[tuple[int, Text]]:
        """Return the prompt's number and the tokens generated since for each row; start afresh at a new prompt."""
        rows = [tuple(row) for row in input_ids.tolist()]
        start, length = len(self._prompts[0]) if self._prompts else 0, len(rows[0])
        numbers = self._numbers(self._prompts)
        of_prompt = dict(zip(self._prompts, numbers, strict=True))
        if all(of_prompt[prompt] == number for prompt, number in zip(self._prompts, numbers, strict=True)):
            found = [of_prompt.get(row[:start]) for row in rows]
        elif [row[:start] for row in rows] == self._prompts:  # prompts with several guides keep their order
            found = [*numbers]
        else:
            found = [None]
        # A call has at most one token more than the one before: also one that checks the tokens of a draft model.
        if None in found or not start < length <= self._length + 1:
            return self._begin(rows)
        self._length = length
        return [(number, row[start:]) for number, row in zip(found, rows, strict=True) if number is not None]

    def _numbers(self, rows: Sequence[Text]) -> list[int]:
        """Return the number of the guide of each row of the first call."""
        return [number * len(self.guides) // len(rows) for number in range(len(rows))]

    def _begin(self, rows: list[Text]) -> list[tuple[int, Text]]:
        """Start from the prompts: the rows of a first call."""
        if rows != self._prompts:  # otherwise these may be the first tokens that a draft model proposed
            _warn_unmet(self._progress)
        if len(rows) % len(self.guides):
            raise InputError(
                f"there are {len(rows)} rows for {len(self.guides)} guides: give Steering.batch one for each prompt"
            )
        numbers = self._numbers(rows)
        for place, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            prompt = self._roots[number].position.prompt
            if prompt and row[-len(prompt) :] != prompt:
                raise InputError(
                    f"row {place} does not end with the tokens of the prompt of its guide ({len(prompt)} tokens): "
                    "encode prompts with lm.tokenizer, and give Steering.batch a guide for each, lm.guide(prompt=…)"
                )
        self._prompts, self._length = rows, len(rows[0])
        self._progress.rows = {(number, ()): root for number, root in enumerate(self._roots)}
        self._progress.last, self._progress.reordered = (), False
        return [(number, ()) for number in numbers]

    def _advance_to(self, keys: Sequence[tuple[int, Text]]) -> None:
        """Compute the positions of texts from those of their beginnings, one token of all of them at a time."""
        rows = self._progress.rows
        missing: dict[tuple[int, Text], None] = {}
        for root, text in keys:
            while (root, text) not in rows and (root, text) not in missing:
                missing[root, text] = None
                text = text[:-1]
        for length in sorted({len(text) for _, text in missing}):
            level = [key for key in missing if len(key[1]) == length]
            befores = [rows[root, text[:-1]] for root, text in level]
            going = [number for number, before in enumerate(befores) if not before.settled]
            advanced = self._advance([befores[n] for n in going], [level[n][1][-1] for n in going]) if going else []
            for key, before in zip(level, befores, strict=True):
                rows[key] = before  # once every continuation is accepted, further tokens are not read
            for number, row in zip(going, advanced, strict=True):
                rows[level[number]] = row

    def _advance(self, befores: Sequence[_Row], tokens: Sequence[int]) -> list[_Row]:
        """Return rows after one more token each."""
        log_states = advance_states(self.guides[0].hmm, [before.position for before in befores], tokens)
        return [self._after(*each) for each in zip(befores, tokens, log_states, strict=True)]

    def _after(self, before: _Row, token: int, log_state: Tensor) -> _Row:
        """Return a row after one more token, with the distribution of its state."""
        automaton, position = self.guides[before.root].automaton, before.position
        state = automaton.step(position.automaton, token)
        # A text that is longer than its guide, and may be, stays accepted with every further token.
        remaining = position.remaining - 1 or int(automaton.accepting[state])
        return self._row(before.root, Position(log_state, state, remaining, position.prompt))


def _warn_unmet(progress: _Progress) -> None:
    """Warn of texts that stopped before they satisfied their constraint; their last token was not seen."""
    unmet, lengths = 0, [0]
    for key in progress.last if not progress.reordered else ():
        row, automaton = progress.rows[key], progress.guides[key[0]].automaton
        if key[1] and row.position.remaining > 1 and not row.settled:
            unmet += not bool(automaton.accepting[automaton.by_class[row.position.automaton].long()].any())
            lengths.append(progress.guides[key[0]].length)
    longest = max((len(text) for _, text in progress.last), default=0)
    progress.rows, progress.last, progress.reordered = {}, (), False
    if unmet:
        warnings.warn(
            f"{unmet} text{'s' if unmet > 1 else ''} stopped after {longest + 1} tokens, before the constraint was "
            f"satisfied: the guide is for {max(lengths)} tokens, so generate with max_new_tokens={max(lengths)}",
            InputWarning,
            stacklevel=3,
        )
