"""An HMM conditioned on the acceptance of its tokens by an automaton: exact, one token at a time.

With z_t the state that emits x_t and s_t the automaton state after x_t, the probability that r more tokens end in an
accepting automaton state is a recursion over (s, z), as the backward recursion is over z:

    ahead_0(s, z) = [s accepts],   ahead_r(s, z) = Σ_z' A(z, z') Σ_x B(z', x) ahead_r−1(next(s, x), z').

The inner sum is one term for each edge (s, s') of the automaton, with the probability of its tokens. Automaton states
from which r tokens cannot be accepted have no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hmmlm.arguments import check_arguments
from hmmlm.checks import check_count
from hmmlm.constrain.automaton import Automaton, check_words
from hmmlm.constrain.budget import construction
from hmmlm.constrain.guided import Plan, Targets, TokenClasses, advance_states, log_probs_accept
from hmmlm.constrain.lookahead import AcceptanceTable, WeightedEdges, acceptance_tables, live_states
from hmmlm.errors import InputError
from hmmlm.hmm.hmm import HMM
from hmmlm.ops.common import NEG_INF, logsumexp
from hmmlm.ops.pieces import fits

_KEPT_TARGETS = 1024


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
        return f"Position(automaton={self.automaton}, remaining={self.remaining}, num_states={len(self.log_state)})"


class Node(NamedTuple):
    """An automaton state and the number of tokens that follow."""

    automaton: int
    remaining: int
    settled: bool  # whether every continuation is accepted


class Guide:
    """`hmm` conditioned on the acceptance of `length` tokens by `automaton`.

    To steer another model, add `log_probs_accept(position)` to its log-probabilities of the next token, then call
    `advance(position, token)`.

    Args:
        max_gb: memory of the recursion above which the constraint is refused.
        few: tokens that lead to one automaton state; more are scored with the whole vocabulary. By default what is
            faster: on a CPU, the product with a vocabulary has fewer operations per token than some tokens alone only
            if there are many HMM states.
    """

    @torch.no_grad()
    @construction()
    @check_arguments
    def __init__(
        self,
        hmm: HMM,
        automaton: Automaton,
        length: int,
        max_gb: float = 16.0,
        few: int | None = None,
    ) -> None:
        if automaton.vocab_size != hmm.vocab_size:
            raise InputError(
                f"the automaton has {automaton.vocab_size} words and the model has {hmm.vocab_size}: use the same "
                "vocabulary"
            )
        check_count("length", length, 1)
        self.hmm, self.automaton, self.length = hmm.detach(), automaton, length
        on_cpu = hmm.device.type == "cpu"
        few = max(256, hmm.vocab_size // hmm.num_states if on_cpu else 0) if few is None else few
        self._classes = TokenClasses(self.hmm, automaton.class_of, automaton.classes, few)
        self.end: int | None = None
        """The token after which a text is over, of a guide whose texts have one."""
        self._targets: dict[tuple[int, int], Targets] = {}
        live = live_states(automaton, length)
        rows = sum(int(mask.sum()) for mask in live) + int(live[-1].sum()) * (length - len(live))
        size = rows * hmm.num_states * hmm.dtype.itemsize / 1e9
        if size > max_gb:
            raise InputError(
                f"{length} tokens, {automaton.num_states} automaton states and {hmm.num_states} HMM states need "
                f"{size:.3g} GB: use fewer tokens or a simpler constraint"
            )
        edges = WeightedEdges(self.hmm, automaton)
        self._edges = edges if fits(edges.log_weights.numel()) else None  # for `reading`
        self._tables = acceptance_tables(self.hmm, automaton, edges, live, length)

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
        if not len(positions):
            raise InputError("there are no positions: give at least one")
        check_words(tokens, self.hmm.vocab_size)
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
        return self._score([position], relative=False)[0]

    def _table(self, remaining: int) -> AcceptanceTable:
        if remaining < 1:
            raise InputError(f"all {self.length} tokens of the guide have been generated")
        return self._tables[min(remaining, len(self._tables)) - 1]

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
        return by_class.gather(1, self._classes.class_of[words])

    def node(self, state: int, remaining: int) -> Node:
        """Return the node of an automaton state."""
        return Node(state, remaining, self._settled[state])

    def node_after(self, node: Node, token: int) -> Node:
        """Return the node after one more token, which is not checked."""
        state, remaining = self.automaton.step(node.automaton, token), node.remaining - 1
        if not remaining:  # a text that is longer than its guide, and may be, stays accepted with every further token
            remaining = int(self.automaton.accepting[state])
        return self.node(state, remaining)

    @cached_property
    def _settled(self) -> list[bool]:
        settled: list[bool] = self.automaton.settled().tolist()
        return settled

    def plan(self, node: Node) -> Plan:
        """Return what scores the tokens after a node."""
        row_of, table = self._table(node.remaining)
        key = node.automaton, id(row_of)
        targets = self._targets.get(key)  # another thread may clear them
        if targets is None:
            if len(self._targets) == _KEPT_TARGETS:
                self._targets.clear()
            row_of_class = row_of[self.automaton.by_class[node.automaton].long()]
            targets = self._targets[key] = Targets(self._classes, row_of_class)
        return Plan(targets, table)

    def _score(self, positions: Sequence[Position], relative: bool) -> Tensor:
        """Compute `joint` or `log_probs_accept` of each position [B, V], of several at once."""
        if not len(positions):
            raise InputError("there are no positions: give at least one")
        log_states = torch.stack([position.log_state for position in positions])
        plans = [self.plan(self.node(position.automaton, position.remaining)) for position in positions]
        return log_probs_accept(self.hmm, log_states, plans, relative)

    @check_arguments
    def next_token(self, position: Position) -> Tensor:
        """Compute log p(next token = v | tokens so far, all accepted) [V]."""
        return self.next_tokens([position])[0]

    @check_arguments
    def next_tokens(self, positions: Sequence[Position]) -> Tensor:
        """Compute `next_token` of each position [B, V], in little more time than for one."""
        joint = self._score(positions, relative=False)
        impossible = (joint.amax(1) == NEG_INF).nonzero().flatten().tolist()
        if impossible:
            raise none_accepted(positions[impossible[0]].remaining)
        return joint.log_softmax(1)

    @check_arguments
    def log_prob_accept(self, position: Position) -> float:
        """Compute log p(all accepted | tokens so far)."""
        if position.remaining == 0:
            return 0.0 if bool(self.automaton.accepting[position.automaton]) else NEG_INF
        return min(0.0, float(logsumexp(self.joint(position), 0)))

    @check_arguments
    def log_probs_accept(self, position: Position) -> Tensor:
        """Compute log p(all accepted | tokens so far, next token = v) [V]; −inf for tokens of probability zero."""
        return self._score([position], relative=True)[0]

    @check_arguments
    def log_probs_accept_of(self, positions: Sequence[Position]) -> Tensor:
        """Compute `log_probs_accept` of each position [B, V], in little more time than for one."""
        return self._score(positions, relative=True)

    @torch.no_grad()
    def log_probs_accept_along(
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
                ahead = self._tables[min(left, len(self._tables) - 1)]
                place = int(ahead.row_of[state])
                tables.append(ahead.log_probs[place] if place >= 0 else torch.full_like(probs[0, 0], NEG_INF))
            here = probs[row, given : given + len(tables)].log()
            result.append(logsumexp(here + torch.stack(tables), 1).clamp_(max=0).tolist() if tables else [])
        return result


def none_accepted(remaining: int) -> InputError:
    return InputError(f"no continuation of {remaining} tokens that the model can generate is accepted")
