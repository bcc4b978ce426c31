"""The states of a model of any size: their long-run share, words and neighbours, without a Z × Z or Z × V matrix."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.lm.embeddings import long_run
from hmmlm.lm.generation import invert
from hmmlm.lm.lm import LanguageModel
from hmmlm.numerics.support import spread
from hmmlm.report.explain import telling_words

EXACT_STATES = 2_048  # up to this number the long-run share is solved for; above, it is estimated
CHAINS, STEPS, BURN_IN = 32, 48, 8  # of that estimate
WORDS = 6  # telling words of a state that are kept


class StateIndex:
    """The long-run share of every state, and lookups by state and by word."""

    @torch.no_grad()
    def __init__(self, lm: LanguageModel, exact_states: int = EXACT_STATES) -> None:
        self.lm, self.hmm = lm, lm.hmm.detach()
        self.exact = self.hmm.num_states <= exact_states
        self._log_ends = self._log_end_probs()
        if self.exact:
            share = long_run(self.hmm, lm.tokenizer.eos_id if lm.restarts else None).mass
        else:
            share = self._sampled_share()
        self.share = share.to(self.hmm.device, self.hmm.dtype)  # [Z]
        self.order = self.share.argsort(descending=True)  # [Z]
        self._log_word = self.hmm.emit(self.share.log())  # [V]
        self._words: dict[int, list[str]] = {}

    def _log_end_probs(self) -> Tensor | None:
        """Return log p(<eos> | z) [Z] if the chain restarts after <eos>."""
        if not self.lm.restarts:
            return None
        words = torch.arange(self.hmm.vocab_size, device=self.hmm.device)
        return self.hmm.emission.group_log_probs((words == self.lm.tokenizer.eos_id).long(), 2)[1]

    def _sampled_share(self) -> Tensor:
        """Estimate the stationary distribution [Z]: the mean of the next-state distributions along sampled chains."""
        uniform = torch.rand(STEPS + 1, CHAINS, generator=torch.Generator().manual_seed(0)).to(self.hmm.device)
        states = invert(self.hmm.log_start.expand(CHAINS, -1), uniform[STEPS])
        total = torch.zeros(self.hmm.num_states, dtype=torch.float64, device=self.hmm.device)
        for step in range(STEPS):
            log_next = self.transitions(states)
            if step >= BURN_IN:
                total += log_next.exp().sum(0)
            states = invert(log_next, uniform[step])
        return total / total.sum()

    def transitions(self, states: Tensor) -> Tensor:
        """Return log p(next state | state) [n, Z] of states [n]; restarts after <eos> are included."""
        log_next = self.hmm.transition.log_rows(states)
        if self._log_ends is None:
            return log_next
        log_ends = self._log_ends[states, None]
        log_goes_on = torch.log1p(-log_ends.exp().clamp(max=1))
        return torch.logaddexp(log_ends + self.hmm.log_start, log_goes_on + log_next)

    def check(self, state: int) -> int:
        """Return a state; raise an InputError if the model does not have it."""
        if state not in range(self.hmm.num_states):
            raise InputError(f"there is no state {state}: the model has states 0 to {self.hmm.num_states - 1}")
        return state

    @torch.no_grad()
    def words(self, states: Iterable[int]) -> dict[int, list[str]]:
        """Return the most telling words of each state."""
        wanted = list(dict.fromkeys(states))
        new = [state for state in wanted if state not in self._words]
        if new:
            found = telling_words(self.hmm, torch.tensor(new, device=self.hmm.device), self._log_word, WORDS)
            for state, tokens in zip(new, found.tolist(), strict=True):
                self._words[state] = [self.lm.tokenizer.token(token) for token in tokens if token >= 0]
        return {state: self._words[state] for state in wanted}

    @torch.no_grad()
    def emissions(self, state: int, count: int) -> list[tuple[int, float, float]]:
        """Return the most telling words of a state: (token, p(word | state), p(word | state) / p(word))."""
        at = torch.tensor([state], device=self.hmm.device)
        tokens = [token for token in telling_words(self.hmm, at, self._log_word, count)[0].tolist() if token >= 0]
        words, log_probs = self.hmm.emission.log_rows(at)
        by_word = dict(zip(words[0].tolist(), log_probs[0].tolist(), strict=True))
        chosen = torch.tensor([by_word[token] for token in tokens], dtype=torch.float64)
        lift = chosen - self._log_word[tokens].double().cpu()
        return list(zip(tokens, chosen.exp().tolist(), lift.exp().tolist(), strict=True))

    @torch.no_grad()
    def successors(self, state: int, count: int) -> list[tuple[int, float]]:
        """Return the most likely next states and their probabilities."""
        return _top(self.transitions(torch.tensor([state], device=self.hmm.device))[0].exp(), count)

    @torch.no_grad()
    def predecessors(self, state: int, count: int) -> list[tuple[int, float]]:
        """Return the most likely previous states in the long run, and their probabilities given that this one follows.

        p(z | next = state) ∝ share(z) p(state | z).
        """
        log_into = self.hmm.transition.log_columns(torch.tensor([state], device=self.hmm.device))[0]
        if self._log_ends is not None:
            log_goes_on = torch.log1p(-self._log_ends.exp().clamp(max=1))
            log_into = torch.logaddexp(self._log_ends + self.hmm.log_start[state], log_goes_on + log_into)
        joint = self.share.log() + log_into
        return _top(joint.softmax(0), count) if bool(joint.isfinite().any()) else []

    @torch.no_grad()
    def next_words(self, state: int, count: int) -> list[tuple[int, float]]:
        """Return the most likely tokens after one that `state` emits, and their probabilities."""
        return _top(self.hmm.emit(self.transitions(torch.tensor([state], device=self.hmm.device))[0]).exp(), count)

    @torch.no_grad()
    def states_of_word(self, token: int, count: int) -> list[tuple[int, float]]:
        """Return the states that emit a token in a long text, and p(state | token)."""
        support, scores = self.hmm.emission.score(torch.tensor([token], device=self.hmm.device), False)
        joint = self.share.log() + spread(scores, support, self.hmm.num_states, -torch.inf)[0]
        return _top(joint.softmax(0), count) if bool(joint.isfinite().any()) else []


def _top(probs: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the largest probabilities of a vector above zero, with their indices."""
    best = probs.topk(min(count, len(probs)))
    return [(i, p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if p > 0]
