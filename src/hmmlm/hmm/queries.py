"""The queries of an HMM, written once for every kind, batched, in log space.

A kind implements the operations (`hmmlm.hmm.protocol`): for each position the states that can emit its token (its
support), products of distributions over supports with the transition matrix, and emission scores. The filter and the
messages are those of `hmmlm.hmm.recursions`; the recursions below are the standard ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.checks import (
    ArrayLike,
    check_batch,
    check_carry,
    check_count,
    check_generator,
    check_log_state,
    check_tokens,
)
from hmmlm.hmm.guided_cpu import CpuSteps
from hmmlm.hmm.guided_step import GuidedSteps
from hmmlm.hmm.lattice import Lattice, SortedBatch, add_first, continuing, endings, first_rows, some_rows
from hmmlm.hmm.protocol import Carry, Counts, Filtered, Predictions, Scan, Support
from hmmlm.hmm.recursions import Recursions
from hmmlm.ops.common import NEG_INF, finite, log_normalize, logsumexp, without_autocast

_CELLS = 2**24  # largest table of probabilities of sampled tokens
_SAMPLED = 10**8  # most tokens of a sample: a few gigabytes
_STEPS_PER_SHIFT = 16  # of Viterbi, between two subtractions of the largest score


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
    def answer(self: HiddenMarkovModel, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast(self.log_start_scores()):
            return function(self, *args, **kwargs)

    return differentiable_query(cast(Query, answer))


class HiddenMarkovModel(Recursions):
    """An HMM and its exact queries. Results are detached unless stated otherwise."""

    # --- representation ---

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        facts = {
            "states": f"{self.states:,}",
            "words": f"{self.vocab_size:,}",
            "parameters": f"{sum(value.numel() for value in self.tensors().values() if value.is_floating_point()):,}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }
        rows = "".join(f"<tr><th>{name}</th><td>{fact}</td></tr>" for name, fact in facts.items())
        return f"<b>{type(self).__name__}</b><table>{rows}</table>"

    def to_hmmlearn(self) -> Any:
        """Return the model as a `CategoricalHMM` of hmmlearn, in float64, with rows that sum to one exactly."""
        try:
            from hmmlearn.hmm import CategoricalHMM
        except ImportError:
            raise InputError("hmmlearn is not installed: pip install hmmlearn") from None
        start, transition, emission = (p.double().softmax(-1).cpu().numpy() for p in self.dense().detach().parameters)
        model = CategoricalHMM(n_components=self.states, n_features=self.vocab_size)
        model.startprob_, model.transmat_, model.emissionprob_ = start, transition, emission
        return model

    def to_dynamax(self) -> tuple[Any, Any, Any]:
        """Return the model as a `CategoricalHMM` of dynamax with one emission: model, parameters and their properties.

        Its methods take tokens as emissions [T, 1]. The dtype is that of JAX: float32 unless JAX has 64 bits enabled.
        """
        try:
            import jax.numpy as jnp
            from dynamax.hidden_markov_model import CategoricalHMM
        except ImportError:
            raise InputError("dynamax is not installed: pip install dynamax") from None
        start, transition, emission = (p.double().softmax(-1).cpu().numpy() for p in self.dense().detach().parameters)
        model = CategoricalHMM(self.states, emission_dim=1, num_classes=self.vocab_size)
        given = {"initial_probs": start, "transition_matrix": transition, "emission_probs": emission[:, None]}
        return model, *model.initialize(**{name: jnp.asarray(probs) for name, probs in given.items()})

    # --- queries ---

    @differentiable_query
    def log_likelihood(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute log p(x) [B], natural log; −inf for an impossible sequence. Differentiable in the parameters.

        Under autocast, the products of a dense model have operands in its dtype; all other queries ignore it.
        """
        return self._log_likelihood(*check_batch(tokens, lengths, self.vocab_size, self.device), None)

    @differentiable_query
    def filter(self, tokens: ArrayLike, lengths: ArrayLike | None = None, carry: Carry | None = None) -> Filtered:
        """Compute p(z_t | x_1..t); zero from the first impossible token on. The log-likelihood is differentiable.

        Args:
            carry: of the previous window, if these tokens continue others.
        """
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        check_carry(carry, checked, self.states)
        with torch.no_grad(), without_autocast(checked):
            batch = self._batch(checked, sizes)
            lattice = self.detach()._forward(batch, self._log_initial(carry, batch))
            probs = self._gather(lattice, [value.exp() for value in lattice.log_filtered])
            log_likelihood = batch.unsort(lattice.log_likelihood()).to(self.dtype)
            last = [
                self.spread(lattice.log_filtered[t][ending], some_rows(lattice.supports[t], ending), NEG_INF)
                for t, ending in endings(batch)
            ]
            carry_out = Carry(log_normalize(batch.unsort(torch.cat(last[::-1])).double()))
        if torch.is_grad_enabled() and self.requires_grad:
            log_likelihood = self._log_likelihood(checked, sizes, carry)
        return Filtered(log_likelihood, carry_out, probs)

    def _log_initial(self, carry: Carry | None, batch: SortedBatch) -> Tensor | None:
        """Return log p(z | x) [B, Z] of a carry, rows as in the batch."""
        return None if carry is None else carry.over_all(self.states)[batch.order].to(self.dtype)

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
        check_carry(carry, checked, self.states)
        model, batch = self.detach(), self._batch(checked, sizes)
        result = torch.zeros(checked.shape, dtype=self.dtype, device=self.device)
        for first, lattice in model._windows(batch, self._log_initial(carry, batch)):
            for t, scale in enumerate(lattice.log_scales, first):
                result[batch.order[: len(scale)], t] = scale
        return result

    @query
    def expected_counts(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Counts:
        """Compute expected counts of starts [Z], transitions [Z, Z] and emissions [Z, V], summed over the batch.

        They are the gradient of the log-likelihood with respect to the log-probabilities. Those of transitions and
        emissions are sparse tensors if the model is blocked. An impossible sequence adds nothing to the counts; the
        log-likelihood is then −inf.
        """
        return self._expected_counts(*check_batch(tokens, lengths, self.vocab_size, self.device), None)

    @query
    def posterior(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute p(z_t | x_1..T) [B, T, Z]; zero beyond a sequence's length."""
        lattice = self._possible(tokens, lengths)
        messages = self._messages(lattice)
        return self._gather(lattice, [(f + m).exp() for f, m in zip(lattice.log_filtered, messages, strict=True)])

    @query
    def viterbi(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> tuple[Tensor, Tensor]:
        """Find the most likely states [B, T] (−1 beyond a length) and their joint log-probability with the tokens."""
        batch = self._batch(tokens, lengths)
        path, log_prob = self.detach()._best_paths(batch)
        if bool((log_prob == NEG_INF).any()):
            self._possible(tokens, lengths)  # names the impossible token
        return batch.unsort(path), batch.unsort(log_prob).to(self.dtype)

    def _best_paths(self, batch: SortedBatch) -> tuple[Tensor, Tensor]:
        """Return the result of `viterbi` in the order of the batch, log-probabilities [B] in float64."""
        supports, kept = list[Support](), list[Tensor]()
        log_prob = torch.zeros(len(batch.tokens), dtype=torch.float64, device=self.device)
        for t, (support, scores) in enumerate(self._observations(batch)):
            rows = len(scores)
            if t:
                best = self.pull_max(kept[-1][:rows], first_rows(supports[-1], rows), support) + scores
            else:
                best = self.restrict(self.log_start_scores().expand(rows, -1), support) + scores
            if t % _STEPS_PER_SHIFT == 0:  # float32 then suffices for any length
                peak = finite(best.amax(1))
                log_prob[:rows] += peak
                best = best - peak[:, None]
            supports.append(support)
            kept.append(best)
        for t, ending in endings(batch):
            log_prob[ending] += kept[t][ending].amax(1)
        path, states = torch.full_like(batch.tokens, -1), torch.empty(0, dtype=torch.long, device=self.device)
        for t in reversed(range(len(kept))):
            best, support, rows = kept[t], supports[t], len(states)
            if rows:
                best = add_first(best, self.transitions_into(first_rows(support, rows), states))
            states = self.state_ids(support, best.argmax(1))
            path[: len(states), t] = states
        return path, log_prob

    @query
    def sample(self, num: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw tokens [num, length] and their states [num, length] from the model."""
        check_count("num", num, 1)
        check_count("length", length, 1)
        check_count("num × length", num * length, 1, _SAMPLED)
        check_generator(generator)
        model = self.detach()
        path = [draw(model.log_start_scores().expand(num, -1), generator)]
        for _ in range(length - 1):
            path.append(draw(model.transitions_from(path[-1]), generator))
        states = torch.stack(path, 1)
        tokens = []
        for piece in states.flatten().split(max(1, _CELLS // self.vocab_size)):
            words, log_probs = model.emissions_from(piece)
            tokens.append(words.gather(1, draw(log_probs, generator)[:, None]))
        return torch.cat(tokens).view_as(states), states

    @query
    def posterior_sample(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike | None = None,
        num: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw whole paths given the tokens: states [num, B, T], −1 beyond a length.

        Forward filtering, backward sampling: p(z_t | z_t+1, x) ∝ p(z_t | x_1..t) A(z_t, z_t+1).
        """
        check_count("num", num, 1, _SAMPLED)
        check_generator(generator)
        lattice, model = self._possible(tokens, lengths), self.detach()
        batch = lattice.batch
        paths = torch.full((num, *batch.tokens.shape), -1, device=self.device)
        for t in reversed(range(len(lattice.supports))):
            scores, support = lattice.log_filtered[t].expand(num, -1, -1), lattice.supports[t]
            rows = len(lattice.supports) > t + 1 and len(lattice.log_filtered[t + 1])
            if rows:
                into = model.transitions_into(first_rows(support, rows), paths[:, :rows, t + 1])
                scores = torch.cat([scores[:, :rows] + into, scores[:, rows:]], 1)
            paths[:, : scores.shape[1], t] = model.state_ids(support, draw(scores, generator))
        return batch.unsort(paths, 1)

    @query
    def next_token(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute log p(next token | tokens) [B, V]."""
        lattice, model = self._possible(tokens, lengths), self.detach()
        result = torch.empty(len(lattice.batch.tokens), self.vocab_size, dtype=self.dtype, device=self.device)
        for t, ending in endings(lattice.batch):
            source = some_rows(lattice.supports[t], ending)
            result[ending] = model.predict(lattice.log_filtered[t][ending], source)
        return lattice.batch.unsort(result)

    @torch.no_grad()
    def predictions(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, words: Tensor | None = None
    ) -> Iterator[Predictions]:
        """Yield p(x_t = v | x_1..t−1) of every position, in pieces in no particular order; v of `words` [W], or all."""
        model, batch = self.detach(), self._batch(tokens, lengths)
        yield model._first_predictions(batch, words)
        for first, lattice in model._windows(batch, None):
            for t, rows, log_filtered, support in continuing(lattice, batch.active[first:]):
                log_probs = model.predict(log_filtered, support)
                observed = log_probs.gather(1, batch.tokens[:rows, first + t, None].clamp(min=0))[:, 0]
                step, possible = torch.full_like(batch.order[:rows], first + t), log_filtered.amax(1) > NEG_INF
                probs = (log_probs if words is None else log_probs[:, words]).exp()
                yield Predictions(batch.order[:rows], step, possible, observed, probs)

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
        messages = self._messages(lattice)
        total = torch.zeros(len(lattice.batch.tokens), dtype=torch.float64, device=self.device)
        for t, ending in endings(lattice.batch):
            last = lattice.log_filtered[t][ending].exp()
            total[ending] -= torch.xlogy(last, last).sum(1)
        for t in range(1, len(messages)):
            rows = len(messages[t])
            source = first_rows(lattice.supports[t - 1], rows)
            conditional = model.origin_entropy(lattice.log_filtered[t - 1][:rows], source, lattice.supports[t])
            total[:rows] += (conditional * (lattice.log_filtered[t] + messages[t]).exp()).sum(1)
        return lattice.batch.unsort(total).to(self.dtype)

    @query
    def infill(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Compute log p(x_t = v | all other observed tokens) [B, T, V] at every position; −inf beyond a length."""
        lattice = self._possible(tokens, lengths)
        shape = (*lattice.batch.tokens.shape, self.vocab_size)
        result = torch.full(shape, NEG_INF, dtype=self.dtype, device=self.device)
        messages = self._messages(lattice)
        for t, rows in enumerate(lattice.batch.active):
            result[:rows, t] = self.emit(self._surroundings(lattice, messages, t))
        return lattice.batch.unsort(result)

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
        return self.emit(self._surroundings(lattice, self._messages(lattice), position))[0]

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
        log_missing = self.detach().group_emission((words == excluded).long(), 2)[0]
        try:
            lattice = self._possible(given, None, log_missing)
        except InputError:
            raise InputError("the text has probability zero under the model, whatever its blanks are") from None
        messages = self._messages(lattice)
        blanks = (given[0] < 0).nonzero().flatten().tolist()
        result = torch.full((len(blanks), self.vocab_size), NEG_INF, dtype=self.dtype, device=self.device)
        for row, t in enumerate(blanks):
            result[row] = self.emit(self._surroundings(lattice, messages, t))[0]
        result[:, excluded] = NEG_INF
        return result.log_softmax(1)

    def _surroundings(self, lattice: Lattice, messages: list[Tensor], t: int) -> Tensor:
        """Compute log p(z_t | all tokens but x_t) [n, Z]: from the tokens before and after, never from x_t itself."""
        model, rows = self.detach(), len(lattice.scores[t])
        around = model.log_start_scores().expand(rows, -1)
        if t:
            source = first_rows(lattice.supports[t - 1], rows)
            around = model.pull(lattice.log_filtered[t - 1][:rows], source, None)
        if t + 1 < len(messages):
            ahead = model.push(lattice.scores[t + 1] + messages[t + 1], None, lattice.supports[t + 1])
            around = add_first(around, ahead)
        return around.log_softmax(1)

    def joint_scan(
        self,
        tokens: Tensor,
        states: Tensor,
        lengths: Tensor | None = None,
        carry: Carry | None = None,
        restart: Tensor | None = None,
    ) -> Scan:
        """Compute log P(O, S) = log π(s_1) + Σ log A(s_t−1, s_t) + Σ log O(s_t, o_t) [B] for tokens and states [B, T].

        Differentiable; nothing is checked. Positions with state −1 (beyond a length) add nothing. A carry continues
        from its most likely state; the returned carry has probability one at the last states.
        """
        known, to = states >= 0, states.clamp(min=0)
        first = torch.zeros_like(known) if restart is None else restart.clone()
        first[:, 0] |= carry is None
        origin = torch.cat([to[:, :1] if carry is None else carry.most_likely()[:, None], to[:, :-1]], 1)
        scores = self.joint_scores(origin.flatten(), to.flatten(), tokens.clamp(min=0).flatten())
        started, moved, emitted = (score.view_as(states) for score in scores)
        entered = torch.where(first, started, moved)
        log_likelihood = (entered + emitted.masked_fill(tokens < 0, 0.0)).masked_fill(~known, 0.0).sum(1)
        last = torch.full_like(to[:, :1], to.shape[1] - 1) if lengths is None else lengths[:, None] - 1
        return Scan(log_likelihood, self.carry_at(to.gather(1, last)[:, 0]))

    def predict(self, log_probs: Tensor, source: Support) -> Tensor:
        """Compute log p(next token = v) [n, V] for distributions log_probs [n, K] over the present states."""
        return self.emit(self.pull(log_probs, source, None))

    # --- one token at a time: log-distributions over the state of the next token ---

    def begin(self) -> Tensor:
        """Return log p(z_1) [Z]."""
        return self.log_start_scores().detach()

    def guided_steps(self) -> GuidedSteps | CpuSteps | None:
        """Return the fast steps of a token under constraints; None if there are none for this model."""
        return None

    @query
    def advance(self, log_state: Tensor, token: int | Tensor) -> Tensor:
        """Compute log p(z_t+1 | x_1..t) [..., Z] from log p(z_t | x_1..t−1) [..., Z] and x_t = token (−1: missing).

        All −inf if the token is impossible. For several sequences at once, log_state is [B, Z] and token [B].
        """
        model = self.detach()
        check_log_state(log_state, self.states, self.device)
        tokens = token[None] if isinstance(token, Tensor) else [[token]]
        words = check_tokens(tokens, self.vocab_size, self.device)[0]
        if log_state.numel() != len(words) * self.states:
            raise InputError(f"log_state of shape {list(log_state.shape)} is not a row for each of {len(words)} tokens")
        support, scores = model.observe(words, bool((words < 0).any()))
        joint = model.restrict(log_state.view(len(words), -1), support) + scores
        return model.pull(joint - finite(logsumexp(joint, 1))[:, None], support, None).view_as(log_state)


def draw(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one index per row of log_probs [..., n], by the exponential race: argmin of Exp(1) / p."""
    noise = torch.empty_like(log_probs).exponential_(generator=generator).clamp_min_(torch.finfo(log_probs.dtype).tiny)
    return (log_probs - noise.log()).argmax(-1)
