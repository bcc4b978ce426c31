"""One token of several texts under constraints: from the states before it to steered scores of the next.

Tokens after which the same row of a guide's table applies are scored together: many of them by a product with the whole
emission matrix, few of them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.constrain.guided_cpu import (
    ClassProducts,
    accept_by_class,
    accept_by_column,
    accept_by_token,
    advance_products,
    cpu_matrices,
)
from hmmlm.emissions import Categorical
from hmmlm.errors import InputError
from hmmlm.hmm.hmm import HMM
from hmmlm.numerics.logmatrix import log_ratio
from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import restrict
from hmmlm.ops.common import NEG_INF, kernel_refusal, logsumexp, without_autocast
from hmmlm.ops.pieces import at_once, fits
from hmmlm.scan.composition import matrices
from hmmlm.scan.lattice import condition

_SEVERAL = 4  # rows of a guide's table that many tokens share, above which each token is scored with its own alone


def has_kernels(hmm: HMM) -> bool:
    """Return whether the GPU kernels of constraints serve a model."""
    return matrices(hmm) is not None and hmm.dtype == torch.float32 and not kernel_refusal(hmm.device)


class TokenClasses:
    """The tokens of an automaton by class, for a model.

    Args:
        few: tokens of a row of a guide's table above which these share a product with the whole vocabulary.
    """

    def __init__(self, hmm: HMM, class_of: Tensor, classes: int, few: int) -> None:
        self.few, self.emission = few, hmm.emission
        self.sizes = class_of.bincount(minlength=classes)
        self.tokens = class_of.argsort(stable=True)  # by class
        self.class_of = class_of.to(hmm.device).long()

    @cached_property
    def no_number(self) -> Tensor:
        return torch.zeros_like(self.class_of, dtype=torch.int16)

    @cached_property
    def products(self) -> ClassProducts:
        """The emissions of a model of two matrices on a CPU, by class."""
        assert isinstance(self.emission, Categorical)
        return ClassProducts(self.emission, self.tokens, self.sizes)


@dataclass(eq=False)
class Targets:
    """The tokens that may follow an automaton state, by the rows of a guide's table that score them."""

    classes: TokenClasses
    row_of_class: Tensor  # [C]; −1: cannot be accepted any more
    packed: Any = None
    """The same for the kernels of a GPU."""

    def __post_init__(self) -> None:
        rows, self._group = self.row_of_class.unique(return_inverse=True)
        counts = torch.zeros_like(rows).index_add_(0, self._group, self.classes.sizes)
        self._few = (counts <= self.classes.few) & (rows >= 0)
        self._shared = ((counts > self.classes.few) & (rows >= 0)).nonzero()[:, 0]
        self.rows: list[int] = rows[self._shared].tolist()
        """[m] of those that many tokens share."""

    @property
    def column_of(self) -> Tensor | None:
        """The column [V] of emissions of each token."""
        return self.classes.emission.column_of_word

    @cached_property
    def number_of(self) -> Tensor:
        """The index [V] in `rows` of each token's; m for all others."""
        number = torch.full_like(self._few, len(self.rows), dtype=torch.int16)
        number[self._shared] = torch.arange(len(self.rows), dtype=torch.int16)
        class_of = self.classes.class_of
        return number[self._group].to(class_of.device)[class_of] if self.rows else self.classes.no_number

    @cached_property
    def tokens(self) -> Tensor:
        """The tokens [n] that are scored alone."""
        return self.classes.tokens[self._few[self._group].repeat_interleave(self.classes.sizes)].to(self._device)

    @cached_property
    def token_rows(self) -> Tensor:
        """The row [n] of each of them."""
        alone = self._few[self._group]
        return self.row_of_class[alone].repeat_interleave(self.classes.sizes[alone]).to(self._device)

    @property
    def _device(self) -> torch.device:
        return self.classes.class_of.device

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that are scored alone, and their rows."""
        return self.tokens.numpy(), self.token_rows.numpy()

    @cached_property
    def direct(self) -> bool:
        """Whether the tokens share one row and each has its own column of emissions."""
        return self.column_of is None and len(self.rows) == 1

    @cached_property
    def cells(self) -> Tensor:
        """The place of each token [V] in a table [m + 1, U] of the columns of emissions."""
        columns = self.column_of
        if columns is None:
            columns = torch.arange(len(self.number_of), device=self.number_of.device)
        return (self.number_of.long() * (int(columns.max()) + 1) + columns).int()

    @cached_property
    def others(self) -> Any:
        """The tokens that share no row."""
        return _array((self.number_of == len(self.rows)).nonzero()[:, 0])


class Plan(NamedTuple):
    """What scores the tokens after an automaton state, with a number of tokens that follow."""

    targets: Targets
    table: Tensor  # [rows, Z] log p(all accepted | z of the next token), after it


class StepRows(NamedTuple):
    """The rows of a call."""

    log_states: Tensor  # [n, Z]
    of_row: Sequence[int]  # [B] the index in log_states of each row
    tokens: Sequence[int] | None  # [B] read first by the rows with a plan
    plans: Sequence[Plan | None]  # [B]; None: no token is constrained any more


class Steered(NamedTuple):
    """Steered scores."""

    scores: Tensor  # [B, V] log-probabilities
    log_states: Tensor  # [B, Z] log p(z of the next token | tokens so far); of rows without a plan, any
    changed: int  # rows whose most likely token became another
    log_masses: Tensor  # [B] log Σ p(token) · p(accepted | token), which normalized the scores; 0 without a plan


def steer(hmm: HMM, rows: StepRows, scores: Tensor, weight: float) -> Steered:
    """Return steered scores for scores [B, V] of the next token.

    Args:
        weight: of the log-probabilities of acceptance.
    """
    constrained = [row for row, plan in enumerate(rows.plans) if plan is not None]
    plans = [plan for plan in rows.plans if plan is not None]
    log_states = torch.as_tensor(_array(rows.log_states)[[rows.of_row[row] for row in constrained]])
    if rows.tokens is not None:
        log_states = advance_states(hmm, log_states, [rows.tokens[row] for row in constrained])
    scores, whole = scores.detach(), len(plans) == len(scores)
    before = scores if whole else scores[constrained]
    if scores.dtype.itemsize < 4:
        before = before.float()
    steered = _add_log_probs(before, log_probs_accept(hmm, log_states, plans).to(before), weight)
    old, new, every = _array(before), _array(steered), list(range(len(steered)))
    best, choices = new.argmax(1), old.argmax(1)
    top = new[every, best]
    if not float(top.min()) > NEG_INF:
        possible = log_probs_accept(hmm, log_states, plans).amax(1) > NEG_INF
        if bool((_array(possible.to(before.device)) & (top == NEG_INF)).any()):
            raise InputError(
                "the model gives probability zero to every token that the constraint allows: look for what forbids "
                "tokens in generate, such as min_new_tokens, bad_words_ids or suppress_tokens"
            )
    changed = int((new[every, choices] < top).sum())
    # Normalized, so that the scores of beams, which are sums over tokens, are log-probabilities.
    steered = steered.log_softmax(1)
    log_masses = torch.as_tensor(top - _array(steered)[every, best])
    if whole:
        return Steered(steered.to(scores), log_states, changed, log_masses)
    index = torch.tensor(constrained, device=scores.device)
    return Steered(
        scores.index_copy(0, index, steered.to(scores)),
        log_states.new_zeros(len(scores), hmm.num_states).index_copy_(0, index.to(log_states.device), log_states),
        changed,
        log_masses.new_zeros(len(scores)).index_copy_(0, index, log_masses),
    )


def advance_states(hmm: HMM, log_states: Tensor, tokens: Sequence[int]) -> Tensor:
    """Compute log p(z of the next token | tokens so far) [n, Z] after one more token each, from log_states [n, Z]."""
    with without_autocast(log_states):
        matrices = cpu_matrices(hmm)
        moved = None if matrices is None else advance_products(*matrices, log_states, tokens)
        return _advance(hmm, log_states, tokens) if moved is None else moved


def _advance(hmm: HMM, log_states: Tensor, tokens: Sequence[int]) -> Tensor:
    """Compute `advance_states` in log space."""
    support, scores = hmm.emission.score(torch.tensor(tokens, device=hmm.device), missing=False)
    filtered, log_prob = condition(LOG, restrict(log_states, support), scores)
    impossible = (log_prob == NEG_INF).nonzero().flatten().tolist()
    if impossible:
        token = tokens[impossible[0]]
        raise InputError(f"token {token} has probability zero under the model here, so nothing can follow it")
    return hmm.transition.forward_step(LOG, filtered, support)


def log_probs_accept(hmm: HMM, log_states: Tensor, plans: Sequence[Plan], relative: bool = True) -> Tensor:
    """Compute log p(all accepted | tokens so far, next token = v) [n, V] from log p(z of the next token) [n, Z].

    It is −inf for tokens of probability zero.

    Args:
        relative: otherwise log p(next token = v, all accepted | tokens so far).
    """
    matrices = cpu_matrices(hmm) if relative else None
    several = min(len(plan.targets.rows) for plan in plans) > _SEVERAL
    if several and matrices is not None and fits(hmm.num_states * hmm.vocab_size):
        with without_autocast(log_states):
            by_class = accept_by_class(log_states, plans)
        if by_class is not None:
            return by_class.clamp_(max=0)
    with without_autocast(log_states):
        columns = None if matrices is None else accept_by_column(matrices[1], log_states, plans)
        if columns is None:
            columns = _score_columns(hmm, log_states, plans, relative)
    result = _spread(columns, plans)
    if matrices is not None and fits(max(len(plan.targets.tokens) for plan in plans) * log_states.shape[1]):
        states, found = log_states.numpy(), result.numpy()
        for row, plan in enumerate(plans):
            if len(plan.targets.tokens):
                found[row, plan.targets.arrays[0]] = accept_by_token(matrices[1], states[row], plan)
    else:
        _score_single(hmm, log_states, plans, relative, result)
    # At most 0: the terms of a ratio are rounded differently.
    return result.clamp_(max=0) if relative else result


def _score_columns(hmm: HMM, log_states: Tensor, plans: Sequence[Plan], relative: bool) -> Tensor:
    """Compute `log_probs_accept` of the columns of emissions [m, U], for each row that tokens of a text share."""
    texts = [text for text, plan in enumerate(plans) for _ in plan.targets.rows]
    if not texts:
        return log_states.new_empty(0, 0)
    weights = log_states[texts] + torch.cat([plan.table[plan.targets.rows] for plan in plans])
    if not relative:
        return hmm.emission.column_log_probs(weights)
    emitted = hmm.emission.column_log_probs(torch.cat([log_states, weights]))
    return log_ratio(emitted[len(log_states) :], emitted[: len(log_states)][texts])


def _spread(columns: Tensor, plans: Sequence[Plan]) -> Tensor:
    """Return values of columns of emissions [m, U] as those of words [n, V]; −inf for tokens that share no row."""
    direct = all(plan.targets.direct for plan in plans)
    result, first = columns, 0
    if not direct:
        result = columns.new_full((len(plans), len(plans[0].targets.number_of)), NEG_INF)
    values = _array(result)
    for row, plan in enumerate(plans):
        targets = plan.targets
        if direct:
            values[row, targets.others] = NEG_INF
        elif targets.rows:
            own = columns[first : first + len(targets.rows)]
            padded = torch.cat([own, own.new_full((1, own.shape[1]), NEG_INF)])
            torch.index_select(padded.view(-1), 0, targets.cells, out=result[row])
        first += len(targets.rows)
    return result


def _score_single(hmm: HMM, log_states: Tensor, plans: Sequence[Plan], relative: bool, result: Tensor) -> None:
    """Set `log_probs_accept` of the tokens that are scored alone in result [n, V]."""
    by_table, size = dict[int, list[int]](), at_once(hmm.num_states)
    for row, plan in enumerate(plans):
        if len(plan.targets.tokens):
            by_table.setdefault(id(plan.table), []).append(row)
    for rows in by_table.values():
        table, targets = plans[rows[0]].table, [plans[row].targets for row in rows]
        row_of = torch.tensor([row for row in rows for _ in plans[row].targets.tokens], device=hmm.device)
        tokens, token_rows = (
            torch.cat([each.tokens for each in targets]),
            torch.cat([each.token_rows for each in targets]),
        )
        for own, here, at in zip(row_of.split(size), tokens.split(size), token_rows.split(size), strict=True):
            support, scores = hmm.emission.score(here, missing=False)
            plain = restrict(log_states[own], support) + scores
            alone = logsumexp(plain + restrict(table[at], support), 1)
            result[own, here] = log_ratio(alone, logsumexp(plain, 1)) if relative else alone


def _add_log_probs(scores: Tensor, log_probs: Tensor, weight: float) -> Tensor:
    """Return scores [n, V] with weight · log_probs [n, W ≤ V] added; −inf for tokens beyond W. Overwrites log_probs."""
    if weight != 1:
        # A weight of 0 would make NaN of impossible tokens.
        log_probs = torch.where(log_probs == NEG_INF, NEG_INF, weight * log_probs)
    words, width = log_probs.shape[1], scores.shape[1]
    steered = log_probs.add_(scores[:, :words])
    return steered if words == width else torch.nn.functional.pad(steered, (0, width - words), value=NEG_INF)


def _array(values: Tensor) -> Any:
    """Return values on a CPU as an array: NumPy's argmax takes a fifteenth of the time of torch's."""
    return values if values.is_cuda else values.numpy()
