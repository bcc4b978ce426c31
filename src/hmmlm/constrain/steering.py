"""A logits processor that makes another language model satisfy constraints, with an HMM."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_arguments, is_sequence
from hmmlm.checks import check_number
from hmmlm.constrain.automaton import check_words
from hmmlm.constrain.guide import Guide, Node, Position
from hmmlm.constrain.guided import StepRows, advance_states, steer
from hmmlm.constrain.guided_step import GuidedSteps
from hmmlm.errors import InputError, InputWarning
from hmmlm.ops.common import NEG_INF
from hmmlm.terminal import counted

_DOUBTFUL = 4  # calls whose sums may have underflowed in the kernels, after which these are not tried again
_INTEGERS = frozenset(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
_KEPT_TOKENS = 64  # positions of texts shorter than the current ones by more are computed again if needed


class SteeringReport(NamedTuple):
    """What steering did to a model's choices."""

    tokens: int
    """Number of scored tokens that were still constrained, over all rows."""
    changed: int
    """Number of these for which the most likely token became another."""


@dataclass
class _Texts:
    """Texts of one length and their positions under the constraint."""

    ids: np.ndarray  # [B, T] prompts and new tokens
    roots: Sequence[int]  # [B] the number of each prompt's guide
    nodes: Sequence[Node]  # [B]
    log_states: Tensor  # [B, Z] log p(z of the next token | tokens so far); of a settled node, any

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @cached_property
    def number_of(self) -> dict[tuple[int, bytes], int]:
        """The number of each text, by its guide and tokens."""
        return {key: number for number, key in enumerate(_keys(self.ids, self.roots))}

    def take(self, numbers: Sequence[int]) -> _Texts:
        """Return some of the texts."""
        if numbers == range(len(self.ids)):
            return self
        roots, nodes = [self.roots[n] for n in numbers], [self.nodes[n] for n in numbers]
        return _Texts(self.ids[numbers], roots, nodes, self.log_states[numbers])

    def join(self, other: _Texts) -> _Texts:
        """Return these and other texts of the same length."""
        return _Texts(
            np.concatenate([self.ids, other.ids]),
            [*self.roots, *other.roots],
            [*self.nodes, *other.nodes],
            torch.cat([self.log_states, other.log_states]),
        )


@dataclass
class _Progress:
    """The texts of the calls since the first one for these prompts."""

    guides: Sequence[Guide]
    start: int = 0  # tokens of the prompts
    known: dict[int, _Texts] = field(default_factory=dict)  # by number of tokens
    last: _Texts | None = None  # of the last call
    reordered: bool = False  # by beams, of which complete ones are rows no more, or by drafts: no text may be final


class Steering:
    """A logits processor that adds the HMM's log-probability of acceptance after each token to the token's score.

    The result is the product of the other model and this probability, normalized. Its text is always accepted, and
    follows the other model given the constraint as closely as the HMM approximates that model. Use it in transformers,
    `model.generate(…, logits_processor=[lm.logits_processor(…)])`, or in a loop of your own. Both models need the same
    tokens. All rows of a call (samples or beams) share the guide; `Steering.batch` has one per prompt. A call whose
    rows do not continue those of the previous call starts from the prompt again. (A single row that does, such as the
    last text without its end, needs a new object.) A text that is over repeats its end token if `generate` goes on.

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
        self._positions, self._words = [position for _, position in guided], self.guides[0].automaton.vocab_size
        self._changed = 0
        self._kernels, self._device = GuidedSteps.of(self.guides[0].hmm), self.guides[0].hmm.device
        self._doubtful = 0  # calls for which they did not serve
        self._tokens = 0
        self.log_masses: Tensor | None = None
        """Of the last call: log Σ_tokens exp(score + weight · log p(accepted | token)) [B], the normalizers.

        Scores of rows that are not constrained any more were not normalized, and have 0.
        """
        self._progress = _Progress(self.guides)
        weakref.finalize(self, _warn_unmet, self._progress)

    def __repr__(self) -> str:
        return f"Steering({self.guides[0]!r}{f', prompts={len(self.guides)}' if len(self.guides) > 1 else ''})"

    @property
    def report(self) -> SteeringReport:
        """How often the most likely token became another, over all calls."""
        return SteeringReport(self._tokens, self._changed)

    @check_arguments
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return steered scores [B, V] for prompt and generated tokens [B, T], and scores [B, V] of the next token.

        V may exceed the HMM's vocabulary: tokens outside it are forbidden until every continuation is accepted.
        """
        fitting = input_ids.dim() == scores.dim() == 2 and 0 < input_ids.shape[0] == scores.shape[0]
        if not fitting or input_ids.dtype not in _INTEGERS:
            raise InputError(
                f"input_ids must be integers [rows, tokens] and scores [rows, words], not {list(input_ids.shape)} of "
                f"{str(input_ids.dtype).removeprefix('torch.')} and {list(scores.shape)}"
            )
        if not scores.dtype.is_floating_point:
            raise InputError(f"scores must be log-probabilities, not {str(scores.dtype).removeprefix('torch.')}")
        if scores.shape[1] < self._words:
            raise InputError(
                f"the scores are for {scores.shape[1]:,} tokens, but the guide is for {self._words:,}: both models "
                "need the same tokenizer"
            )
        ids = input_ids.to("cpu", torch.int64, copy=True).numpy()
        before, numbers = self._find(ids)
        while before.length < ids.shape[1] - 1:
            before, numbers = self._keep(self._advance(before, numbers, ids[:, : before.length + 1])), range(len(ids))
        texts, steered = self._steer(before, numbers, ids, scores)
        if before.length < texts.length:
            self._keep(texts)
        self._progress.last = texts
        return self._end(texts, steered)

    def _find(self, ids: np.ndarray) -> tuple[_Texts, Sequence[int]]:
        """Return texts with the longest known beginnings of all rows of ids [B, T], and the number of each [B].

        Start afresh at a new prompt.
        """
        progress, length, every = self._progress, ids.shape[1], range(len(ids))
        last = progress.last
        if last is not None and length not in progress.known and _equal(ids[:, :-1], last.ids):
            return last, every  # each row has one token more
        roots = self._find_roots(ids)
        if last is None or roots is None:
            return self._begin(ids), every
        both = min(len(ids), len(last.ids))
        progress.reordered |= not _equal(ids[:both, :-1], last.ids[:both])
        for short in range(length, progress.start, -1):
            texts = progress.known.get(short)
            if texts is not None:
                found = [texts.number_of.get(key) for key in _keys(ids[:, :short], roots)]
                numbers = [number for number in found if number is not None]
                if len(numbers) == len(ids):
                    return texts, numbers
        texts = progress.known[progress.start]
        return texts, [texts.number_of[key] for key in _keys(ids[:, : progress.start], roots)]

    def _find_roots(self, ids: np.ndarray) -> Sequence[int] | None:
        """Return the number of the guide of each row of ids [B, T]; None unless they continue the prompts."""
        progress = self._progress
        # A call has at most one token more than the one before: also one that checks the tokens of a draft model.
        if progress.last is None or not progress.start < ids.shape[1] <= progress.last.length + 1:
            return None
        if len(ids) > 1 and ids.shape[1] < progress.last.length:
            return None  # drafts, of which tokens are taken back, have one row
        first, prompts = progress.known[progress.start], ids[:, : progress.start]
        if _equal(prompts, first.ids):
            roots = list(first.roots)
        else:
            of_prompt = {row.tobytes(): root for row, root in zip(first.ids, first.roots, strict=True)}
            if len(of_prompt) < len(first.number_of):
                return None  # prompts with several guides keep their order
            found = [of_prompt.get(row.tobytes()) for row in prompts]
            roots = [root for root in found if root is not None]
        return roots if len(roots) == len(ids) and self._go_on(ids, roots) else None

    def _go_on(self, ids: np.ndarray, roots: Sequence[int]) -> bool:
        """Return whether every row has at most one token more than a known text; others have longer prompts."""
        here, before = (self._progress.known.get(ids.shape[1] - less) for less in (0, 1))
        if here is None and before is None:
            return True  # those texts are not kept any more
        known = [set() if texts is None else texts.number_of.keys() for texts in (here, before)]
        keys = zip(_keys(ids, roots), _keys(ids[:, :-1], roots), strict=True)
        return all(whole in known[0] or shorter in known[1] for whole, shorter in keys)

    def _begin(self, ids: np.ndarray) -> _Texts:
        """Start from the prompts ids [B, T]: the rows of a first call."""
        progress, guides = self._progress, self.guides
        first = progress.known.get(progress.start)
        if first is None or not _equal(ids, first.ids):
            _warn_unmet(progress)  # otherwise these may be the first tokens that a draft model proposed
        if len(ids) % len(guides):
            raise InputError(
                f"{counted(len(ids), 'row')} for {counted(len(guides), 'guide')}: give one for each prompt"
            )
        roots = [number * len(guides) // len(ids) for number in range(len(ids))]
        positions = [self._positions[root] for root in roots]
        for place, (row, position) in enumerate(zip(ids, positions, strict=True)):
            prompt = position.prompt
            if prompt and tuple(row[-len(prompt) :].tolist()) != prompt:
                raise InputError(
                    f"row {place} does not end with the tokens of the prompt of its guide "
                    f"({counted(len(prompt), 'token')}): encode prompts with lm.tokenizer, "
                    "and give Steering.batch a guide for each, lm.guide(prompt=…)"
                )
        nodes = [guides[root].node(*position[1:3]) for root, position in zip(roots, positions, strict=True)]
        texts = _Texts(ids, roots, nodes, torch.stack([position.log_state for position in positions]))
        progress.start, progress.known = texts.length, {texts.length: texts}
        progress.last, progress.reordered = None, False
        return texts

    def _keep(self, texts: _Texts) -> _Texts:
        """Keep texts, so that others can begin with them, and return them."""
        progress, length = self._progress, texts.length
        before = progress.known.get(length)
        progress.known[length] = texts if before is None else before.join(texts)
        if len(progress.known) > 2 * _KEPT_TOKENS:
            first = progress.known[progress.start]
            kept = {n: each for n, each in progress.known.items() if n > length - _KEPT_TOKENS}
            progress.known = {progress.start: first, **kept}
        return texts

    def _nodes_after(self, before: _Texts, numbers: Sequence[int], tokens: Sequence[int]) -> list[Node]:
        """Return the nodes of texts after one more token each."""
        words, known, roots, guides = self._words, before.nodes, before.roots, self.guides
        nodes = list[Node]()
        for number, token in zip(numbers, tokens, strict=True):
            node = known[number]
            if not node.settled:  # once every continuation is accepted, further tokens are not read
                if not 0 <= token < words:
                    check_words([token], words)
                node = guides[roots[number]].node_after(node, token)
            nodes.append(node)
        return nodes

    def _steer(self, before: _Texts, numbers: Sequence[int], ids: np.ndarray, scores: Tensor) -> tuple[_Texts, Tensor]:
        """Return texts of ids [B, T] and steered scores [B, V].

        Args:
            before: of `_find`: texts of T or T − 1 tokens.
            numbers: [B] of the beginnings in `before`.
        """
        roots = [before.roots[number] for number in numbers]
        tokens: list[int] | None = ids[:, -1].tolist() if before.length < ids.shape[1] else None
        nodes = [before.nodes[n] for n in numbers] if tokens is None else self._nodes_after(before, numbers, tokens)
        guides, pairs = self.guides, list(zip(roots, nodes, strict=True))
        plan_of = {pair: None if pair[1].settled else guides[pair[0]].plan(pair[1]) for pair in set(pairs)}
        plans = [plan_of[pair] for pair in pairs]
        constrained = len(plans) - plans.count(None)
        if not constrained:
            self.log_masses = torch.zeros(len(ids), device=scores.device)
            return _Texts(ids, roots, nodes, before.take(numbers).log_states), scores
        rows = StepRows(before.log_states, numbers, tokens, plans)
        kernels = self._kernels if scores.device == self._device else None
        result = None if kernels is None else kernels.run(rows, scores, self.weight)
        if result is None:
            self._doubtful += kernels is not None
            if self._doubtful == _DOUBTFUL:
                self._kernels = None
            result = steer(self.guides[0].hmm, rows, scores, self.weight)
        self._tokens, self._changed = self._tokens + constrained, self._changed + result.changed
        self.log_masses = result.log_masses
        return _Texts(ids, roots, nodes, result.log_states), result.scores

    def _advance(self, before: _Texts, numbers: Sequence[int], ids: np.ndarray) -> _Texts:
        """Return texts of ids [B, T] from their beginnings, texts of T − 1 tokens; see `_steer`."""
        begun, tokens = before.take(numbers), ids[:, -1].tolist()
        going = [number for number, node in enumerate(begun.nodes) if not node.settled]
        log_states = begun.log_states.clone()
        if going:
            own = [tokens[number] for number in going]
            log_states[going] = advance_states(self.guides[0].hmm, log_states[going], own)
        return _Texts(ids, begun.roots, self._nodes_after(before, numbers, tokens), log_states)

    def _end(self, texts: _Texts, scores: Tensor) -> Tensor:
        """Return scores [B, V] that allow texts which are over no token but their end, again.

        A model that has another end token, or several, would go on after it.
        """
        settled = [number for number, node in enumerate(texts.nodes) if node.settled]
        ends = {number: self.guides[texts.roots[number]].end for number in settled}
        over = [number for number in settled if ends[number] is not None]
        if not over:
            return scores
        scores = scores.detach().clone()
        scores[over] = NEG_INF
        scores[over, [ends[n] for n in over]] = 0.0
        return scores


def _equal(one: np.ndarray, two: np.ndarray) -> bool:
    """Return whether two arrays of tokens are equal; NumPy's function takes ten times longer for few tokens."""
    return one.shape == two.shape and one.tobytes() == two.tobytes()


def _keys(ids: np.ndarray, roots: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return the keys of texts: the guide's number and the tokens."""
    return [(root, row.tobytes()) for root, row in zip(roots, ids, strict=True)]


def _warn_unmet(progress: _Progress) -> None:
    """Warn of texts that stopped before they satisfied their constraint; their last token was not seen."""
    unmet, lengths, longest = 0, [0], 0
    if progress.last is not None and not progress.reordered:
        longest = progress.last.length - progress.start
        for root, node in zip(progress.last.roots, progress.last.nodes, strict=True):
            if longest and node.remaining > 1 and not node.settled:
                automaton = progress.guides[root].automaton
                unmet += not bool(automaton.accepting[automaton.by_class[node.automaton].long()].any())
                lengths.append(progress.guides[root].length)
    progress.known, progress.last, progress.reordered = {}, None, False
    if unmet:
        warnings.warn(
            f"{unmet} text{'s' if unmet > 1 else ''} stopped after {longest + 1} tokens, before the constraint was "
            f"satisfied: the guide is for {max(lengths)} tokens, so generate with max_new_tokens={max(lengths)}",
            InputWarning,
            stacklevel=3,
        )
