"""One sequence through a blocked HMM, in log space, touching only the states its words allow.

At each position the chain is in one of the k states of the word's block, or, where the token is missing, in any of the
Z states. Transitions between two such sets are made from the factors, a bounded piece at a time, so nothing of size
Z × Z is ever held.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hmmlm.ops.scan.naive import NEG_INF, logsumexp

CELLS = 2**24  # largest piece of the transition matrix made at once


class Factors(NamedTuple):
    """The parameters of a blocked HMM; log A[i, j] = u_i · w_j − log_normalizer_i."""

    block_of_word: Tensor  # [V]
    u: Tensor  # [Z, h]
    w: Tensor  # [Z, h]
    log_normalizer: Tensor  # [Z]
    log_start: Tensor  # [Z]
    log_emission: Tensor  # [V, k] row = word, over the states of its block

    @property
    def states_per_block(self) -> int:
        return self.log_emission.shape[1]

    @property
    def states(self) -> int:
        return self.log_start.shape[0]

    def span(self, token: int) -> slice:
        """The states that can emit `token`; all of them if it is missing."""
        if token < 0:
            return slice(0, self.states)
        block, k = int(self.block_of_word[token]), self.states_per_block
        return slice(block * k, (block + 1) * k)

    def tile(self, origins: slice | Tensor, targets: slice | Tensor) -> Tensor:
        """log A restricted to [origins, targets]."""
        return self.u[origins] @ self.w[targets].t() - self.log_normalizer[origins][:, None]

    def pieces(self, origins: slice, targets: slice) -> Iterator[tuple[slice, Tensor]]:
        """(targets, tile) over pieces of `targets` that fit in memory."""
        step = max(1, CELLS // (origins.stop - origins.start))
        for first in range(targets.start, targets.stop, step):
            part = slice(first, min(first + step, targets.stop))
            yield part, self.tile(origins, part)

    def pull(self, log_probs: Tensor, origins: slice, targets: slice) -> Tensor:
        """log Σ_i p_i A[i, j] for the targets j."""
        return torch.cat([logsumexp(log_probs[:, None] + tile, 0) for _, tile in self.pieces(origins, targets)])

    def push(self, log_values: Tensor, origins: slice, targets: slice) -> Tensor:
        """log Σ_j A[i, j] v_j for the origins i."""
        total: Tensor | None = None
        for part, tile in self.pieces(origins, targets):
            values = log_values[part.start - targets.start : part.stop - targets.start]
            piece = logsumexp(tile + values, 1)
            total = piece if total is None else torch.logaddexp(total, piece)
        assert total is not None
        return total

    def emit(self, log_states: Tensor) -> Tensor:
        """log Σ_z p(z) p(word | z) [..., V] for log-distributions over all states [..., Z]."""
        by_block = log_states.unflatten(-1, (-1, self.states_per_block))
        return logsumexp(by_block[..., self.block_of_word, :] + self.log_emission, -1)


class Trellis:
    """The filter over one sequence, and what can be read off it.

    `log_filtered[t]` is log p(z_t | x_1..t) over `spans[t]`; `log_scales[t]` is log p(x_t | x_1..t−1).
    """

    def __init__(self, factors: Factors, tokens: list[int], log_initial: Tensor | None = None) -> None:
        self.factors, self.tokens = factors, tokens
        self.spans = [factors.span(token) for token in tokens]
        self.log_filtered: list[Tensor] = []
        self.log_scales: list[Tensor] = []
        everywhere = slice(0, factors.states)
        for t, span in enumerate(self.spans):
            if t:
                predicted = factors.pull(self.log_filtered[-1], self.spans[t - 1], span)
            elif log_initial is not None:
                predicted = factors.pull(log_initial, everywhere, span)
            else:
                predicted = factors.log_start[span]
            joint = predicted + self.scores(t)
            scale = logsumexp(joint, 0)
            self.log_scales.append(scale)
            self.log_filtered.append(joint - torch.where(scale == NEG_INF, 0.0, scale))

    def scores(self, t: int) -> Tensor:
        """log p(x_t | z) over spans[t]."""
        token = self.tokens[t]
        if token < 0:
            return torch.zeros_like(self.factors.log_start)
        return self.factors.log_emission[token]

    def log_likelihood(self) -> Tensor:
        return torch.stack(self.log_scales).double().sum()

    def messages(self) -> list[Tensor]:
        """log p(x_t+1.. | z_t) / p(x_t+1.. | x_1..t) over spans[t], for each t."""
        message = torch.zeros_like(self.log_filtered[-1])
        result = [message]
        for t in range(len(self.tokens) - 1, 0, -1):
            message = self.factors.push(self.ahead(t, message), self.spans[t - 1], self.spans[t])
            result.append(message)
        return result[::-1]

    def ahead(self, t: int, message: Tensor) -> Tensor:
        """What a transition into position t leads to: log p(x_t.. | z_t) / p(x_t.. | x_1..t−1)."""
        return self.scores(t) + message - self.log_scales[t]

    def best_path(self) -> tuple[list[int], Tensor]:
        """The most likely states and their log-probability with the tokens."""
        best, offset, kept = self.factors.log_start[self.spans[0]] + self.scores(0), 0.0, []
        for t in range(1, len(self.tokens)):
            kept.append(best)
            pieces = self.factors.pieces(self.spans[t - 1], self.spans[t])
            best = torch.cat([(best[:, None] + tile).amax(0) for _, tile in pieces]) + self.scores(t)
            peak = best.amax()
            if peak > NEG_INF:
                best, offset = best - peak, offset + float(peak)
        log_prob = best.amax().double() + offset
        path = [int(best.argmax()) + self.spans[-1].start]
        for t in range(len(self.tokens) - 1, 0, -1):
            into = self.factors.tile(self.spans[t - 1], slice(path[-1], path[-1] + 1))[:, 0]
            path.append(int((kept[t - 1] + into).argmax()) + self.spans[t - 1].start)
        return path[::-1], log_prob

    def entropy(self) -> Tensor:
        """Of the posterior over paths, in nats: H(z_T | x) + Σ_t H(z_t−1 | z_t, x_1..t−1)."""
        messages = self.messages()
        last = self.log_filtered[-1].exp()
        total = -torch.xlogy(last, last).sum()
        for t in range(1, len(self.tokens)):
            marginal = (self.log_filtered[t] + messages[t]).exp()
            for part, tile in self.factors.pieces(self.spans[t - 1], self.spans[t]):
                conditional = (self.log_filtered[t - 1][:, None] + tile).softmax(0)
                weight = marginal[part.start - self.spans[t].start : part.stop - self.spans[t].start]
                total = total - (torch.xlogy(conditional, conditional).sum(0) * weight).sum()
        return total

    def surroundings(self) -> Iterator[Tensor]:
        """log p(z_t | all tokens but x_t) [Z], for each t."""
        factors, messages, everywhere = self.factors, self.messages(), slice(0, self.factors.states)
        for t in range(len(self.tokens)):
            around = factors.log_start
            if t:
                around = factors.pull(self.log_filtered[t - 1], self.spans[t - 1], everywhere)
            if t + 1 < len(self.tokens):
                ahead = self.ahead(t + 1, messages[t + 1])
                around = around + factors.push(ahead, everywhere, self.spans[t + 1])
            yield around.log_softmax(0)
