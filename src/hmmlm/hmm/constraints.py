"""An HMM conditioned on the acceptance of its tokens by an automaton: exact, one token at a time.

With z_t the state that emits x_t and s_t the automaton state after x_t, the probability that r more tokens end in an
accepting automaton state is a recursion over (s, z), as the backward recursion is over z:

    ahead_0(s, z) = [s accepts],   ahead_r(s, z) = Σ_z' A(z, z') Σ_x B(z', x) ahead_r−1(next(s, x), z').

The inner sum is one term for each edge (s, s') of the automaton, with the probability of its tokens. Automaton states
from which r tokens cannot be accepted have no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hmmlm.arguments import check_arguments
from hmmlm.errors import InputError
from hmmlm.hmm.ahead import CELLS, Ahead, Edges, live_states, tables_ahead
from hmmlm.hmm.automaton import Automaton, check_words
from hmmlm.hmm.checks import check_count
from hmmlm.hmm.guided_step import Plan
from hmmlm.hmm.queries import HiddenMarkovModel
from hmmlm.ops.common import NEG_INF, logsumexp

LARGEST_GB = 16.0  # memory of the recursion
KNOWN_MOVES = 1024  # automaton states of which the tokens are kept
FEW = 256  # tokens that lead to an automaton state; more are scored with the whole vocabulary


class Position(NamedTuple):
    """The position of a sequence under a constraint."""

    log_state: Tensor  # [Z] log p(z of the next token | tokens so far)
    automaton: int
    """The automaton state."""
    remaining: int
    """Number of tokens that follow."""
    prompt: tuple[int, ...] = ()
    """The tokens before the first of them."""

    def __repr__(self) -> str:
        return f"Position(automaton={self.automaton}, remaining={self.remaining}, states={len(self.log_state)})"


class Moves(NamedTuple):
    """The tokens that may follow an automaton state."""

    many: Tensor  # [m] the automaton states that more than FEW tokens lead to
    group_of: Tensor  # [V] the index in `many` of each token; m for the others
    few_tokens: Tensor  # [n] the other tokens
    few_states: Tensor  # [n] the automaton states that they lead to


class Guide:
    """`hmm` conditioned on the acceptance of `length` tokens by `automaton`.

    To steer another model, add `chances(position)` to its log-probabilities of the next token, then call
    `advance(position, token)`.
    """

    @torch.no_grad()
    @check_arguments
    def __init__(self, hmm: HiddenMarkovModel, automaton: Automaton, length: int) -> None:
        if automaton.vocab_size != hmm.vocab_size:
            raise InputError(
                f"the automaton has {automaton.vocab_size} words and the model has {hmm.vocab_size}: use the same "
                "vocabulary"
            )
        check_count("length", length, 1)
        self.hmm, self.automaton, self.length = hmm.detach(), automaton, length
        self._known_moves: dict[int, Moves] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        live = live_states(automaton, length)
        rows = sum(int(mask.sum()) for mask in live) + int(live[-1].sum()) * (length - len(live))
        size = rows * hmm.states * hmm.dtype.itemsize / 1e9
        if size > LARGEST_GB:
            raise InputError(
                f"{length} tokens, {automaton.states} automaton states and {hmm.states} HMM states need "
                f"{size:.3g} GB: use fewer tokens or a simpler constraint"
            )
        edges = Edges(self.hmm, automaton)
        self._edges = edges if edges.log_weights.numel() <= CELLS else None  # for `reading`
        self._ahead = tables_ahead(self.hmm, automaton, edges, live, length)

    def __repr__(self) -> str:
        return f"Guide({self.hmm!r}, {self.automaton!r}, length={self.length})"

    @check_arguments
    def begin(self, tokens: Sequence[int] = ()) -> Position:
        """Return the position after `tokens`, which the automaton reads but which do not count toward the length."""
        position = Position(self.hmm.begin(), 0, self.length)
        for token in tokens:
            position = self.advance(position, token)._replace(remaining=self.length)
        return position._replace(prompt=tuple(tokens))

    @check_arguments
    def advance(self, position: Position, token: int) -> Position:
        """Return the position after one more token."""
        return self.advance_all([position], [token])[0]

    @torch.no_grad()
    @check_arguments
    def advance_all(self, positions: Sequence[Position], tokens: Sequence[int]) -> list[Position]:
        """Return each position after one more token, in little more time than for one."""
        _check_any(positions)
        if len(tokens) != len(positions):
            raise InputError(f"{len(tokens)} tokens for {len(positions)} positions: give one for each")
        log_states = advance_states(self.hmm, positions, tokens)
        automaton = self.automaton
        return [
            Position(log_state, automaton.step(before.automaton, token), before.remaining - 1, before.prompt)
            for log_state, before, token in zip(log_states, positions, tokens, strict=True)
        ]

    @check_arguments
    def joint(self, position: Position) -> Tensor:
        """Compute log p(next token = v, all accepted | tokens so far) [V]."""
        return score_positions([(self, position)])[0][0]

    @check_arguments
    def ahead(self, position: Position) -> Ahead:
        """Return the recursion for the tokens that follow the next one."""
        return self._table(position.remaining)

    def _table(self, remaining: int) -> Ahead:
        if remaining < 1:
            raise InputError(f"all {self.length} tokens of the guide have been generated")
        return self._ahead[min(remaining, len(self._ahead)) - 1]

    @property
    def reads(self) -> bool:
        """Whether the edges of the automaton are kept, as `reading` needs: they are unless it is very large."""
        return self._edges is not None

    def reading(self, at: Sequence[int], remaining: int) -> Tensor:
        """Compute log p(all accepted | z of the next token) [n, Z] in the automaton states `at` [n]."""
        assert self._edges is not None
        ahead = self._table(remaining)
        read = {state: self._edges.read_from(state, ahead) for state in set(at)}
        return torch.stack([read[state] for state in at])

    def accepted_words(self, at: Sequence[int], remaining: int, words: Tensor, states: Tensor) -> Tensor:
        """Compute log p(all accepted | next token = word, its state) [n, W] for words [n, W] of states [n].

        Args:
            at: [n] automaton states.
        """
        ahead = self._table(remaining)
        place = ahead.row_of[self.automaton.by_class[at].long()].to(words.device)  # [n, C] of each class of words
        by_class = torch.where(place < 0, NEG_INF, ahead.log_probs[place.clamp_min(0), states[:, None]])
        return by_class.gather(1, self._class_of[words])

    @cached_property
    def _class_of(self) -> Tensor:
        return self.automaton.class_of.to(self.hmm.device).long()

    @check_arguments
    def moves(self, state: int) -> Moves:
        """Return the tokens that may follow an automaton state."""
        check_count("state", state, 0, self.automaton.states - 1)
        known = self._known_moves.get(state)  # another thread may clear them
        if known is None:
            if len(self._known_moves) == KNOWN_MOVES:
                self._known_moves.clear()
            following = self.automaton.by_class[state][self.automaton.class_of].long()
            reached, group_of, counts = following.unique(return_inverse=True, return_counts=True)
            many = (counts > FEW).nonzero()[:, 0]
            few = (counts <= FEW)[group_of].nonzero()[:, 0]
            number = torch.full_like(reached, len(many), dtype=torch.int16)
            number[many] = torch.arange(len(many), dtype=torch.int16)
            device = self.hmm.device
            known = self._known_moves[state] = Moves(
                reached[many], number[group_of].to(device), few.to(device), following[few]
            )
        return known

    def plan(self, state: int, remaining: int) -> tuple[Plan, Tensor]:
        """Return which rows of a table score the tokens after `state`, `remaining` of which follow, and the table."""
        ahead = self._table(remaining)
        key = state, id(ahead.row_of)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) == KNOWN_MOVES:
                self._plans.clear()
            moves = self.moves(state)
            places, rows = ahead.row_of[moves.many].tolist(), ahead.row_of[moves.few_states].tolist()
            alone = [pair for pair in zip(moves.few_tokens.tolist(), rows, strict=True) if pair[1] >= 0]
            plan = self._plans[key] = Plan(moves.group_of, places, alone)
        return plan, ahead.log_probs

    @check_arguments
    def next_token(self, position: Position) -> Tensor:
        """Compute log p(next token = v | tokens so far, all accepted) [V]."""
        return self.next_tokens([position])[0]

    @check_arguments
    def next_tokens(self, positions: Sequence[Position]) -> Tensor:
        """Compute `next_token` of each position [B, V], in little more time than for one."""
        _check_any(positions)
        joint, _ = score_positions([(self, position) for position in positions])
        impossible = (joint.amax(1) == NEG_INF).nonzero().flatten().tolist()
        if impossible:
            raise none_accepted(positions[impossible[0]].remaining)
        return joint.log_softmax(1)

    @check_arguments
    def chance(self, position: Position) -> float:
        """Compute log p(all accepted | tokens so far)."""
        if position.remaining == 0:
            return 0.0 if bool(self.automaton.accepting[position.automaton]) else NEG_INF
        return min(0.0, float(logsumexp(self.joint(position), 0)))

    @check_arguments
    def chances(self, position: Position) -> Tensor:
        """Compute log p(all accepted | tokens so far, next token = v) [V]; −inf for tokens of probability zero."""
        return chances_of([(self, position)])[0]

    @check_arguments
    def chances_of(self, positions: Sequence[Position]) -> Tensor:
        """Compute `chances` of each position [B, V], in little more time than for one."""
        _check_any(positions)
        return chances_of([(self, position) for position in positions])

    @torch.no_grad()
    def chances_along(
        self, position: Position, context: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Compute log p(all accepted | tokens so far) after each token of each text, which follows `position`.

        Args:
            context: the tokens before the position.
        """
        given = len(context)
        rows = [torch.tensor([*context, *text]) for text in texts]
        lengths = torch.tensor([len(row) for row in rows])
        probs = self.hmm.filter(pad_sequence(rows, batch_first=True), lengths).probs
        result = []
        for row, text in enumerate(texts):
            state, tables = position.automaton, list[Tensor]()
            for left, token in zip(reversed(range(position.remaining)), text, strict=False):
                state = self.automaton.step(state, token)
                ahead = self._ahead[min(left, len(self._ahead) - 1)]
                place = int(ahead.row_of[state])
                tables.append(ahead.log_probs[place] if place >= 0 else torch.full_like(probs[0, 0], NEG_INF))
            here = probs[row, given : given + len(tables)].log()
            result.append(logsumexp(here + torch.stack(tables), 1).clamp_(max=0).tolist() if tables else [])
        return result


def none_accepted(remaining: int) -> InputError:
    return InputError(f"no continuation of {remaining} tokens that the model can generate is accepted")


def _check_any(positions: Sequence[Position]) -> None:
    if not len(positions):
        raise InputError("there are no positions: give at least one")


def advance_states(hmm: HiddenMarkovModel, positions: Sequence[Position], tokens: Sequence[int]) -> Tensor:
    """Compute log p(z of the next token | tokens so far) [B, Z] after one more token of each position."""
    check_words(tokens, hmm.vocab_size)
    log_states = hmm.advance(torch.stack([position.log_state for position in positions]), torch.tensor(tokens))
    impossible = (log_states.amax(1) == NEG_INF).nonzero().flatten().tolist()
    if impossible:
        token = tokens[impossible[0]]
        raise InputError(f"token {token} has probability zero under the model here, so nothing can follow it")
    return log_states


def chances_of(guided: Sequence[tuple[Guide, Position]]) -> Tensor:
    """Compute log p(all accepted | tokens so far, next token = v) [B, V]; −inf for tokens of probability zero."""
    joint, plain = score_positions(guided, plain=True)
    # −inf minus −inf is NaN. Clamped to probability one: the two terms are rounded differently.
    return (joint - plain).nan_to_num_(nan=NEG_INF, neginf=NEG_INF).clamp_(max=0)


@torch.no_grad()
def score_positions(guided: Sequence[tuple[Guide, Position]], plain: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `Guide.joint` of each position [B, V] and, with `plain`, log p(next token = v | tokens so far) [B, V].

    The guides, which may be different ones, share an HMM. All whole vocabularies are scored in one product.
    """
    hmm = guided[0][0].hmm
    log_states = torch.stack([position.log_state for _, position in guided])
    tables = [guide.ahead(position) for guide, position in guided]
    moves = [guide.moves(position.automaton) for guide, position in guided]
    # One row of the product for each automaton state that many tokens lead to; `lost` for those without a table's row.
    places = [(row, int(place)) for row, ahead in enumerate(tables) for place in ahead.row_of[moves[row].many]]
    kept = [(row, place) for row, place in places if place >= 0]
    first = len(guided) if plain else 0
    numbers, lost = iter(range(first, first + len(kept))), first + len(kept)
    used = [next(numbers) if place >= 0 else lost for _, place in places]
    weights = _weigh(log_states, tables, [row for row, _ in kept], [place for _, place in kept])
    weights = torch.cat([log_states, weights]) if plain else weights
    emitted = hmm.emit(weights) if lost else log_states.new_empty(0, hmm.vocab_size)
    few = [(ahead.row_of[each.few_states] >= 0).nonzero()[:, 0] for ahead, each in zip(tables, moves, strict=True)]
    if len(kept) == len(guided) and all(len(each.many) == 1 for each in moves):
        result = emitted[first:]  # one group of tokens each, but for the others
        for row, each in enumerate(moves):
            result[row, each.few_tokens] = NEG_INF
    else:
        sizes = [len(each.many) for each in moves]
        numbered = pad_sequence([torch.tensor([*part, lost]) for part in _split(used, sizes)], batch_first=True)
        group_of = torch.stack([each.group_of for each in moves]).long()
        nothing = torch.full_like(log_states[:1, :1], NEG_INF).expand(1, hmm.vocab_size)
        result = torch.cat([emitted, nothing]).gather(0, numbered.to(hmm.device).gather(1, group_of))
    row_of = torch.arange(len(guided)).repeat_interleave(torch.tensor([len(each) for each in few]))
    if len(row_of):
        chosen = list(zip(tables, moves, few, strict=True))
        tokens = torch.cat([each.few_tokens[index.to(hmm.device)] for _, each, index in chosen])
        at = torch.cat([ahead.row_of[each.few_states[index]] for ahead, each, index in chosen])
        for piece in torch.arange(len(row_of)).split(max(1, CELLS // hmm.states)):
            rows, here = row_of[piece], tokens[piece.to(hmm.device)]
            weights = _weigh(log_states, tables, rows.tolist(), at[piece].tolist())
            support, scores = hmm.observe(here, missing=False)
            result[rows.to(hmm.device), here] = logsumexp(hmm.restrict(weights, support) + scores, 1)
    return result, emitted[:first]


def _weigh(log_states: Tensor, tables: Sequence[Ahead], rows: list[int], places: list[int]) -> Tensor:
    """Return log_states[row] + tables[row].log_probs[place] [n, Z] for rows [n] and places [n]."""
    if not rows or all(table is tables[0] for table in tables):
        return log_states[rows] + tables[0].log_probs[places]
    pairs = zip(rows, places, strict=True)
    return torch.stack([log_states[row] + tables[row].log_probs[place] for row, place in pairs])


def _split(items: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    first = 0
    for size in sizes:
        yield items[first : first + size]
        first += size
