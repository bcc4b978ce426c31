"""An HMM conditioned on the acceptance of its tokens by an automaton: exact, one token at a time.

With z_t the state that emits x_t and s_t the automaton state after x_t, the probability that r more tokens end in an
accepting automaton state is a recursion over (s, z), as the backward recursion is over z:

    ahead_0(s, z) = [s accepts],   ahead_r(s, z) = Σ_z' A(z, z') Σ_x B(z', x) ahead_r−1(next(s, x), z').

The inner sum is one term for each edge (s, s') of the automaton, with the probability of its tokens. Automaton states
from which r tokens cannot be accepted have no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from hmmlm.hmm.guided_cpu import CpuPlan, CpuSteps, make_cpu_plan
from hmmlm.hmm.guided_step import Plan, make_plan
from hmmlm.hmm.hmm import HMM
from hmmlm.numerics.logmatrix import log_ratio
from hmmlm.numerics.support import restrict
from hmmlm.ops.common import NEG_INF, logsumexp

KNOWN_MOVES = 1024  # automaton states of which the tokens are kept
KNOWN_NODES = 2**14


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


@dataclass(slots=True, eq=False)
class Node:
    """An automaton state and the number of tokens that follow."""

    automaton: int
    remaining: int
    settled: bool  # whether every continuation is accepted
    plan: Plan | CpuPlan | None = None  # once it is needed


class Moves(NamedTuple):
    """The tokens that may follow an automaton state. All but `group_of` are on the CPU."""

    many: Tensor  # [m] the automaton states that many tokens lead to
    group_of: Tensor  # [V] int16: the index in `many` of each token; m for the others
    few_tokens: Tensor  # [n] the other tokens
    few_states: Tensor  # [n] the automaton states that they lead to


class Reached(NamedTuple):
    """The rows of a table of the recursion that score the tokens which may follow an automaton state."""

    places: list[int]  # [m] of the automaton states that many tokens lead to; −1: not accepted any more
    tokens: Tensor  # [n] the tokens that are scored alone, on the CPU
    rows: list[int]  # [n] their rows


class Guide:
    """`hmm` conditioned on the acceptance of `length` tokens by `automaton`.

    To steer another model, add `chances(position)` to its log-probabilities of the next token, then call
    `advance(position, token)`.

    Args:
        max_gb: memory of the recursion above which the constraint is refused.
        few: tokens that lead to one automaton state; more are scored with the whole vocabulary.
        cells: size of the largest intermediate.
    """

    @torch.no_grad()
    @check_arguments
    def __init__(
        self,
        hmm: HMM,
        automaton: Automaton,
        length: int,
        max_gb: float = 16.0,
        few: int = 256,
        cells: int = CELLS,
    ) -> None:
        if automaton.vocab_size != hmm.vocab_size:
            raise InputError(
                f"the automaton has {automaton.vocab_size} words and the model has {hmm.vocab_size}: use the same "
                "vocabulary"
            )
        check_count("length", length, 1)
        self.hmm, self.automaton, self.length = hmm.detach(), automaton, length
        self._few, self._cells = few, cells
        self.end: int | None = None
        """The token after which a text is over, of a guide whose texts have one."""
        self._known_moves: dict[int, Moves] = {}
        self._known_cells: dict[int, Tensor] = {}
        self._nodes: dict[tuple[int, int], Node] = {}
        self._known_reached: dict[tuple[int, int], Reached] = {}
        self._plans: dict[tuple[int, int], Plan | CpuPlan] = {}
        live = live_states(automaton, length)
        rows = sum(int(mask.sum()) for mask in live) + int(live[-1].sum()) * (length - len(live))
        size = rows * hmm.states * hmm.dtype.itemsize / 1e9
        if size > max_gb:
            raise InputError(
                f"{length} tokens, {automaton.states} automaton states and {hmm.states} HMM states need "
                f"{size:.3g} GB: use fewer tokens or a simpler constraint"
            )
        edges = Edges(self.hmm, automaton, cells)
        self._edges = edges if edges.log_weights.numel() <= cells else None  # for `reading`
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
        log_states = advance_states(self.hmm, torch.stack([position.log_state for position in positions]), tokens)
        automaton = self.automaton
        return [
            Position(log_state, automaton.step(before.automaton, token), before.remaining - 1, before.prompt)
            for log_state, before, token in zip(log_states, positions, tokens, strict=True)
        ]

    @check_arguments
    def joint(self, position: Position) -> Tensor:
        """Compute log p(next token = v, all accepted | tokens so far) [V]."""
        return score_positions([(self, position)])[0]

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

    @cached_property
    def _tokens_of(self) -> tuple[Tensor, ...]:
        """The tokens of each class."""
        class_of = self.automaton.class_of
        sizes: list[int] = class_of.bincount(minlength=self.automaton.classes).tolist()
        return class_of.argsort().split(sizes)

    @check_arguments
    def moves(self, state: int) -> Moves:
        """Return the tokens that may follow an automaton state."""
        check_count("state", state, 0, self.automaton.states - 1)
        known = self._known_moves.get(state)  # another thread may clear them
        if known is None:
            if len(self._known_moves) == KNOWN_MOVES:
                self._known_moves.clear()
            # By classes of tokens, which are far fewer than tokens.
            following, tokens_of = self.automaton.by_class[state].long(), self._tokens_of
            sizes = torch.tensor([len(tokens) for tokens in tokens_of])
            reached, group = following.unique(return_inverse=True)
            counts = torch.zeros_like(reached).index_add_(0, group, sizes)
            many = (counts > self._few).nonzero()[:, 0]
            few = (counts <= self._few)[group].nonzero()[:, 0]
            number = torch.full_like(reached, len(many), dtype=torch.int16)
            number[many] = torch.arange(len(many), dtype=torch.int16)
            known = self._known_moves[state] = Moves(
                reached[many],
                number[group].to(self.hmm.device)[self._class_of],
                torch.cat([sizes[:0], *(tokens_of[each] for each in few.tolist())]),
                following[few].repeat_interleave(sizes[few]),
            )
        return known

    def cells(self, state: int) -> Tensor | None:
        """Return the place of each token [V] in a table with a row for each of `Moves.many`, by columns of emissions.

        None if that is its own: there is one row, and every token has its own column.
        """
        moves, columns = self.moves(state), self.hmm.emission.column_of_word
        if columns is None and len(moves.many) == 1:
            return None
        if state not in self._known_cells:
            if len(self._known_cells) == KNOWN_MOVES:
                self._known_cells.clear()
            if columns is None:
                columns = torch.arange(self.hmm.vocab_size, device=self.hmm.device)
            self._known_cells[state] = (moves.group_of.long() * (int(columns.max()) + 1) + columns).int()
        return self._known_cells[state]

    def reached(self, state: int, remaining: int) -> Reached:
        """Return the rows of the table of `ahead` that score the tokens after an automaton state."""
        row_of = self._table(remaining).row_of
        known = self._known_reached.get((state, id(row_of)))
        if known is None:
            if len(self._known_reached) == KNOWN_MOVES:
                self._known_reached.clear()
            moves = self.moves(state)
            rows = row_of[moves.few_states]
            alone = (rows >= 0).nonzero()[:, 0]
            known = Reached(row_of[moves.many].tolist(), moves.few_tokens[alone], rows[alone].tolist())
            self._known_reached[state, id(row_of)] = known
        return known

    def node(self, state: int, remaining: int) -> Node:
        """Return the node of an automaton state; the same object if it is known."""
        node = self._nodes.get((state, remaining))
        if node is None:
            if len(self._nodes) == KNOWN_NODES:
                self._nodes.clear()
            node = self._nodes[state, remaining] = Node(state, remaining, self._settled[state])
        return node

    def node_after(self, node: Node, token: int) -> Node:
        """Return the node after one more token, which is not checked."""
        state, remaining = self.automaton.step(node.automaton, token), node.remaining - 1
        if not remaining:  # a text that is longer than its guide, and may be, stays accepted with every further token
            remaining = int(self.automaton.accepting[state])
        return self._nodes.get((state, remaining)) or self.node(state, remaining)

    @cached_property
    def _settled(self) -> list[bool]:
        settled: list[bool] = self.automaton.settled().tolist()
        return settled

    def plan(self, node: Node) -> Plan | CpuPlan:
        """Return which rows of a table score the tokens after a node."""
        if node.plan is None:
            ahead = self._table(node.remaining)
            key = node.automaton, id(ahead.row_of)
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) == KNOWN_MOVES:
                    self._plans.clear()
                    self._nodes.clear()  # which hold the tokens of plans
                plan = self._plans[key] = self._make_plan(node, ahead)
            node.plan = plan.with_table(ahead.log_probs)
        return node.plan

    def _make_plan(self, node: Node, ahead: Ahead) -> Plan | CpuPlan:
        moves, reached = self.moves(node.automaton), self.reached(node.automaton, node.remaining)
        if isinstance(self.hmm.guided_steps, CpuSteps):
            return make_cpu_plan(ahead.log_probs, reached, moves.few_tokens, self.cells(node.automaton))
        alone = list(zip(reached.tokens.tolist(), reached.rows, strict=True))
        return make_plan(ahead.log_probs, moves.group_of, reached.places, alone)

    @check_arguments
    def next_token(self, position: Position) -> Tensor:
        """Compute log p(next token = v | tokens so far, all accepted) [V]."""
        return self.next_tokens([position])[0]

    @check_arguments
    def next_tokens(self, positions: Sequence[Position]) -> Tensor:
        """Compute `next_token` of each position [B, V], in little more time than for one."""
        _check_any(positions)
        joint = score_positions([(self, position) for position in positions])
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


def advance_states(hmm: HMM, log_states: Tensor, tokens: Sequence[int]) -> Tensor:
    """Compute log p(z of the next token | tokens so far) [B, Z] after one more token each, from log_states [B, Z]."""
    check_words(tokens, hmm.vocab_size)
    log_states = hmm.advance(log_states, torch.tensor(tokens))
    impossible = (log_states.amax(1) == NEG_INF).nonzero().flatten().tolist()
    if impossible:
        token = tokens[impossible[0]]
        raise InputError(f"token {token} has probability zero under the model here, so nothing can follow it")
    return log_states


def chances_of(guided: Sequence[tuple[Guide, Position]]) -> Tensor:
    """Compute log p(all accepted | tokens so far, next token = v) [B, V]; −inf for tokens of probability zero."""
    return score_positions(guided, relative=True)


@torch.no_grad()
def score_positions(guided: Sequence[tuple[Guide, Position]], relative: bool = False) -> Tensor:
    """Compute `Guide.joint` of each position [B, V]; if `relative`, less log p(next token = v | tokens so far).

    The guides, which may be different ones, share an HMM. All whole vocabularies are scored in one product, with one
    column for all words of the same emission.
    """
    hmm = guided[0][0].hmm
    log_states = torch.stack([position.log_state for _, position in guided])
    tables = [guide.ahead(position) for guide, position in guided]
    reached = [guide.reached(position.automaton, position.remaining) for guide, position in guided]
    result = torch.full((len(guided), hmm.vocab_size), NEG_INF, dtype=log_states.dtype, device=hmm.device)
    # One row of the product for each automaton state that many tokens lead to, unless it has no row of the table.
    kept = [(row, place) for row, each in enumerate(reached) for place in each.places if place >= 0]
    rows = [row for row, _ in kept]
    weights = _weigh(log_states, tables, rows, [place for _, place in kept])
    joint, first = weights, 0
    if kept:
        # At most 0: the terms of a ratio are rounded differently.
        joint = (
            hmm.emission.column_ratio(weights, log_states, rows).clamp_(max=0)
            if relative
            else hmm.emission.column_log_probs(weights)
        )
    for row, ((guide, position), (places, _, _)) in enumerate(zip(guided, reached, strict=True)):
        count = len(places) - places.count(-1)
        own, first = joint[first : first + count], first + count
        if not count:
            continue
        cells = guide.cells(position.automaton)
        if cells is None:
            result[row] = own[0]
            result[row, guide.moves(position.automaton).few_tokens] = NEG_INF
        else:
            values = own.new_full((len(places) + 1, own.shape[1]), NEG_INF)  # the last one: for the other tokens
            values[[number for number, place in enumerate(places) if place >= 0]] = own
            torch.index_select(values.view(-1), 0, cells, out=result[row])
    row_of = [row for row, each in enumerate(reached) for _ in each.rows]
    tokens = torch.cat([each.tokens for each in reached]).to(hmm.device)
    at = [place for each in reached for place in each.rows]
    size = max(1, guided[0][0]._cells // hmm.states)
    for start in range(0, len(row_of), size):
        piece = slice(start, start + size)
        rows, here = row_of[piece], tokens[piece]
        support, scores = hmm.emission.score(here, missing=False)
        alone = logsumexp(restrict(_weigh(log_states, tables, rows, at[piece]), support) + scores, 1)
        if relative:
            plain = logsumexp(restrict(log_states[rows], support) + scores, 1)
            alone = log_ratio(alone, plain).clamp_(max=0)
        result[rows, here] = alone
    return result


def _weigh(log_states: Tensor, tables: Sequence[Ahead], rows: list[int], places: list[int]) -> Tensor:
    """Return log_states[row] + tables[row].log_probs[place] [n, Z] for rows [n] and places [n]."""
    if not rows or all(table is tables[0] for table in tables):
        return log_states[rows] + tables[0].log_probs[places]
    pairs = zip(rows, places, strict=True)
    return torch.stack([log_states[row] + tables[row].log_probs[place] for row, place in pairs])
