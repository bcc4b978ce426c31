"""The queries of an HMM, written once for every transition and emission, batched, in log space.

For each position an emission returns the states that can emit its token (its support) and their scores; a transition
moves distributions between supports. The filter and the messages are those of `hmmlm.scan.recursions`; the recursions
below are the standard ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, wraps
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hmmlm.checks import (
    ArrayLike,
    check_batch,
    check_carry,
    check_count,
    check_log_state,
    check_tokens,
    check_words,
    make_generator,
)
from hmmlm.emissions import Blocked, Categorical
from hmmlm.errors import ImpossibleError, InputError
from hmmlm.hmm.labels import counts_of_words, with_labels
from hmmlm.hmm.sampling import draw, draw_paths
from hmmlm.hmm.word_products import WordProducts
from hmmlm.numerics.semirings import LOG
from hmmlm.numerics.support import BlockSupport, Support, restrict, some_rows, state_ids
from hmmlm.ops.common import NEG_INF, Carry, finite, logsumexp, without_autocast
from hmmlm.ops.pieces import at_once
from hmmlm.scan.composition import Composition
from hmmlm.scan.lattice import Lattice, Packed, SortedBatch, condition, endings
from hmmlm.scan.likelihood import expected_counts, log_likelihood
from hmmlm.scan.recursions import (
    find_best_paths,
    gather,
    last_filtered,
    log_initial,
    run_filter,
    run_messages,
    run_possible,
    sort_batch,
    windows,
)
from hmmlm.scan.results import Counts, Filtered, Predictions
from hmmlm.transitions import BlockDiagonal, Dense
from hmmlm.transitions.tiled import TiledTransition

_ENTROPIES = 2**18  # steps × states whose entropies are computed together
_SAMPLED = 10**8  # most tokens of a sample: a few gigabytes


Query = TypeVar("Query", bound=Callable[..., Any])


def differentiable_query(function: Query) -> Query:
    """Leave a method out of torch.compile, which cannot look into compiled loops and batches of any shape."""

    @wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Query, answer)


def query(function: Query) -> Query:
    """Make a method of an HMM compute without gradients, and in the model's precision whatever autocast says."""

    @wraps(function)
    def answer(self: Queries, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast(self.log_start):
            return function(self, *args, **kwargs)

    return differentiable_query(cast(Query, answer))


class Queries(Composition):
    """The exact queries of an HMM. Results are detached unless stated otherwise."""

    # --- queries ---

    @differentiable_query
    def log_likelihood(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, labels: ArrayLike | None = None
    ) -> Tensor:
        """Compute log p(x) [B], natural log; −inf for an impossible sequence. Differentiable in the parameters.

        Under autocast, the products of a dense model have operands in its dtype; all other queries ignore it.

        Args:
            labels: what is known about states: [B, T] the state of each token (−1: unknown), or [B, T, Z] bool, which
                states it may have. The result is then log p(x, the states are allowed).
        """
        if labels is not None:
            return self._given(labels, tokens, lengths, Queries.log_likelihood)
        return log_likelihood(self, *check_batch(tokens, lengths, self.vocab_size, self.device))

    def _given(
        self, labels: ArrayLike | None, tokens: ArrayLike, lengths: ArrayLike | None, query: Callable[..., Any]
    ) -> Any:
        """Answer a query given labels; see `log_likelihood`."""
        if labels is None:
            return query(self, tokens, lengths)
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        labelled = with_labels(self, checked, sizes, labels)
        try:
            found = query(labelled.hmm, labelled.tokens, sizes)
        except ImpossibleError as error:
            token = f"token {int(checked[error.sequence, error.position])} with its label"
            raise ImpossibleError(error.sequence, error.position, token) from None
        if isinstance(found, Counts):
            return found._replace(emission=counts_of_words(self.emission, labelled.words, found.emission))
        return found

    @differentiable_query
    def filter(self, tokens: ArrayLike, lengths: ArrayLike | None = None, carry: Carry | None = None) -> Filtered:
        """Compute p(z_t | x_1..t); zero from the first impossible token on. The log-likelihood is differentiable.

        Args:
            carry: of the previous window, if these tokens continue others.
        """
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        check_carry(carry, checked, self.num_states)
        with torch.no_grad(), without_autocast(checked):
            batch = sort_batch(self, checked, sizes)
            lattice = run_filter(self.detach(), batch, log_initial(self, carry, batch))
            probs = gather(self, lattice, lattice.filtered.map(torch.exp))
            total = batch.unsort(lattice.log_likelihood()).to(self.dtype)
            carry_out = Carry(batch.unsort(last_filtered(self, lattice)))
        if torch.is_grad_enabled() and self.requires_grad:
            total = log_likelihood(self, checked, sizes, carry)
        return Filtered(total, carry_out, probs)

    @query
    def token_log_probs(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, carry: Carry | None = None
    ) -> Tensor:
        """Compute log p(x_t | x_1..t−1) [B, T], natural log; zero beyond a sequence's length.

        It is −inf from the first impossible token on.

        Args:
            carry: of the previous window, if these tokens continue others (`filter(…).carry`).
        """
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        check_carry(carry, checked, self.num_states)
        model, batch = self.detach(), sort_batch(self, checked, sizes)
        result = torch.zeros(checked.shape, dtype=self.dtype, device=self.device)
        for first, lattice in windows(model, batch, log_initial(self, carry, batch)):
            scales = lattice.scales.padded(0.0)
            result[batch.order[: scales.shape[1]], first : first + len(scales)] = scales.t()
        return result

    @query
    def expected_counts(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, labels: ArrayLike | None = None
    ) -> Counts:
        """Compute expected counts of starts [Z], transitions [Z, Z] and emissions [Z, V], summed over the batch.

        They are the gradient of the log-likelihood with respect to the log-probabilities. Those of a factored
        transition are sparse if emissions are blocked, whose counts are [V, k]; those of other structured transitions
        are a dictionary with the counts of each factor. An impossible sequence adds nothing to the counts; the
        log-likelihood is then −inf. `labels` are those of `log_likelihood`.
        """
        if labels is not None:
            return self._given(labels, tokens, lengths, Queries.expected_counts)
        return expected_counts(self, *check_batch(tokens, lengths, self.vocab_size, self.device))

    def _possible(self, tokens: ArrayLike, lengths: ArrayLike | None, log_missing: Tensor | None = None) -> Lattice:
        """Run the filter; raise an InputError that names the first impossible sequence and token."""
        return run_possible(self.detach(), sort_batch(self, tokens, lengths), log_missing)

    @query
    def posterior(self, tokens: ArrayLike, lengths: ArrayLike | None = None, labels: ArrayLike | None = None) -> Tensor:
        """Compute p(z_t | x_1..T) [B, T, Z]; zero beyond a sequence's length.

        `labels` are those of `log_likelihood`.
        """
        if labels is not None:
            return self._given(labels, tokens, lengths, Queries.posterior)
        lattice = self._possible(tokens, lengths)
        messages = run_messages(self.detach(), lattice)
        return gather(self, lattice, lattice.filtered.map(lambda f, m: (f + m).exp_(), messages))

    @query
    def viterbi(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, labels: ArrayLike | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the most likely states [B, T] (−1 beyond a length) and their joint log-probability with the tokens.

        `labels` are those of `log_likelihood`.
        """
        if labels is not None:
            return self._given(labels, tokens, lengths, Queries.viterbi)
        batch = sort_batch(self, tokens, lengths)
        path, log_prob = find_best_paths(self.detach(), batch)
        if bool((log_prob == NEG_INF).any()):
            self._possible(tokens, lengths)  # names the impossible token
        return batch.unsort(path), batch.unsort(log_prob).to(self.dtype)

    @query
    def sample(
        self, num_samples: int, length: int, generator: torch.Generator | None = None, seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens [num_samples, length] and their states [num_samples, length] from the model.

        The random numbers are those of `generator` or of `seed`.
        """
        check_count("num_samples", num_samples, 1)
        check_count("length", length, 1)
        check_count("num_samples × length", num_samples * length, 1, _SAMPLED)
        generator = make_generator(generator, seed, self.device)
        model = self.detach()
        path = [draw(model.log_start.expand(num_samples, -1), generator)]
        for _ in range(length - 1):
            path.append(draw(model.transition.log_rows(path[-1]), generator))
        states = torch.stack(path, 1)
        tokens = []
        for piece in states.flatten().split(at_once(self.vocab_size)):
            words, log_probs = model.emission.log_rows(piece)
            tokens.append(words.gather(1, draw(log_probs, generator)[:, None]))
        return torch.cat(tokens).view_as(states), states

    @query
    def posterior_sample(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike | None = None,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Draw whole paths given the tokens: states [num_samples, B, T], −1 beyond a length.

        Forward filtering, backward sampling: p(z_t | z_t+1, x) ∝ p(z_t | x_1..t) A(z_t, z_t+1).
        """
        check_count("num_samples", num_samples, 1, _SAMPLED)
        generator = make_generator(generator, seed, self.device)
        lattice, model = self._possible(tokens, lengths), self.detach()
        result = torch.full((num_samples, *lattice.batch.tokens.shape), -1, device=self.device)
        if isinstance(model.transition, Dense) and isinstance(model.emission, Categorical) and not result.is_cuda:
            draw_paths(lattice, model.transition.log_probs.t().contiguous(), result, generator)
            return lattice.batch.unsort(result, 1)
        states = torch.empty(num_samples, 0, dtype=torch.long, device=self.device)
        for t in reversed(range(len(lattice.supports))):
            support, rows = lattice.supports[t], states.shape[1]
            scores = lattice.filtered[t].expand(num_samples, -1, -1)
            if rows:
                into = model.transition.log_columns(states, some_rows(support, slice(rows)))
                scores = torch.cat([scores[:, :rows] + into, scores[:, rows:]], 1)
            states = state_ids(support, draw(scores, generator))
            result[:, : states.shape[1], t] = states
        return lattice.batch.unsort(result, 1)

    @query
    def next_token(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute log p(next token | tokens) [B, V]."""
        lattice, model = self._possible(tokens, lengths), self.detach()
        result = torch.empty(len(lattice.batch.tokens), self.vocab_size, dtype=self.dtype, device=self.device)
        for t, ending in endings(lattice.batch.active):
            source = some_rows(lattice.supports[t], ending)
            result[ending] = model._predict(lattice.filtered[t][ending], source)
        return lattice.batch.unsort(result)

    @torch.no_grad()
    def predictions(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, words: Tensor | None = None
    ) -> Iterator[Predictions]:
        """Yield p(x_t = v | x_1..t−1) of every position, in pieces in no particular order; v of `words` [W], or all."""
        model, batch = self.detach(), sort_batch(self, tokens, lengths)
        yield model._first_predictions(batch, words)
        for first, lattice in windows(model, batch, None):
            following = batch.active[first + 1 : first + 1 + len(lattice.filtered)]
            for row, t, log_filtered, support in lattice.take(lattice.filtered, range(len(following)), following):
                order = support.blocks.argsort() if isinstance(support, BlockSupport) else torch.arange(len(row))
                for piece in order.to(row.device).split(at_once(self.vocab_size, 2**18)):
                    log_probs = model._predict(log_filtered[piece], some_rows(support, piece))
                    sequence, step = row[piece], t[piece] + first + 1
                    observed = log_probs.gather(1, batch.tokens[sequence, step, None].clamp(min=0))[:, 0]
                    possible = log_filtered[piece].amax(1) > NEG_INF
                    probs = (log_probs if words is None else log_probs[:, words]).exp()
                    yield Predictions(batch.order[sequence], step, possible, observed, probs)

    def _first_predictions(self, batch: SortedBatch, words: Tensor | None) -> Predictions:
        """Return what `predictions` yields of the first tokens."""
        log_probs, order = self.emit(self.begin()), batch.order
        probs = (log_probs if words is None else log_probs[words]).exp().expand(len(order), -1)
        possible, observed = torch.ones_like(order, dtype=torch.bool), log_probs[batch.tokens[:, 0].clamp(min=0)]
        return Predictions(order, torch.zeros_like(order), possible, observed, probs)

    @query
    def entropy(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute the entropy of the posterior over paths [B], in nats.

        By the chain rule backward in time: H(z_T | x) + Σ_t H(z_t−1 | z_t, x_1..t−1).
        """
        lattice, model = self._possible(tokens, lengths), self.detach()
        messages = run_messages(self.detach(), lattice)
        total = torch.zeros(len(lattice.batch.tokens), dtype=torch.float64, device=self.device)
        for t, ending in endings(lattice.batch.active):
            last = lattice.filtered[t][ending].exp()
            total[ending] -= torch.xlogy(last, last).sum(1)
        posterior = lattice.filtered.map(lambda f, m: (f + m).exp_(), messages)
        for (row, _, x, source), (_, _, share, target) in lattice.pairs(lattice.filtered, posterior):
            for piece in torch.arange(len(row), device=self.device).split(at_once(self.num_states, _ENTROPIES)):
                own, other = some_rows(source, piece), some_rows(target, piece)
                conditional = model.transition.origin_entropy(x[piece], own, other)
                total.index_add_(0, row[piece], (conditional * share[piece]).sum(1).double())
        return lattice.batch.unsort(total).to(self.dtype)

    @query
    def infill(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute log p(x_t = v | all other observed tokens) [B, T, V] at every position; −inf beyond a length."""
        lattice = self._possible(tokens, lengths)
        shape = (*lattice.batch.tokens.shape, self.vocab_size)
        result = torch.full(shape, NEG_INF, dtype=self.dtype, device=self.device)
        ahead, batch = self._ahead(lattice), lattice.batch
        size = at_once(batch.active[0] * max(self.vocab_size, self.num_states), 2**22)
        for first in range(0, len(batch.active), size):
            steps = range(first, min(first + size, len(batch.active)))
            rows = slice(batch.starts[steps.start], batch.starts[steps.stop])
            result[batch.row[rows], batch.step[rows]] = self.emit(self._surroundings(lattice, ahead, steps))
        return batch.unsort(result)

    @query
    def infill_at(self, tokens: ArrayLike, position: int) -> Tensor:
        """Compute log p(x_t = v | all other tokens) [V] at one position t of one sequence [1, T].

        It is the row of `infill`, without the cost of the other positions.
        """
        lattice = self._possible(tokens, None)
        rows, steps = lattice.batch.tokens.shape
        if rows != 1:
            raise InputError(f"infill_at takes one sequence, not {rows}: call it once per sequence")
        check_count("position", position, 0, steps - 1)
        return self.emit(self._surroundings(lattice, self._ahead(lattice), [position]))[0]

    @query
    def infill_blanks(self, tokens: ArrayLike, excluded: int) -> Tensor:
        """Compute log p(blank = v | all observed tokens, no blank is `excluded`) [blanks, V] for one sequence [1, T].

        A blank is a −1 of the tokens. `infill` sums over every word at the other blanks; here the sum leaves out the
        excluded word.
        """
        given = check_tokens(tokens, self.vocab_size, self.device)
        check_count("excluded", excluded, 0, self.vocab_size - 1)
        if len(given) != 1:
            raise InputError(f"infill_blanks takes one sequence, not {len(given)}: call it once per sequence")
        words = torch.arange(self.vocab_size, device=self.device)
        log_missing = self.detach().emission.group_log_probs((words == excluded).long(), 2)[0]
        try:
            lattice = self._possible(given, None, log_missing)
        except InputError:
            raise InputError("the text has probability zero under the model, whatever its blanks are") from None
        blanks = (given[0] < 0).nonzero().flatten().tolist()
        if not blanks:
            return torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
        result = self.emit(self._surroundings(lattice, self._ahead(lattice), blanks))
        result[:, excluded] = NEG_INF
        return result.log_softmax(1)

    def _ahead(self, lattice: Lattice) -> Packed:
        """Return log p(x_t.. | z_t) [n, K] of each step, up to a constant."""
        return lattice.scores.map(torch.add, run_messages(self.detach(), lattice))

    def _surroundings(self, lattice: Lattice, ahead: Packed, steps: Sequence[int]) -> Tensor:
        """Compute log p(z_t | all tokens but x_t) [n, Z] for the rows of each of some steps, one step after another.

        It follows from the tokens before and after, never from x_t itself.
        """
        model, active = self.detach(), lattice.batch.active
        later, earlier = [t for t in steps if t], [t for t in steps if t + 1 < len(active)]
        past = lattice.take(lattice.filtered, [t - 1 for t in later], [active[t] for t in later])
        future = lattice.take(ahead, [t + 1 for t in earlier], [active[t + 1] for t in earlier])
        first = [model.log_start.expand(active[0], -1) for t in steps if not t]
        around = torch.cat([*first, *(model.transition.forward_step(LOG, own, source) for _, _, own, source in past)])
        begins = torch.zeros(len(active), dtype=torch.long, device=self.device)  # of the rows of each step
        begins[list(steps)] = torch.tensor([0, *accumulate(active[t] for t in steps)][:-1], device=self.device)
        for row, t, own, target in future:
            around[begins[t - 1] + row] += model.transition.backward_step(LOG, own, None, target)
        return around.log_softmax(1)

    @torch.no_grad()
    def _predict(self, log_probs: Tensor, source: Support = None) -> Tensor:
        """Compute log p(next token = v) [n, V] for distributions log_probs [n, K] over the present states."""
        model = self.detach()
        if isinstance(model.transition, BlockDiagonal):
            parts = zip(model.components, model.transition.split(log_probs, source), strict=True)
            found = [(logsumexp(own, 1)[:, None], part, own, inner) for part, (_, own, inner) in parts]
            return torch.stack(
                [part._predict(own - finite(mass), inner) + mass for mass, part, own, inner in found]
            ).logsumexp(0)
        if not model._predicts_by_block or not isinstance(source, BlockSupport) or source.wide:
            return model.emission.word_log_probs(model.transition.forward_step(LOG, log_probs, source))
        blocks, group = source.blocks.unique(return_inverse=True)
        result = torch.empty(len(log_probs), self.vocab_size, dtype=self.dtype, device=self.device)
        for i, block in enumerate(blocks.tolist()):
            rows = group == i
            result[rows] = model._word_products.product(log_probs[rows], block)
        return result

    @property
    def _predicts_by_block(self) -> bool:
        """Whether the states of a block share a matrix of their next words, which is kept for later calls."""
        return isinstance(self.transition, TiledTransition) and isinstance(self.emission, Blocked)

    @cached_property
    def _word_products(self) -> WordProducts:
        return WordProducts(self)

    @query
    def emit(self, log_states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Compute log Σ_z p(z) p(word | z) for log-distributions [..., Z]: [..., V], or [..., n] for `tokens` [n]."""
        check_log_state(log_states, self.num_states, self.device)
        if tokens is not None:
            check_words(tokens, self.vocab_size)
        return self.detach().emission.word_log_probs(log_states, tokens)

    # --- one token at a time: log-distributions over the state of the next token ---

    def begin(self) -> Tensor:
        """Return log p(z_1) [Z]."""
        return self.log_start.detach()

    @query
    def advance(self, log_state: Tensor, token: int | Tensor) -> Tensor:
        """Compute log p(z_t+1 | x_1..t) [..., Z] from log p(z_t | x_1..t−1) [..., Z] and x_t = token (−1: missing).

        All −inf if the token is impossible. For several sequences at once, log_state is [B, Z] and token [B].
        """
        model = self.detach()
        check_log_state(log_state, self.num_states, self.device)
        tokens = token[None] if isinstance(token, Tensor) else [[token]]
        words = check_tokens(tokens, self.vocab_size, self.device)[0]
        if log_state.numel() != len(words) * self.num_states:
            raise InputError(f"log_state of shape {list(log_state.shape)} is not a row for each of {len(words)} tokens")
        support, scores = model.emission.score(words, bool((words < 0).any()))
        filtered, _ = condition(LOG, restrict(log_state.view(len(words), -1), support), scores)
        return model.transition.forward_step(LOG, filtered, support).view_as(log_state)
