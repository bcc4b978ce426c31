"""Exact sampling of continuations: unconstrained, or given that an automaton accepts them.

Without temperature, top-k or an excluded token, a continuation is drawn as the model defines it: a state, its token,
the next state. This is a sample of the predictive distributions too, at the cost of one row of the transition matrix
and one of the emission matrix per token.

With an excluded token, or, for many states, a temperature from 0.5 to 1, tokens are proposed in this way, each from a
new state of the filter, and accepted with probability p(token)^(1/temperature − 1) (not if excluded). Accepted tokens
are exact samples: their probability is proportional to p(token)^(1/temperature). The probability of one token takes a
sum over the states that can emit it. Otherwise each token is drawn from its predictive distribution, which takes sums
over all states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hmmlm.checks import check_count, check_number, check_seed
from hmmlm.constrain.guide import Guide, Position, none_accepted
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.hmm.reader import Reader, read_context
from hmmlm.ops.common import NEG_INF
from hmmlm.ops.pieces import at_once

_SAMPLES = 1_000_000  # most samples of a call: each has a random generator of its own
ONLY_UNKNOWN = "only <unk> can follow here: allow unknown words"
_STEPS = 32  # draws for which random numbers are made at once
_NUMBERS = 4  # random numbers of a draw: the state before, the state, its token, whether it is accepted
_PROPOSED = 0.5  # lowest temperature at which tokens are proposed: below, nearly all would be rejected
_PROPOSED_STATES = 4096  # fewest states at which they are: with fewer, the predictive distribution is cheaper
_PROPOSALS = 128  # of a token at most
_CHUNK = 256  # probabilities of a row that are first summed
_SHORT = 4096  # probabilities of a row that is not divided into chunks


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling: number of tokens, temperature, top-k, top-p, seed of the first sample, number of samples."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    num_samples: int = 1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 0)
        check_count("num_samples", self.num_samples, 1, _SAMPLES)
        check_number("temperature", self.temperature)
        if self.top_k is not None:
            check_count("top_k", self.top_k, 1)
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        check_seed(self.seed, self.num_samples)

    def plain(self, vocab_size: int) -> bool:
        """Return whether samples are those of the model itself."""
        return self.temperature == 1 and self.whole(vocab_size)

    def whole(self, vocab_size: int) -> bool:
        """Return whether tokens are drawn from the whole vocabulary."""
        return self.top_p == 1 and (self.top_k is None or self.top_k >= vocab_size)

    def choose(self, log_probs: Tensor, uniform: Tensor) -> Tensor:
        """Draw a token from each row of log_probs [n, V], by uniform numbers [n]."""
        if self.temperature == 0:
            return log_probs.argmax(1)
        log_probs = log_probs.double()
        log_probs = log_probs - log_probs.amax(1, keepdim=True)  # at a very low temperature all would be −inf
        if self.top_k is not None and self.top_k < log_probs.shape[1]:
            best = log_probs.topk(self.top_k)
            log_probs = torch.full_like(log_probs, NEG_INF).scatter(1, best.indices, best.values)
        log_probs = log_probs / self.temperature
        if self.top_p < 1:  # the most likely tokens whose probabilities add up to top_p
            probs, order = log_probs.softmax(1).sort(1, descending=True)
            beyond = probs.cumsum(1) - probs >= self.top_p
            log_probs = log_probs.masked_fill(beyond.gather(1, order.argsort(1)), NEG_INF)
        return invert(log_probs, uniform)


def invert(log_weights: Tensor, uniform: Tensor) -> Tensor:
    """Return, for each row of log_weights [n, m], the index at which its cumulative sum exceeds `uniform` [n] of it.

    In long rows, a chunk is found by the sums of chunks, then the index within it.
    """
    # The largest weight is 1: at a low temperature the others may underflow, but never all.
    weights = (log_weights - log_weights.amax(1, keepdim=True)).exp_()
    if weights.shape[1] <= _SHORT:
        sums = weights.cumsum(1, dtype=torch.float64)
        return _find(sums, uniform * sums[:, -1])
    chunks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _CHUNK)).unflatten(1, (-1, _CHUNK))
    sums = chunks.sum(2).cumsum(1, dtype=torch.float64)
    target = uniform * sums[:, -1]
    chunk = _find(sums, target)
    rows = torch.arange(len(chunks), device=chunks.device)
    before = torch.nn.functional.pad(sums, (1, 0))[rows, chunk]
    return chunk * _CHUNK + _find(chunks[rows, chunk].cumsum(1, dtype=torch.float64), target - before)


def _find(sums: Tensor, target: Tensor) -> Tensor:
    """Return the first index at which cumulative sums [n, m] exceed targets [n]."""
    total = sums[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # rounding may have reached it
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0]


@torch.no_grad()
def sample_continuations(
    hmm: HMM,
    context: Sequence[int],
    end: int,
    options: SamplingOptions,
    excluded: int | None,
    chunk: int | None = None,
    proposals: int | None = None,
) -> Iterator[Rows]:
    """Sample tokens after `context` until `end`, which is not returned; each given that it is not `excluded`.

    Yield samples before the first token and after each; see `collect`.

    Args:
        chunk: the chain restarts after every `chunk` tokens, those of the context counted.
        proposals: most proposals of a token, after which it is drawn from its predictive distribution; by default many
            at temperature 1, and otherwise none for models of few states, for which that distribution is cheaper.
    """
    model = hmm.detach()
    before = read_context(model, context)
    size = at_once(max(hmm.num_states, hmm.vocab_size), 2**22)
    for first in range(0, options.num_samples, size):
        rows = Rows(options, range(first, min(first + size, options.num_samples)), end, hmm.device)
        sampler = _Sampler(model, rows, excluded, proposals)
        yield rows
        for _ in sampler.run(before, len(context), chunk):
            yield rows


def collect(steps: Iterator[Rows]) -> list[list[int]]:
    """Return the tokens of all samples."""
    found = {rows.samples.start: rows.tokens for rows in steps}
    return [tokens for part in found.values() for tokens in part]


class _Sampler:
    """Draws a token for each row at every step, in one of three ways."""

    def __init__(self, hmm: HMM, rows: Rows, excluded: int | None, proposals: int | None) -> None:
        options = rows.options
        self.hmm, self.rows, self.options, self.excluded = hmm, rows, options, excluded
        self.ancestral = options.plain(hmm.vocab_size) and excluded is None
        lowest = _PROPOSED if proposals or hmm.num_states >= _PROPOSED_STATES else 1.0
        self.proposals = proposals or _PROPOSALS
        self.proposing = options.whole(hmm.vocab_size) and lowest <= options.temperature <= 1

    def run(self, before: Reader | None, read: int, chunk: int | None) -> Iterator[None]:
        """Sample until all rows have ended, after the sequence `before` of `read` tokens; yield after every token."""
        reader = None if before is None else before.rows(torch.zeros_like(self.rows.index))
        states: Tensor | None = None  # of the ancestral rows, once they have drawn any
        for step in range(self.options.max_new_tokens):
            if not len(self.rows.index):
                return
            if chunk is not None and (read + step) % chunk == 0:
                reader = states = None
            if self.ancestral:
                tokens, states = self.draw_state(reader, states)
            elif reader is None:
                tokens, reader = self.draw_first()
            else:
                tokens, reader = self.propose(reader) if self.proposing else self.draw(reader)
            going = self.rows.add(tokens)
            reader = reader if reader is None or states is not None else reader.rows(going)
            states = None if states is None else states[going]
            yield

    def draw_state(self, reader: Reader | None, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw the next state of each row and its token, from the state before, the filter or the start."""
        uniform = self.rows.draw()
        if states is None and reader is not None:
            states = reader.states(invert(reader.log_filtered, uniform[:, 0]))
        if states is None:
            log_states = self.hmm.log_start.expand(len(uniform), -1)
        else:
            log_states = self.hmm.transition.log_rows(states)
        states = invert(log_states, uniform[:, 1])
        return self.draw_token(states, uniform[:, 2]), states

    def draw_token(self, states: Tensor, uniform: Tensor) -> Tensor:
        words, log_probs = self.hmm.emission.log_rows(states)
        return words.gather(1, invert(log_probs, uniform)[:, None])[:, 0]

    def draw_first(self) -> tuple[Tensor, Reader]:
        """Draw first tokens: all rows have the same distribution."""
        tokens = self.choose(self.hmm.emit(self.hmm.begin()).expand(len(self.rows.index), -1), self.rows.draw())
        return tokens, Reader.start(self.hmm, tokens)[1]

    def draw(self, reader: Reader) -> tuple[Tensor, Reader]:
        """Draw the next tokens from their predictive distributions."""
        tokens = self.choose(reader.next_tokens(), self.rows.draw())
        return tokens, reader.read(tokens)[1]

    def choose(self, log_probs: Tensor, uniform: Tensor) -> Tensor:
        if self.excluded is not None:
            log_probs = log_probs.index_fill(1, torch.tensor([self.excluded], device=log_probs.device), NEG_INF)
            if bool((log_probs.amax(1) == NEG_INF).any()):
                raise InputError(ONLY_UNKNOWN)
        return self.options.choose(log_probs, uniform[:, 2])

    def propose(self, reader: Reader) -> tuple[Tensor, Reader]:
        """Draw the next tokens by proposals, and from their predictive distributions after too many of them."""
        tokens, log_filtered = torch.empty_like(reader.tokens), torch.empty_like(reader.log_filtered)
        waiting = torch.arange(len(tokens), device=tokens.device)  # rows without a token
        for _ in range(self.proposals):
            if not len(waiting):
                break
            accepted, proposed, after = self.propose_once(reader.rows(waiting), self.rows.draw(waiting))
            tokens[waiting[accepted]] = proposed
            log_filtered[waiting[accepted]] = after
            waiting = waiting[~accepted]
        if len(waiting):
            rest = reader.rows(waiting)
            tokens[waiting] = self.choose(rest.next_tokens(), self.rows.draw(waiting))
            log_filtered[waiting] = rest.read(tokens[waiting])[1].log_filtered
        return tokens, Reader(self.hmm, tokens, log_filtered)

    def propose_once(self, reader: Reader, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Propose a token for each row; return which are accepted [n], their tokens [m] and filters [m, K]."""
        # A new state of the filter: proposals from one state would be accepted more often than from another.
        states = reader.states(invert(reader.log_filtered, uniform[:, 0]))
        tokens = self.draw_token(invert(self.hmm.transition.log_rows(states), uniform[:, 1]), uniform[:, 2])
        power, log_uniform = 1 / self.options.temperature - 1, uniform[:, 3].log()
        # p(token) is at most its largest probability in any state: most rejections follow from that.
        largest = self.hmm.emission.score(tokens, False)[1].amax(1)
        accepted = log_uniform <= power * largest
        if self.excluded is not None:
            accepted &= tokens != self.excluded
        candidates = accepted.nonzero().flatten()
        if not len(candidates):
            return accepted, tokens[:0], reader.log_filtered[:0]
        log_prob, after = reader.rows(candidates).read(tokens[candidates])
        likely = log_uniform[candidates] <= power * log_prob
        accepted[candidates] = likely
        return accepted, tokens[accepted], after.log_filtered[likely]


class Rows:
    """Some of the samples, and which of them have not ended; sample i has the random numbers of seed + i.

    They are drawn on the CPU, so that a seed gives the same text on every device, alone or with other samples.
    """

    def __init__(self, options: SamplingOptions, samples: range, end: int, device: torch.device) -> None:
        self.options, self.samples, self._end, self._generators = options, samples, end, list[torch.Generator]()
        for i in samples:
            generator = torch.Generator()
            generator.seed() if options.seed is None else generator.manual_seed(int(options.seed) + i)
            self._generators.append(generator)
        self.tokens: list[list[int]] = [[] for _ in samples]
        self.index = torch.arange(len(samples), device=device)
        self._numbers = torch.zeros(len(samples), _STEPS, _NUMBERS, dtype=torch.float64)
        self._used = torch.full((len(samples),), _STEPS)  # of the numbers of each sample

    def draw(self, rows: Tensor | None = None) -> Tensor:
        """Return random numbers [n, 4] in [0, 1) for the samples that have not ended, or some rows of them."""
        samples = (self.index if rows is None else self.index[rows]).cpu()
        for sample in samples[self._used[samples] == _STEPS].tolist():
            generator = self._generators[sample]
            self._numbers[sample] = torch.rand(_STEPS, _NUMBERS, dtype=torch.float64, generator=generator)
            self._used[sample] = 0
        numbers = self._numbers[samples, self._used[samples]]
        self._used[samples] += 1
        return numbers.to(self.index.device)

    def add(self, tokens: Tensor) -> Tensor:
        """Add the next token of each sample that has not ended; return which of them continue, as a mask."""
        for row, token in zip(self.index.tolist(), tokens.tolist(), strict=True):
            if token != self._end:
                self.tokens[row].append(token)
        going = tokens != self._end
        self.index = self.index[going]
        return going


def sample_predicted(
    predict: Callable[[Sequence[Any]], Tensor],
    advance: Callable[[Any, int], Any],
    context: Any,
    end: int,
    options: SamplingOptions,
    excluded: int | None,
) -> Iterator[Rows]:
    """Sample tokens as `sample_continuations` does, by any model.

    Args:
        predict: returns log p(next token) [n, V] after n contexts.
        advance: returns the context after one more token.
    """
    rows, contexts = (
        Rows(options, range(options.num_samples), end, torch.device("cpu")),
        [context] * options.num_samples,
    )
    yield rows
    for added in range(1, options.max_new_tokens + 1):
        if not len(rows.index):
            break
        log_probs = predict(contexts)
        if not bool((log_probs.amax(1) > NEG_INF).all()):  # or NaN, of an impossible text
            raise InputError("the text so far has probability zero under the model, so nothing can follow it")
        if excluded is not None:
            log_probs[:, excluded] = NEG_INF
            if bool((log_probs.amax(1) == NEG_INF).any()):
                raise InputError(ONLY_UNKNOWN)
        tokens = options.choose(log_probs, rows.draw()[:, 2])
        going = rows.add(tokens).tolist()
        yield rows
        if added == options.max_new_tokens:
            break
        pairs = zip(contexts, tokens.tolist(), going, strict=True)
        contexts = [advance(before, token) for before, token, on in pairs if on]


def sample_accepted(guide: Guide, position: Position, end: int, options: SamplingOptions) -> Iterator[Rows]:
    """Sample tokens as `sample_continuations` does, given that the guide's automaton accepts them."""
    rows = Rows(options, range(options.num_samples), end, guide.hmm.device)
    yield rows
    if options.plain(guide.hmm.vocab_size) and guide.reads:
        for _ in _sample_states(guide, position, rows):
            yield rows
        return
    positions = [position] * options.num_samples
    for _ in range(options.max_new_tokens):
        if not positions:
            break
        tokens = options.choose(guide.next_tokens(positions), rows.draw()[:, 2])
        going = rows.add(tokens).tolist()
        pairs = zip(positions, tokens.tolist(), going, strict=True)
        before, chosen = zip(*((at, token) for at, token, on in pairs if on), strict=True) if any(going) else ((), ())
        yield rows
        positions = guide.advance_all(before, chosen) if before else []


def _sample_states(guide: Guide, position: Position, rows: Rows) -> Iterator[None]:
    """Draw states of accepted samples, and a token of each: no sum over states for every word.

    After a state, the tokens before it do not matter any more.
    """
    hmm, automaton, at = guide.hmm, guide.automaton, [position.automaton] * len(rows.index)
    log_states = position.log_state.expand(len(at), -1)
    for remaining in range(position.remaining, position.remaining - rows.options.max_new_tokens, -1):
        log_states = log_states + guide.reading(at, remaining)
        if bool((log_states.amax(1) == NEG_INF).any()):
            raise none_accepted(remaining)
        uniform = rows.draw()
        states = invert(log_states, uniform[:, 1])
        words, log_probs = hmm.emission.log_rows(states)
        index = invert(log_probs + guide.accepted_words(at, remaining, words, states), uniform[:, 2])
        tokens = words.gather(1, index[:, None])[:, 0]
        going = rows.add(tokens)
        yield
        if not len(rows.index):
            break
        kept = zip(at, tokens.tolist(), going.tolist(), strict=True)
        at = [automaton.step(state, token) for state, token, on in kept if on]
        log_states = hmm.transition.log_rows(states[going])
