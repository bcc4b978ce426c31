"""The uniform emission constraint of Chiu & Rush 2020 (Table 3): every word is emitted by n states drawn at random."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.hmm import HMM, Carry
from hmmlm.hmm.blocked import BlockedScan, last_states, restart_lost
from hmmlm.ops.blocked_scan import Initial, blocked_scan
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.linear_logsumexp.precision import accumulate, matmul, resolve
from hmmlm.parameterization.base import Parameterization
from hmmlm.parameterization.blocked import BlockedNeural, Form
from hmmlm.structure.blocks import Blocks, UniformSubsets
from hmmlm.structure.dropout import sample_columns, states_kept

_SCORES = 2**25  # products of states and words held at a time: 128 MB in float32


class WordLists(NamedTuple):
    """The subsets seen from the states: the words of each, and where a word is among those of each of its states."""

    words: Tensor  # [Z, L] ascending, then words that do not count where a state has fewer than L
    empty: Tensor  # [Z, L] bool: does not count
    slot: Tensor  # [V, n] place of a word in the list of each of its states

    def to(self, device: torch.device | str) -> "WordLists":
        return WordLists(*(field.to(device) for field in self))


def make_lists(subsets: UniformSubsets) -> WordLists:
    """Lay the words out; done once for a structure."""
    states = subsets.states_of_word.cpu().flatten()
    counts = torch.bincount(states, minlength=subsets.states)
    order = torch.argsort(states, stable=True)
    slot = torch.empty_like(states)
    slot[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[states[order]]
    shape = (subsets.states, int(counts.max()))
    # Empty places take different words: gradients are added up by word, and one word for all would be a queue.
    words, empty = torch.arange(shape[0] * shape[1]).view(shape) % subsets.vocab_size, torch.ones(shape).bool()
    words[states, slot] = torch.arange(len(states)) // subsets.states_of_word.shape[1]
    empty[states, slot] = False
    return WordLists(words, empty, slot.view(subsets.states_of_word.shape))


class _PairScores(torch.autograd.Function):
    """hidden_i · words[lists_ij] [N, L] for hidden [N, h], words [V, h], lists [N, L] and no word twice that counts.

    All products of a few rows at a time, of which L are kept, and again in the backward pass: memory O(N·L), and ten
    times as fast on a GPU as to gather word vectors.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, words: Tensor, lists: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(hidden, words, lists)
        pieces = zip(hidden.split(_rows_at_once(words)), lists.split(_rows_at_once(words)), strict=True)
        return torch.cat([matmul(rows, words.t()).gather(1, chosen) for rows, chosen in pieces])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, words, lists = ctx.saved_tensors
        size, grad_hidden = _rows_at_once(words), []
        grad_words = torch.zeros_like(words, dtype=grad.dtype)
        for rows, own, chosen in zip(grad.split(size), hidden.split(size), lists.split(size), strict=True):
            pairs = rows.new_zeros(len(rows), len(words)).scatter_add_(1, chosen, rows).to(words.dtype)
            grad_hidden.append(matmul(pairs, words))
            accumulate(grad_words, pairs.t(), own)
        return torch.cat(grad_hidden).to(hidden.dtype), grad_words.to(words.dtype), None


def _rows_at_once(words: Tensor) -> int:
    return max(1, _SCORES // len(words))


class UniformNeural(Parameterization):
    """A ∝ exp(H_out H_inᵀ), O ∝ exp(H_emit E_xᵀ) over the words that a state may emit.

    Embeddings and networks are those of `BlockedNeural` with a single block: form and sizes mean the same.
    State dropout leaves a random share of the columns of the transition out before it is normalised.
    """

    def __init__(
        self, subsets: UniformSubsets, *, hidden: int = 256, form: Form = "code", dropout: float = 0.5,
        network_dropout: float = 0.0, generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(subsets.states, subsets.vocab_size)
        block = Blocks.from_clusters(torch.zeros(subsets.vocab_size), subsets.states)
        self.network = BlockedNeural(
            block, hidden=hidden, form=form, dropout=dropout, network_dropout=network_dropout, generator=generator
        )
        self.dropout, self.subsets, self.lists = dropout, subsets, make_lists(subsets)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move the structure along with the parameters."""
        result = super()._apply(fn, recurse)
        device = self.network.embedding.device
        self.subsets, self.lists = self.subsets.to(device), self.lists.to(device)
        return result

    def factors(self, kept: Tensor, carried: Tensor | None = None) -> tuple[Tensor, ...]:
        """u, w [K, h] and log_start [K] over the states `kept` [K], and u [n, h] of the states `carried` [n] if any."""
        network = self.network
        embedding = network.embed(kept)
        leaving, sizes = embedding, [len(kept)]
        if carried is not None:
            leaving, sizes = torch.cat([embedding, network.embed(carried)]), [len(kept), len(carried)]
        u, *u_carried = network.networks["out"](leaving).split(sizes)
        w = network.networks["in"](embedding) if network.form == "paper" else embedding
        beginning = w if network.form == "paper" else network.networks["start"](embedding)
        log_start = network.start(beginning).squeeze(1).to(network.embedding.dtype).log_softmax(0)
        return u, w, log_start, *u_carried

    def log_emission(self, kept: Tensor) -> Tensor:
        """log p(word | state) [K, L] for the words in the list of each of the states `kept` [K]; −inf where empty."""
        hidden = self.network.networks["emit"](self.network.embed(kept))
        words, bias = self.network.words.weight, self.network.words.bias
        seen = resolve(words, None)
        with torch.autocast(hidden.device.type, enabled=False):
            lists = self.lists.words.index_select(0, kept)
            scores: Tensor = _PairScores.apply(hidden.to(seen), words.to(seen), lists)
            if bias is not None:
                scores = scores + bias.index_select(0, lists.flatten()).view_as(scores)
            return scores.masked_fill(self.lists.empty.index_select(0, kept), float("-inf")).log_softmax(1)

    def forward(self) -> HMM:
        """All states, no dropout, as a dense HMM: what is evaluated, saved and queried.

        Z × Z and Z × V numbers are held: 1.7 GB at 2^14 states and 10,000 words, twice that while they are made.
        Training never does. Under autocast the factors are rounded as they are in training.
        """
        every = torch.arange(self.states, device=self.network.embedding.device)
        u, w, log_start = self.factors(every)
        own = self.subsets.states_of_word * self.lists.words.shape[1] + self.lists.slot
        by_word = self.log_emission(every).flatten().index_select(0, own.flatten()).view_as(own)
        impossible = by_word.new_full((self.vocab_size, self.states), float("-inf"))
        log_emission = impossible.scatter(1, self.subsets.states_of_word, by_word).t().contiguous()
        seen = resolve(u, None)
        with torch.autocast(u.device.type, enabled=False):
            u, w = (factor.to(seen).to(log_start.dtype) for factor in (u, w))
            return HMM(log_start, (u @ w.t()).log_softmax(1), log_emission)

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, initial: Carry | None = None,
        restart: Tensor | None = None,
    ) -> BlockedScan:
        """The likelihood of a batch under a fresh sample of columns; nothing here waits for the device.

        Every position is made a block of its own, of the n states that may emit its word. Those not kept are there but
        never entered. A sequence that is impossible without them is skipped, and starts again in the next window.
        """
        columns = sample_columns(self.states, self.dropout, device=tokens.device)
        kept = columns.int().argsort(descending=True, stable=True)[: states_kept(self.states, self.dropout)]
        place = (columns.cumsum(0) - 1).clamp(min=0)  # of a kept state among the kept
        carried = None if initial is None else initial.states.flatten()
        u, w, log_start, *left = self.factors(kept, carried)
        before = None
        if initial is not None:
            size = initial.states.shape
            before = Initial(initial.probs, left[0].view(*size, -1), linear_logsumexp(left[0], w).view(size))
        words = tokens.clamp(min=0).flatten()
        states = self.subsets.states_of_word.index_select(0, words)  # [B·T, n]
        rows = place.index_select(0, states.flatten())
        cells = rows * self.lists.words.shape[1] + self.lists.slot.index_select(0, words).flatten()
        log_emission = self.log_emission(kept).flatten().index_select(0, cells)
        log_emission = log_emission.masked_fill(~columns.index_select(0, states.flatten()), float("-inf"))
        positions = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        result = blocked_scan(
            positions, positions.flatten(), u.index_select(0, rows), w.index_select(0, rows),
            linear_logsumexp(u, w).index_select(0, rows), log_start.index_select(0, rows),
            log_emission.view_as(states), initial=before, lengths=lengths,
            restart=restart_lost(restart, initial, tokens),
        )
        impossible = result.log_likelihood.detach() == float("-inf")
        log_likelihood = self.trusted(result._replace(suspect=result.suspect | impossible))
        own = torch.arange(self.vocab_size, device=tokens.device)
        return BlockedScan(
            log_likelihood, Carry(result.final, last_states(tokens, lengths, own, self.subsets.states_of_word))
        )
