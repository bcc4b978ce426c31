"""A very large HMM whose states emit the words of one block each and whose transition matrix is factored."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.hmm.checks import ArrayLike, check_initial, check_lengths, check_tokens
from hmmlm.hmm.dense import HMM
from hmmlm.hmm.sampling import draw
from hmmlm.hmm.trellis import Factors, Trellis
from hmmlm.ops.blocked_scan import Initial, blocked_scan
from hmmlm.ops.results import Counts, Filtered


class Carry(NamedTuple):
    """Where each sequence stands: a filtered distribution over the few states that its last word allows."""

    probs: Tensor  # [B, k]
    states: Tensor  # [B, k] which states these are

    def rows(self, count: int) -> "Carry":
        return Carry(self.probs[:count], self.states[:count])

    def distinct_states(self, blocks: int) -> Tensor:
        """The states [B, k], or [1, k] of a single block, in which all stand on the same."""
        return self.states[:1] if blocks == 1 else self.states


class BlockedScan(NamedTuple):
    """The forward recursion: how likely each sequence is and where it left the chain."""

    log_likelihood: Tensor  # [B]
    final: Carry


def last_states(tokens: Tensor, lengths: Tensor | None, block_of_word: Tensor, states: Tensor) -> Tensor:
    """[B, k] the states of each sequence's last word, of states [M, k]."""
    last = tokens[:, -1] if lengths is None else tokens.gather(1, lengths[:, None] - 1).squeeze(1)
    return states.index_select(0, block_of_word.index_select(0, last.clamp(min=0)))


def restart_lost(restart: Tensor | None, initial: Carry | None, tokens: Tensor) -> Tensor | None:
    """`restart` [B, T], with sequences whose carried mass has vanished starting afresh, or they would stay lost."""
    if initial is None:
        return restart
    restart = torch.zeros_like(tokens, dtype=torch.bool) if restart is None else restart.clone()
    restart[:, 0] |= initial.probs.sum(1) == 0
    return restart


class BlockedHMM:
    """Z = M·k states in M blocks; state m·k + i is state i of block m, and a word belongs to one block.

    log A[i, j] = u_i · w_j − log_normalizer_i, with u, w [Z, h]; log_emission [V, k] has a row for each word, over the
    k states of its block. Answers every question `HMM` does, in the same shapes (expected transition and emission
    counts as sparse tensors), without ever holding a Z × Z or Z × V matrix.
    """

    def __init__(
        self, block_of_word: Tensor, u: Tensor, w: Tensor, log_normalizer: Tensor, log_start: Tensor,
        log_emission: Tensor,
    ) -> None:
        self.factors = Factors(block_of_word, u, w, log_normalizer, log_start, log_emission)
        states, k = log_start.shape[0], log_emission.shape[1]
        if states % k:
            raise InputError(f"{states} states are not blocks of {k}, the width of log_emission")
        for name, value, shape in (
            ("u", u, (states, u.shape[-1])), ("w", w, (states, u.shape[-1])),
            ("log_normalizer", log_normalizer, (states,)), ("block_of_word", block_of_word, log_emission.shape[:1]),
        ):
            if tuple(value.shape) != tuple(shape):
                raise InputError(f"{name} must have shape {list(shape)}, not {list(value.shape)}")
        if bool((block_of_word < 0).any()) or bool((block_of_word >= states // k).any()):
            raise InputError(f"block_of_word must lie between 0 and {states // k - 1}, the number of blocks less one")

    @property
    def states(self) -> int:
        return self.factors.states

    @property
    def vocab_size(self) -> int:
        return self.factors.log_emission.shape[0]

    @property
    def device(self) -> torch.device:
        return self.factors.log_start.device

    @property
    def dtype(self) -> torch.dtype:
        return self.factors.log_start.dtype

    def to(self, *args: Any, **kwargs: Any) -> "BlockedHMM":
        """On another device or in another dtype, as `Tensor.to`."""
        block_of_word, *rest = self.factors
        moved = [value.to(*args, **kwargs) for value in rest]
        return BlockedHMM(block_of_word.to(moved[0].device), *moved)

    def detach(self) -> "BlockedHMM":
        return BlockedHMM(*(value.detach() for value in self.factors))

    def __repr__(self) -> str:
        k = self.factors.states_per_block
        return f"BlockedHMM(states={self.states}, blocks={self.states // k}, vocab_size={self.vocab_size})"

    def dense(self) -> HMM:
        """The same model with its matrices written out: for small sizes."""
        factors = self.factors
        everything = slice(0, self.states)
        emission = torch.full((self.states, self.vocab_size), float("-inf"), dtype=self.dtype, device=self.device)
        k, words = factors.states_per_block, torch.arange(self.vocab_size, device=self.device)
        rows = factors.block_of_word[:, None] * k + torch.arange(k, device=self.device)
        emission = emission.index_put((rows, words[:, None].expand_as(rows)), factors.log_emission)
        return HMM(factors.log_start, factors.tile(everything, everything), emission)

    # --- training and evaluation: whole batches, nothing checked ---

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, initial: Carry | None = None,
        restart: Tensor | None = None,
    ) -> BlockedScan:
        """log p(x) [B], differentiable, and where each sequence stands; tokens may not be missing."""
        factors, k = self.factors, self.factors.states_per_block
        before = None
        if initial is not None:
            states = initial.distinct_states(self.states // k)
            before = Initial(initial.probs, factors.u[states], factors.log_normalizer[states])
        result = blocked_scan(
            tokens, factors.block_of_word, factors.u, factors.w, factors.log_normalizer, factors.log_start,
            factors.log_emission, initial=before, lengths=lengths, restart=restart,
        )
        every = torch.arange(self.states, device=self.device).view(-1, k)
        return BlockedScan(
            result.log_likelihood, Carry(result.final, last_states(tokens, lengths, factors.block_of_word, every))
        )

    # --- one step at a time: distributions over the state of the next token, as logarithms [Z] ---

    def begin(self) -> Tensor:
        """log p(z_1)."""
        return self.factors.log_start.detach()

    @torch.no_grad()
    def advance(self, log_state: Tensor, token: int) -> Tensor:
        """log p(z_t+1 | x_1..t) from log p(z_t | x_1..t−1) and x_t = token."""
        span = self.factors.span(token)
        joint = (log_state[span] + self.factors.log_emission[token]).log_softmax(0)
        return self.factors.pull(joint, span, slice(0, self.states))

    @torch.no_grad()
    def emit(self, log_states: Tensor) -> Tensor:
        """log Σ_z p(z) p(word | z) [..., V] for log-distributions over states [..., Z]."""
        return self.factors.emit(log_states)

    # --- queries, one sequence at a time ---

    def _sequences(self, tokens: ArrayLike, lengths: ArrayLike | None) -> list[list[int]]:
        tokens = check_tokens(tokens, self.vocab_size, self.device)
        lengths = check_lengths(lengths, tokens)
        ends = [tokens.shape[1]] * tokens.shape[0] if lengths is None else lengths.tolist()
        return [row[:end] for row, end in zip(tokens.tolist(), ends, strict=True)]

    def _trellises(self, tokens: ArrayLike, lengths: ArrayLike | None) -> list[Trellis]:
        """Filtered sequences, all of which can happen."""
        factors = self.detach().factors
        result = [Trellis(factors, sequence) for sequence in self._sequences(tokens, lengths)]
        for row, trellis in enumerate(result):
            for position, scale in enumerate(trellis.log_scales):
                if float(scale) == float("-inf"):
                    raise InputError(
                        f"sequence {row} is impossible under this model: token {trellis.tokens[position]} at position "
                        f"{position} has probability zero given the tokens before it"
                    )
        return result

    def _spread(self, trellises: list[Trellis], values: Callable[[Trellis], list[Tensor]]) -> Tensor:
        """[B, T, Z] from what each trellis says over its spans; zero elsewhere."""
        steps = max(len(trellis.tokens) for trellis in trellises)
        result = torch.zeros(len(trellises), steps, self.states, dtype=self.dtype, device=self.device)
        for row, trellis in enumerate(trellises):
            for t, value in enumerate(values(trellis)):
                result[row, t, trellis.spans[t]] = value
        return result

    def log_likelihood(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """log p(x) [B], natural log; differentiable in the parameters."""
        checked = check_tokens(tokens, self.vocab_size, self.device)
        ends = check_lengths(lengths, checked)
        if not any(token < 0 for row in self._sequences(checked, ends) for token in row):
            return self.scan(checked, ends).log_likelihood
        totals = [Trellis(self.factors, row).log_likelihood() for row in self._sequences(checked, ends)]
        return torch.stack(totals).to(self.dtype)

    @torch.no_grad()
    def filter(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, initial: ArrayLike | None = None
    ) -> Filtered:
        """p(z_t | x_1..t) [B, T, Z]; `initial` [B, Z] is the filtered distribution before this window."""
        checked = check_tokens(tokens, self.vocab_size, self.device)
        before = check_initial(initial, checked, self.factors.log_start)
        rows = self._sequences(checked, lengths)
        trellises = [
            Trellis(self.factors, row, None if before is None else before[b].log()) for b, row in enumerate(rows)
        ]
        probs = self._spread(trellises, lambda trellis: [value.exp() for value in trellis.log_filtered])
        full = torch.zeros(*checked.shape, self.states, dtype=self.dtype, device=self.device)
        full[:, : probs.shape[1]] = probs
        final = torch.stack([full[b, len(row) - 1] for b, row in enumerate(rows)])
        return Filtered(torch.stack([t.log_likelihood() for t in trellises]).to(self.dtype), final, full)

    @torch.no_grad()
    def posterior(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """p(z_t | x_1..T) [B, T, Z]; zero beyond a sequence's length."""
        def marginals(trellis: Trellis) -> list[Tensor]:
            return [(a + b).exp() for a, b in zip(trellis.log_filtered, trellis.messages(), strict=True)]

        steps = check_tokens(tokens, self.vocab_size, self.device).shape[1]
        probs = self._spread(self._trellises(tokens, lengths), marginals)
        return torch.nn.functional.pad(probs, (0, 0, 0, steps - probs.shape[1]))

    @torch.no_grad()
    def viterbi(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> tuple[Tensor, Tensor]:
        """The most likely states [B, T] (−1 beyond a length) and their joint log-probability with the tokens [B]."""
        steps = check_tokens(tokens, self.vocab_size, self.device).shape[1]
        found = [trellis.best_path() for trellis in self._trellises(tokens, lengths)]
        states = [path + [-1] * (steps - len(path)) for path, _ in found]
        return torch.tensor(states, device=self.device), torch.stack([log_prob for _, log_prob in found]).to(self.dtype)

    @torch.no_grad()
    def sample(self, num: int, length: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw tokens [num, length] and their states [num, length] from the model."""
        if num < 1 or length < 1:
            raise InputError(f"sample needs num and length of at least 1, not {num} and {length}")
        factors, everything = self.factors, slice(0, self.states)
        state, path = draw(factors.log_start.expand(num, -1), generator), []
        for t in range(length):
            if t:
                state = draw(factors.tile(state, everything), generator)
            path.append(state)
        states = torch.stack(path, 1)
        tokens = torch.empty_like(states)
        k = factors.states_per_block
        for block in (states // k).unique().tolist():
            words = (factors.block_of_word == block).nonzero().squeeze(1)
            here = states // k == block
            tokens[here] = words[draw(factors.log_emission[words][:, states[here] % k].t(), generator)]
        return tokens, states

    @torch.no_grad()
    def posterior_sample(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, num: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`num` exact draws of the whole path given the tokens: states [num, B, T], −1 beyond a length."""
        if num < 1:
            raise InputError(f"posterior_sample needs num of at least 1, not {num}")
        checked = check_tokens(tokens, self.vocab_size, self.device)
        paths = torch.full((num, *checked.shape), -1, device=self.device)
        for row, trellis in enumerate(self._trellises(tokens, lengths)):
            for t in range(len(trellis.tokens) - 1, -1, -1):
                scores = trellis.log_filtered[t].expand(num, -1)
                if t + 1 < len(trellis.tokens):
                    scores = scores + self.factors.tile(trellis.spans[t], paths[:, row, t + 1]).t()
                paths[:, row, t] = draw(scores, generator) + trellis.spans[t].start
        return paths

    @torch.no_grad()
    def next_token(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """log p(next token | tokens) [B, V]."""
        factors, everything = self.factors, slice(0, self.states)
        return torch.stack([
            factors.emit(factors.pull(trellis.log_filtered[-1], trellis.spans[-1], everything))
            for trellis in self._trellises(tokens, lengths)
        ])

    @torch.no_grad()
    def expected_counts(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Counts:
        """Expected counts under the posterior, summed over B; transition [Z, Z] and emission [Z, V] are sparse."""
        start = torch.zeros_like(self.factors.log_start)
        pairs: list[tuple[Tensor, Tensor]] = []  # (flat index, count)
        emitted: list[tuple[Tensor, Tensor]] = []
        trellises = self._trellises(tokens, lengths)
        every = torch.arange(self.states, device=self.device)
        for trellis in trellises:
            messages = trellis.messages()
            start[trellis.spans[0]] += (trellis.log_filtered[0] + messages[0]).exp()
            for t, token in enumerate(trellis.tokens):
                here = every[trellis.spans[t]]
                if token >= 0:
                    emitted.append((here * self.vocab_size + token, (trellis.log_filtered[t] + messages[t]).exp()))
                if t:
                    ahead, before = trellis.ahead(t, messages[t]), every[trellis.spans[t - 1]]
                    for part, tile in self.factors.pieces(trellis.spans[t - 1], trellis.spans[t]):
                        offset = trellis.spans[t].start
                        leading = tile + ahead[part.start - offset : part.stop - offset]
                        pair = trellis.log_filtered[t - 1][:, None] + leading
                        pairs.append(((before[:, None] * self.states + every[part]).flatten(), pair.exp().flatten()))
        total = torch.stack([trellis.log_likelihood() for trellis in trellises]).sum().to(self.dtype)
        return Counts(
            start, self._sparse(pairs, self.states), self._sparse(emitted, self.vocab_size), total
        )

    def _sparse(self, entries: list[tuple[Tensor, Tensor]], columns: int) -> Tensor:
        """A sparse [Z, columns] tensor from flat indices and values, duplicates added up."""
        if not entries:
            return torch.zeros(self.states, columns, dtype=self.dtype, device=self.device).to_sparse()
        flat, values = torch.cat([i for i, _ in entries]), torch.cat([v for _, v in entries])
        index = torch.stack([flat // columns, flat % columns])
        return torch.sparse_coo_tensor(index, values, (self.states, columns), check_invariants=True).coalesce()

    @torch.no_grad()
    def entropy(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """Entropy of the posterior over paths [B], in nats."""
        return torch.stack([trellis.entropy() for trellis in self._trellises(tokens, lengths)]).to(self.dtype)

    @torch.no_grad()
    def infill(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tensor:
        """log p(x_t = v | all other observed tokens) [B, T, V] at every position; −inf beyond a length."""
        checked = check_tokens(tokens, self.vocab_size, self.device)
        result = torch.full((*checked.shape, self.vocab_size), float("-inf"), dtype=self.dtype, device=self.device)
        for row, trellis in enumerate(self._trellises(tokens, lengths)):
            for t, around in enumerate(trellis.surroundings()):
                result[row, t] = self.factors.emit(around)
        return result
