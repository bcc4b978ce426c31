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
from hmmlm.hmm.automaton import Automaton, check_words
from hmmlm.hmm.checks import check_count
from hmmlm.hmm.emissions import log_group_sums
from hmmlm.hmm.logmatrix import least_sum
from hmmlm.hmm.queries import HiddenMarkovModel
from hmmlm.ops.common import FLOOR, NEG_INF, exp, logsumexp

CELLS = 2**24  # largest intermediate
LARGEST_GB = 16.0  # memory of the recursion
KNOWN_MOVES = 1024  # automaton states of which the tokens are kept
LONG = 256  # tokens of a constraint above which its recursion is in float64
NEGLIGIBLE = 1e-6  # change of a log-probability
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


class Ahead(NamedTuple):
    """The recursion after one number of tokens."""

    row_of: Tensor  # [S] the row of each automaton state; −1 without one
    log_probs: Tensor  # [rows, Z]


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
        live = _live(automaton, length)
        rows = sum(int(mask.sum()) for mask in live) + int(live[-1].sum()) * (length - len(live))
        size = rows * hmm.states * hmm.dtype.itemsize / 1e9
        if size > LARGEST_GB:
            raise InputError(
                f"{length} tokens, {automaton.states} automaton states and {hmm.states} HMM states need "
                f"{size:.3g} GB: use fewer tokens or a simpler constraint"
            )
        accepting = automaton.accepting.nonzero()[:, 0]
        zeros = torch.zeros(len(accepting), hmm.states, dtype=hmm.dtype, device=hmm.device)
        # For 0, 1, … more tokens. The recursion is linear, with coefficients of at least 0, so the relative change
        # never grows from one step to the next: it ends once this change, at every step that is left, changes nothing.
        rows_of = [torch.where(mask, mask.cumsum(0) - 1, -1) for mask in live]
        self._ahead = [Ahead(rows_of[0], zeros)]
        self._edges: _Edges | None = None
        if length == 1:
            return
        edges = _Edges(self.hmm, automaton)
        if edges.log_weights.numel() <= CELLS:
            self._edges = edges  # for `reading`
        model = self.hmm
        if length > LONG and hmm.dtype == torch.float32:  # rounding errors would hide a change, and add up
            model = self.hmm.to(torch.float64)
            edges = _Edges(model, automaton)
        before = _Step(rows_of[0], zeros.to(model.dtype), zeros.new_zeros(len(zeros), dtype=torch.float64))
        values, rounding = before.log_probs(), 2 * torch.finfo(hmm.dtype).eps  # of sums of the model's own rows
        for r in range(1, length):
            step = edges.read(before, rows_of[min(r, len(live) - 1)])
            if len(step.relative):  # without rows, nothing is accepted
                step = _relative(step.row_of, model.push(step.relative), step.offset)
            after = step.log_probs()
            self._ahead.append(Ahead(step.row_of, after.to(hmm.dtype)))
            if step.row_of is before.row_of and _converged(values, after, max(NEGLIGIBLE / (length - r), rounding)):
                break
            before, values = step, after

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
            Position(log_state, automaton.read([token], before.automaton), before.remaining - 1, before.prompt)
            for log_state, before, token in zip(log_states, positions, tokens, strict=True)
        ]

    @check_arguments
    def joint(self, position: Position) -> Tensor:
        """Compute log p(next token = v, all accepted | tokens so far) [V]."""
        return score_positions([(self, position)])[0][0]

    @check_arguments
    def ahead(self, position: Position) -> Ahead:
        """Return the recursion for the tokens that follow the next one."""
        if position.remaining < 1:
            raise InputError(f"all {self.length} tokens of the guide have been generated")
        return self._ahead[min(position.remaining, len(self._ahead)) - 1]

    @property
    def reads(self) -> bool:
        """Whether the edges of the automaton are kept, as `reading` needs: they are unless it is very large."""
        return self._edges is not None

    def reading(self, position: Position) -> Tensor:
        """Compute log p(all accepted | z of the next token) [Z]."""
        assert self._edges is not None
        return self._edges.read_from(position.automaton, self.ahead(position))

    def accepted_words(self, position: Position, words: Tensor, states: Tensor) -> Tensor:
        """Compute log p(all accepted | next token = word, its state) [n, W] for words [n, W] of states [n]."""
        ahead, device = self.ahead(position), words.device
        place = ahead.row_of[self.automaton.by_class[position.automaton].long()].to(device)  # of each class of words
        by_class = torch.where(place < 0, NEG_INF, ahead.log_probs[place.clamp_min(0)[None], states[:, None]])
        return by_class.gather(1, self._class_of[words])

    @cached_property
    def _class_of(self) -> Tensor:
        return self.automaton.class_of.to(self.hmm.device).long()

    @check_arguments
    def moves(self, state: int) -> Moves:
        """Return the tokens that may follow an automaton state."""
        check_count("state", state, 0, self.automaton.states - 1)
        if state not in self._known_moves:
            if len(self._known_moves) == KNOWN_MOVES:
                self._known_moves.clear()
            following = self.automaton.by_class[state][self.automaton.class_of].long()
            reached, group_of, counts = following.unique(return_inverse=True, return_counts=True)
            many = (counts > FEW).nonzero()[:, 0]
            few = (counts <= FEW)[group_of].nonzero()[:, 0]
            number = torch.full_like(reached, len(many), dtype=torch.int16)
            number[many] = torch.arange(len(many), dtype=torch.int16)
            device = self.hmm.device
            self._known_moves[state] = Moves(reached[many], number[group_of].to(device), few.to(device), following[few])
        return self._known_moves[state]

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
            remaining = positions[impossible[0]].remaining
            raise InputError(f"no continuation of {remaining} tokens that the model can generate is accepted")
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
    def chances_after(self, positions: Sequence[Position], tokens: Sequence[int]) -> Tensor:
        """Compute log p(all accepted | tokens so far, next token) [B] for one next token of each position.

        It reads no other column of the emission; −inf for a token of probability zero.
        """
        log_states = torch.stack([position.log_state for position in positions])
        following = []
        for position, token in zip(positions, tokens, strict=True):
            ahead = self.ahead(position)
            place = int(ahead.row_of[self.automaton.read([token], position.automaton)])
            following.append(ahead.log_probs[place] if place >= 0 else torch.full_like(log_states[0], NEG_INF))
        support, scores = self.hmm.observe(torch.tensor(tokens, device=log_states.device), missing=False)
        plain = self.hmm.restrict(log_states, support) + scores
        joint = plain + self.hmm.restrict(torch.stack(following), support)
        return (logsumexp(joint, 1) - logsumexp(plain, 1)).nan_to_num_(nan=NEG_INF, neginf=NEG_INF).clamp_(max=0)


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


class _Step(NamedTuple):
    """The recursion after one number of tokens: log-probabilities relative to an offset of each row.

    Log-probabilities of many tokens are large numbers, whose rounding errors would add up.
    """

    row_of: Tensor  # [S] as in `Ahead`
    relative: Tensor  # [rows, Z]
    offset: Tensor  # [rows] float64

    def log_probs(self) -> Tensor:
        return self.relative.double() + self.offset[:, None]


def _relative(row_of: Tensor, log_probs: Tensor, offset: Tensor) -> _Step:
    """Return log_probs [rows, Z] + offset [rows] relative to the largest value of each row."""
    peak = log_probs.amax(1).clamp_min(torch.finfo(log_probs.dtype).min)
    return _Step(row_of, log_probs - peak[:, None], offset + peak)


class _Terms(NamedTuple):
    """What a step of the recursion adds up."""

    kept: Tensor  # [n] the edges
    source: Tensor  # [n] their rows after the step
    from_row: Tensor  # [n] their rows before it
    rows: int
    least: float  # smallest sum that underflow cannot have changed


class _Edges:
    """The edges of an automaton and log p(a token of the edge | z), for one step of the recursion."""

    def __init__(self, hmm: HiddenMarkovModel, automaton: Automaton) -> None:
        source, target, of_cell = automaton.edges
        hopeful = automaton.hopeful()
        useful = hopeful[target] & hopeful[source]
        number = torch.full_like(source, -1)
        number[useful] = torch.arange(int(useful.sum()))
        cells = number[of_cell]  # [S, C]; −1: leads nowhere
        self._device = hmm.device
        self._source, self._target = source[useful].to(hmm.device), target[useful].to(hmm.device)
        log_classes = hmm.group_emission(automaton.class_of.to(hmm.device), automaton.classes)  # [C, Z]
        edge, of_class = cells[cells >= 0], torch.arange(automaton.classes).expand_as(cells)[cells >= 0]
        order = edge.argsort(stable=True)
        self.log_weights = _log_sums(log_classes, of_class[order], edge[order], len(self._source))  # [E, Z]
        self._weights = exp(self.log_weights)
        self._before = self._after = torch.empty(0)
        self._terms = _Terms(*(torch.empty(0),) * 3, 0, 0.0)

    def read(self, before: _Step, row_of: Tensor) -> _Step:
        """Compute log Σ_edges p(edge | z) ahead(target, z) [rows, Z], for automaton states with rows row_of [S]."""
        if before.row_of is not self._before or row_of is not self._after:  # else the terms of the last step
            self._before, self._after, self._terms = before.row_of, row_of, self._find_terms(before.row_of, row_of)
        kept, source, from_row, rows, least = self._terms
        states, dtype = before.relative.shape[1], before.relative.dtype
        # Each source's rows relative to the largest of their offsets.
        relative = torch.nn.functional.threshold(before.relative.exp(), FLOOR[dtype], 0.0)
        top = torch.full((rows,), NEG_INF, dtype=torch.float64, device=self._device)
        offset = before.offset[from_row]
        top = top.scatter_reduce(0, source, offset, "amax")
        log_factor = (offset - top[source]).to(dtype)
        factor = log_factor.exp()
        total = torch.zeros(rows, states, dtype=dtype, device=self._device)
        size = max(1, CELLS // states)
        for first in range(0, len(kept), size):
            piece = slice(first, first + size)
            terms = relative[from_row[piece]].mul_(self._weights[kept[piece]]).mul_(factor[piece, None])
            total.index_add_(0, source[piece], terms)
        faint = (total.amin(1) < least).nonzero()[:, 0]
        result = total.log_()
        if len(faint):  # some sums may have underflowed: in log space
            chosen = torch.isin(source, faint).nonzero()[:, 0]
            number = torch.full((rows,), -1, device=self._device)
            number[faint] = torch.arange(len(faint), device=self._device)
            log_terms = self.log_weights[kept[chosen]] + before.relative[from_row[chosen]] + log_factor[chosen, None]
            result[faint] = log_group_sums(log_terms, number[source[chosen]], len(faint))
        return _Step(row_of, result, top)

    def read_from(self, state: int, before: Ahead) -> Tensor:
        """Compute one row of `read` [Z], that of an automaton state."""
        edges = (self._source == state).nonzero()[:, 0]
        places = before.row_of.to(self._device)[self._target[edges]]
        kept = places >= 0
        return logsumexp(self.log_weights[edges[kept]] + before.log_probs[places[kept]], 0)

    def _find_terms(self, before: Tensor, after: Tensor) -> _Terms:
        """Return the terms of a step from rows `before` [S] to rows `after` [S]."""
        from_row = before.to(self._device)[self._target]
        kept = (from_row >= 0).nonzero()[:, 0]
        source = after.to(self._device)[self._source[kept]]
        most = int(torch.bincount(source, minlength=1).max()) if len(source) else 1
        least = least_sum(most, self.log_weights.dtype)
        return _Terms(kept, source, from_row[kept], int(after.max()) + 1, least)


def _log_sums(log_classes: Tensor, of_class: Tensor, edge: Tensor, edges: int) -> Tensor:
    """Compute log Σ p(class | z) over the classes of each edge [edges, Z], for pairs of both, sorted by edge."""
    result = torch.full((edges, log_classes.shape[1]), NEG_INF, dtype=log_classes.dtype, device=log_classes.device)
    size = max(1, CELLS // log_classes.shape[1])
    first = 0
    while first < len(edge):
        last = min(first + size, len(edge))
        if last < len(edge) and int(edge[last]) > int(edge[first]):  # whole edges
            last = int(torch.searchsorted(edge, edge[last]))
        low, high = int(edge[first]), int(edge[last - 1]) + 1
        chosen = log_classes[of_class[first:last].to(log_classes.device)]
        sums = log_group_sums(chosen, (edge[first:last] - low).to(log_classes.device), high - low)
        result[low:high] = torch.logaddexp(result[low:high], sums)
        first = last
    return result


def _live(automaton: Automaton, length: int) -> list[Tensor]:
    """Return masks [S] of the automaton states from which 0, 1, … tokens may be accepted, until they repeat."""
    source, target, _ = automaton.edges
    live = [automaton.accepting]
    while len(live) < length:
        mask = torch.zeros_like(automaton.accepting)
        mask[source[live[-1][target]]] = True
        live.append(mask)
        if torch.equal(mask, live[-2]):
            break
    return live


def _converged(before: Tensor, after: Tensor, tolerance: float) -> bool:
    """Return whether no value changed by more than `tolerance` from before to after [rows, Z]."""
    return all(
        torch.allclose(after[rows], before[rows], rtol=0.0, atol=tolerance)  # −inf equals −inf
        for rows in (slice(0, FEW), slice(FEW, None))  # of large tables, the first rows mostly decide
    )
