"""An HMM given that what it says is accepted by an automaton: exactly, one token at a time.

With z_t the state that emits x_t and s_t that of the automaton after it, the chance that r more tokens end in an
accepting state is a recursion over (s, z), as the backward recursion is over z:

    ahead_0(s, z) = [s accepts],   ahead_r(s, z) = Σ_z' A(z, z') Σ_x B(z', x) ahead_r−1(next(s, x), z').

Tokens that lead from every state to the same one are taken together, so its cost does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.automaton import Automaton
from hmmlm.hmm.blocked import BlockedHMM
from hmmlm.hmm.checks import check_whole
from hmmlm.hmm.dense import HMM
from hmmlm.hmm.mixing import mix
from hmmlm.ops.scan.naive import NEG_INF, logsumexp

CELLS = 2**24  # largest intermediate
LARGEST_GB = 16  # of what is kept of the recursion
FEW = 256  # tokens whose emissions are summed one by one


class Position(NamedTuple):
    """Where a sequence stands."""

    log_state: Tensor  # [Z] log p(z of the next token | tokens so far)
    automaton: int
    """Its state."""
    remaining: int
    """How many tokens follow."""


class Guide:
    """`hmm` given that `length` tokens are accepted by `automaton`.

    To steer another model: add `chances(position)` to its log-probabilities of the next token, and go on with
    `advance(position, token)`.
    """

    @torch.no_grad()
    def __init__(self, hmm: HMM | BlockedHMM, automaton: Automaton, length: int) -> None:
        if automaton.vocab_size != hmm.vocab_size:
            raise InputError(
                f"the automaton reads {automaton.vocab_size} words and the model says {hmm.vocab_size}: they do not "
                "belong together"
            )
        check_whole("length", length, 1)
        size = length * automaton.states * hmm.states * hmm.dtype.itemsize / 1e9
        if size > LARGEST_GB:
            raise InputError(
                f"{length} tokens, {automaton.states} states of the automaton and {hmm.states} of the model need "
                f"{size:.0f} GB: allow fewer tokens, or ask for fewer phrases"
            )
        self.hmm, self.automaton, self.length = hmm.detach(), automaton, length
        self._known_moves: dict[int, list[tuple[int, Tensor]]] = {}
        by_class, class_of = automaton.next.unique(dim=1, return_inverse=True)  # [S, C], [V]
        log_classes = _log_classes(self.hmm, class_of.to(hmm.device), by_class.shape[1])
        by_class = by_class.to(hmm.device)
        ahead = torch.where(automaton.accepting.to(hmm.device), 0.0, NEG_INF).to(hmm.dtype)[:, None]
        self._ahead = [ahead.expand(-1, hmm.states)]  # [S, Z] for 0, 1, … more tokens
        for _ in range(length - 1):
            self._ahead.append(_push(self.hmm, _read(log_classes, by_class, self._ahead[-1])))

    def begin(self, tokens: Sequence[int] = ()) -> Position:
        """After `tokens`, which the automaton reads but which are not counted in the length."""
        position = Position(self.hmm.begin(), 0, self.length)
        for token in tokens:
            position = self.advance(position, token)._replace(remaining=self.length)
        return position

    @torch.no_grad()
    def advance(self, position: Position, token: int) -> Position:
        state = self.automaton.read([token], position.automaton)
        log_state = self.hmm.advance(position.log_state, token)
        if not bool((log_state > NEG_INF).any()):
            raise InputError(f"the model never says token {token} here, so nothing can follow it")
        return Position(log_state, state, position.remaining - 1)

    def joint(self, position: Position) -> Tensor:
        """log p(next token = v, all accepted | tokens so far) [V]."""
        return self._joint([position])[0]

    @torch.no_grad()
    def _joint(self, positions: Sequence[Position]) -> Tensor:
        """The same of each [B, V]: whole vocabularies are read together, which costs little more than one."""
        hmm, shape = self.hmm, (len(positions), self.hmm.vocab_size)
        result = torch.full(shape, NEG_INF, dtype=hmm.dtype, device=hmm.device)
        many: list[tuple[int, Tensor, Tensor]] = []  # row, tokens, states before them
        for row, position in enumerate(positions):
            if position.remaining < 1:
                raise InputError(f"all {self.length} tokens have been said")
            for state, tokens in self._moves(position.automaton):
                log_states = position.log_state + self._ahead[position.remaining - 1][state]
                if not bool(log_states.amax() > NEG_INF):
                    continue
                if len(tokens) > FEW:
                    many.append((row, tokens, log_states))
                else:
                    result[row, tokens] = _emit(hmm, log_states, tokens)
        emitted = _emit_all(hmm, [log_states for _, _, log_states in many])
        for (row, tokens, _), log_probs in zip(many, emitted, strict=True):
            result[row, tokens] = log_probs[tokens]
        return result

    def _moves(self, state: int) -> list[tuple[int, Tensor]]:
        """Where the automaton may go from a state, and the tokens that lead there."""
        if state not in self._known_moves:
            following = self.automaton.next[state].to(self.hmm.device)
            reached = following.unique().tolist()
            self._known_moves[state] = [(after, (following == after).nonzero().squeeze(1)) for after in reached]
        return self._known_moves[state]

    def next_token(self, position: Position) -> Tensor:
        """log p(next token = v | tokens so far, all accepted) [V]."""
        joint = self.joint(position)
        if not bool(joint.amax() > NEG_INF):
            raise InputError(f"nothing that the model can say in {position.remaining} tokens is accepted")
        return joint.log_softmax(0)

    def chance(self, position: Position) -> float:
        """log p(all accepted | tokens so far)."""
        if position.remaining == 0:
            return 0.0 if bool(self.automaton.accepting[position.automaton]) else NEG_INF
        return min(0.0, float(logsumexp(self.joint(position), 0)))

    def chances(self, position: Position) -> Tensor:
        """log p(all accepted | tokens so far, next token = v) [V]; −inf for tokens that the model never says here."""
        return self.chances_of([position])[0]

    def chances_of(self, positions: Sequence[Position]) -> Tensor:
        """Those of each [B, V], in little more time than those of one."""
        plain = torch.stack(list(_emit_all(self.hmm, [position.log_state for position in positions])))
        possible = plain > NEG_INF
        # no more than one: the two are not rounded alike
        return torch.where(possible, self._joint(positions) - torch.where(possible, plain, 0.0), NEG_INF).clamp(max=0)


def _emit_all(hmm: HMM | BlockedHMM, log_states: Sequence[Tensor]) -> Iterator[Tensor]:
    """log Σ_z p(z) p(token | z) of all tokens [V], for each of these [Z]."""
    cells = hmm.vocab_size * (1 if isinstance(hmm, HMM) else hmm.factors.states_per_block)
    at_once = max(1, CELLS // cells)
    for begin in range(0, len(log_states), at_once):
        yield from hmm.emit(torch.stack(list(log_states[begin : begin + at_once])))


def _emit(hmm: HMM | BlockedHMM, log_states: Tensor, tokens: Tensor) -> Tensor:
    """log Σ_z p(z) p(token | z) of some tokens [n]."""
    if isinstance(hmm, HMM):
        return logsumexp(log_states[:, None] + hmm.log_emission[:, tokens], 0)
    factors = hmm.factors
    by_block = log_states.view(-1, factors.states_per_block)
    return logsumexp(by_block[factors.block_of_word[tokens]] + factors.log_emission[tokens], 1)


def _log_classes(hmm: HMM | BlockedHMM, class_of: Tensor, classes: int) -> Tensor:
    """log p(a token of the class | z) [classes, Z], for class_of [V]."""
    if isinstance(hmm, HMM):
        pieces = hmm.log_emission.split(max(1, CELLS // hmm.vocab_size))
        return torch.cat([_grouped(piece.t(), class_of, classes) for piece in pieces], 1)
    factors = hmm.factors
    blocks = hmm.states // factors.states_per_block
    return _grouped(factors.log_emission, class_of * blocks + factors.block_of_word, classes * blocks).view(classes, -1)


def _grouped(log_values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Rows of log_values [V, n] summed over those of a group: log Σ [groups, n]."""
    peak = torch.full((groups, log_values.shape[1]), NEG_INF, dtype=log_values.dtype, device=log_values.device)
    peak = peak.scatter_reduce(0, group[:, None].expand_as(log_values), log_values, "amax")
    peak = torch.where(peak > NEG_INF, peak, 0.0)
    # in float64: thousands of rare words are lost when they are added to a sum of frequent ones
    relative = (log_values - peak[group]).double().exp()
    total = torch.zeros_like(peak, dtype=torch.float64).index_add(0, group, relative)
    return (total.log() + peak).to(log_values)


def _read(log_classes: Tensor, by_class: Tensor, log_ahead: Tensor) -> Tensor:
    """log Σ_c p(class c | z) ahead(next(s, c), z) [S, Z]."""
    classes, states = log_classes.shape
    pieces = by_class.split(max(1, CELLS // (classes * states)))
    return torch.cat([logsumexp(log_classes + log_ahead[piece], 1) for piece in pieces])


def _push(hmm: HMM | BlockedHMM, log_values: Tensor) -> Tensor:
    """log Σ_z' A(z, z') v(s, z') [S, Z]."""
    if isinstance(hmm, HMM):
        return mix(log_values, hmm.log_transition.t())
    everywhere = slice(0, hmm.states)
    result = torch.full_like(log_values, NEG_INF)
    for part, tile in hmm.factors.pieces(everywhere, everywhere):
        result = torch.logaddexp(result, mix(log_values[:, part], tile.t()))
    return result
