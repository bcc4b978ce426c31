"""An HMM conditioned on the acceptance of its tokens by an automaton: exact, one token at a time.

With z_t the state that emits x_t and s_t the automaton state after x_t, the probability that r more tokens end in an
accepting automaton state is a recursion over (s, z), as the backward recursion is over z:

    ahead_0(s, z) = [s accepts],   ahead_r(s, z) = Σ_z' A(z, z') Σ_x B(z', x) ahead_r−1(next(s, x), z').

Tokens with the same transitions from every automaton state form one class, so the cost depends on the classes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.automaton import Automaton
from hmmlm.hmm.checks import check_count
from hmmlm.hmm.queries import HiddenMarkovModel
from hmmlm.ops.common import NEG_INF, logsumexp

CELLS = 2**24  # largest intermediate
LARGEST_GB = 16  # memory of the recursion
FEW = 256  # more tokens than this are scored with the whole vocabulary


class Position(NamedTuple):
    """The position of a sequence under a constraint."""

    log_state: Tensor  # [Z] log p(z of the next token | tokens so far)
    automaton: int
    """The automaton state."""
    remaining: int
    """Number of tokens that follow."""

    def __repr__(self) -> str:
        return f"Position(automaton={self.automaton}, remaining={self.remaining}, states={len(self.log_state)})"


class Guide:
    """`hmm` conditioned on the acceptance of `length` tokens by `automaton`.

    To steer another model, add `chances(position)` to its log-probabilities of the next token, then call
    `advance(position, token)`.
    """

    @torch.no_grad()
    def __init__(self, hmm: HiddenMarkovModel, automaton: Automaton, length: int) -> None:
        if automaton.vocab_size != hmm.vocab_size:
            raise InputError(
                f"the automaton has {automaton.vocab_size} words and the model has {hmm.vocab_size}: use the same "
                "vocabulary"
            )
        check_count("length", length, 1)
        size = length * automaton.states * hmm.states * hmm.dtype.itemsize / 1e9
        if size > LARGEST_GB:
            raise InputError(
                f"{length} tokens, {automaton.states} automaton states and {hmm.states} HMM states need "
                f"{size:.0f} GB: use fewer tokens or fewer phrases"
            )
        self.hmm, self.automaton, self.length = hmm.detach(), automaton, length
        self._known_moves: dict[int, list[tuple[int, Tensor]]] = {}
        by_class, class_of = automaton.next.unique(dim=1, return_inverse=True)  # [S, C], [V]
        log_classes = self.hmm.group_emission(class_of.to(hmm.device), by_class.shape[1])
        by_class = by_class.to(hmm.device)
        ahead = torch.where(automaton.accepting.to(hmm.device), 0.0, NEG_INF).to(hmm.dtype)[:, None]
        # [S, Z] for 0, 1, … more tokens. The recursion is linear, with coefficients of at least 0, so the relative
        # change never grows from one step to the next: once it is a rounding error, more tokens change nothing.
        self._ahead = [ahead.expand(-1, hmm.states)]
        for _ in range(length - 1):
            self._ahead.append(self.hmm.push(_read(log_classes, by_class, self._ahead[-1])))
            if _converged(*self._ahead[-2:]):
                break

    def __repr__(self) -> str:
        return f"Guide({self.hmm!r}, {self.automaton!r}, length={self.length})"

    def begin(self, tokens: Sequence[int] = ()) -> Position:
        """Return the position after `tokens`, which the automaton reads but which do not count toward the length."""
        position = Position(self.hmm.begin(), 0, self.length)
        for token in tokens:
            position = self.advance(position, token)._replace(remaining=self.length)
        return position

    @torch.no_grad()
    def advance(self, position: Position, token: int) -> Position:
        """Return the position after one more token."""
        state = self.automaton.read([token], position.automaton)
        log_state = self.hmm.advance(position.log_state, token)
        if not bool((log_state > NEG_INF).any()):
            raise InputError(f"token {token} has probability zero under the model here, so nothing can follow it")
        return Position(log_state, state, position.remaining - 1)

    def joint(self, position: Position) -> Tensor:
        """Compute log p(next token = v, all accepted | tokens so far) [V]."""
        return self._joint([position])[0][0]

    @torch.no_grad()
    def _joint(self, positions: Sequence[Position], plain: bool = False) -> tuple[Tensor, Tensor]:
        """Compute `joint` of each position [B, V] and, with `plain`, log p(next token = v | tokens so far) [B, V].

        Whole vocabularies are scored together, at about the cost of one.
        """
        hmm, shape = self.hmm, (len(positions), self.hmm.vocab_size)
        result = torch.full(shape, NEG_INF, dtype=hmm.dtype, device=hmm.device)
        many: list[tuple[int, Tensor, Tensor]] = []  # row, tokens, log-weights of the states
        for row, position in enumerate(positions):
            if position.remaining < 1:
                raise InputError(f"all {self.length} tokens of the guide have been generated")
            for state, tokens in self._moves(position.automaton):
                ahead = self._ahead[min(position.remaining, len(self._ahead)) - 1]
                log_states = position.log_state + ahead[state]
                if not bool(log_states.amax() > NEG_INF):
                    continue
                if len(tokens) > FEW:
                    many.append((row, tokens, log_states))
                else:
                    result[row, tokens] = hmm.emit(log_states, tokens)
        rows = [log_states for _, _, log_states in many] + [position.log_state for position in positions if plain]
        emitted = hmm.emit(torch.stack(rows)) if rows else result[:0]
        for (row, tokens, _), log_probs in zip(many, emitted, strict=False):
            result[row, tokens] = log_probs[tokens]
        return result, emitted[len(many) :]

    def _moves(self, state: int) -> list[tuple[int, Tensor]]:
        """Return the automaton states that follow one, and the tokens that lead to each."""
        if state not in self._known_moves:
            following = self.automaton.next[state].to(self.hmm.device)
            reached = following.unique().tolist()
            self._known_moves[state] = [(after, (following == after).nonzero().squeeze(1)) for after in reached]
        return self._known_moves[state]

    def next_token(self, position: Position) -> Tensor:
        """Compute log p(next token = v | tokens so far, all accepted) [V]."""
        return self.next_tokens([position])[0]

    def next_tokens(self, positions: Sequence[Position]) -> Tensor:
        """Compute `next_token` of each position [B, V], in little more time than for one."""
        joint, _ = self._joint(positions)
        impossible = (joint.amax(1) == NEG_INF).nonzero().flatten().tolist()
        if impossible:
            remaining = positions[impossible[0]].remaining
            raise InputError(f"no continuation of {remaining} tokens that the model can generate is accepted")
        return joint.log_softmax(1)

    def chance(self, position: Position) -> float:
        """Compute log p(all accepted | tokens so far)."""
        if position.remaining == 0:
            return 0.0 if bool(self.automaton.accepting[position.automaton]) else NEG_INF
        return min(0.0, float(logsumexp(self.joint(position), 0)))

    def chances(self, position: Position) -> Tensor:
        """Compute log p(all accepted | tokens so far, next token = v) [V]; −inf for tokens of probability zero."""
        return self.chances_of([position])[0]

    def chances_of(self, positions: Sequence[Position]) -> Tensor:
        """Compute `chances` of each position [B, V], in little more time than for one."""
        joint, plain = self._joint(positions, plain=True)
        possible = plain > NEG_INF
        # Clamped to probability one: the two terms are rounded differently.
        return torch.where(possible, joint - torch.where(possible, plain, 0.0), NEG_INF).clamp(max=0)


def _converged(before: Tensor, after: Tensor) -> bool:
    """Return whether two steps of a recursion in log space differ by rounding errors only."""
    change = torch.where(before == after, 0.0, after - before).abs()  # −inf equals −inf
    size = 1 + torch.minimum(before.abs(), after.abs())
    return bool((change <= 4 * torch.finfo(after.dtype).eps * size).all())


def _read(log_classes: Tensor, by_class: Tensor, log_ahead: Tensor) -> Tensor:
    """Compute log Σ_c p(class c | z) ahead(next(s, c), z) [S, Z]."""
    classes, states = log_classes.shape
    pieces = by_class.split(max(1, CELLS // (classes * states)))
    return torch.cat([logsumexp(log_classes + log_ahead[piece], 1) for piece in pieces])
