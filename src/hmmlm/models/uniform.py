"""The uniform emission constraint of Chiu & Rush 2020 (Table 3): every word is emitted by n states drawn at random."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor
from torch.autograd.function import once_differentiable

from hmmlm.data.tokenizers import Tokenizer
from hmmlm.distributed.normalizers import split_linear_logsumexp
from hmmlm.hmm import HMM, Carry, Scan
from hmmlm.models.base import Model, enter, from_factors, one_block, restart_lost, scan_factors
from hmmlm.models.neural import Form, NetworkConfig, Neural
from hmmlm.ops.blocked_scan import Factors
from hmmlm.ops.blocked_scan import refusal as blocked_refusal
from hmmlm.ops.common import accumulate, factor_logits, last_tokens, matmul, product_dtype
from hmmlm.ops.linear_logsumexp import linear_logsumexp
from hmmlm.ops.pieces import at_once
from hmmlm.scan.generic_scan import generic_scan
from hmmlm.section import Fraction, ModelSize, States
from hmmlm.structure.blocks import UniformSubsets
from hmmlm.structure.dropout import sample_columns, states_kept


class UniformConfig(NetworkConfig):
    """The networks of Chiu & Rush 2020 where every word is emitted by states drawn at random."""

    kind: Literal["uniform"] = "uniform"
    states_per_word: States = 128
    """States that may emit a word."""
    dropout: Fraction = 0.0
    """State dropout: the fraction of states left out of a batch."""
    dropped: Literal["columns", "logits"] = "columns"
    """columns: states that are left out cannot be entered; logits: transitions are left out, others from each state."""

    @property
    def distillable(self) -> bool:
        return False

    @model_validator(mode="after")
    def _states_suffice(self) -> UniformConfig:
        if self.states_per_word > self.num_states:
            raise ValueError(f"states_per_word ({self.states_per_word}) must be at most states ({self.num_states})")
        return self

    def size(self, words: int) -> ModelSize:
        return ModelSize(self.network_size(words), super().size(words).probabilities)

    def build(self, vocabulary: Tokenizer, block_of_word: Tensor | None, seed: int, device: torch.device) -> Model:
        return UniformNeural(
            UniformSubsets.sample(vocabulary.vocab_size, self.num_states, self.states_per_word, seed=seed),
            hidden=self.hidden,
            form=self.form,
            dropout=self.dropout,
            network_dropout=self.network_dropout,
            dropped=self.dropped,
            generator=torch.Generator().manual_seed(seed),
        )


class WordLists(NamedTuple):
    """The subsets seen from the states: the words of each, and where a word is among those of each of its states."""

    words: Tensor  # [Z, L] ascending, then words that do not count where a state has fewer than L
    empty: Tensor  # [Z, L] bool: does not count
    slot: Tensor  # [V, n] place of a word in the list of each of its states

    def to(self, device: torch.device | str) -> WordLists:
        return WordLists(*(field.to(device) for field in self))


def make_lists(subsets: UniformSubsets) -> WordLists:
    """Lay the words out; done once for a structure."""
    states = subsets.states_of_word.cpu().flatten()
    counts = torch.bincount(states, minlength=subsets.num_states)
    order = torch.argsort(states, stable=True)
    slot = torch.empty_like(states)
    slot[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[states[order]]
    shape = (subsets.num_states, int(counts.max()))
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
    return at_once(len(words), 2**25)  # products with words: 128 MB in float32


class UniformNeural(Model):
    """A ∝ exp(H_out H_inᵀ), O ∝ exp(H_emit E_xᵀ) over the words that a state may emit.

    Embeddings and networks are those of `Neural` with a single block: form and sizes mean the same. State dropout
    leaves a random fraction of the columns of the transition out before it is normalized, or of the entries of each row
    (`dropped`), for which training has to make the dense model.
    """

    def __init__(
        self,
        subsets: UniformSubsets,
        *,
        hidden: int = 256,
        form: Form = "released",
        dropout: float = 0.5,
        network_dropout: float = 0.0,
        dropped: str = "columns",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(subsets.num_states, subsets.vocab_size)
        block = one_block(subsets.vocab_size, subsets.num_states, None)
        self.network = Neural(
            block, hidden=hidden, form=form, dropout=dropout, network_dropout=network_dropout, generator=generator
        )
        self.dropout, self.dropped = dropout, dropped
        self.subsets, self.lists = subsets, make_lists(subsets)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move the structure along with the parameters."""
        result = super()._apply(fn, recurse)
        device = self.network.embedding.device
        self.subsets, self.lists = self.subsets.to(device), self.lists.to(device)
        return result

    def log_emission(self, kept: Tensor) -> Tensor:
        """Return log p(word | state) [K, L] for the words in the list of each state `kept` [K]; −inf where empty."""
        hidden = self.network.emission_features(self.network.embed(kept))
        words, bias = self.network.words.weight, self.network.words.bias
        rounded = product_dtype(words)
        with torch.autocast(hidden.device.type, enabled=False):
            lists = self.lists.words.index_select(0, kept)
            scores: Tensor = _PairScores.apply(hidden.to(rounded), words.to(rounded), lists)
            if bias is not None:
                scores = scores + bias.index_select(0, lists.flatten()).view_as(scores)
            return scores.masked_fill(self.lists.empty.index_select(0, kept), float("-inf")).log_softmax(1)

    def forward(self) -> HMM:
        return self.dense(0.0)

    def dense(self, dropout: float) -> HMM:
        """Return a dense HMM over all states, without a fraction of the transitions from each.

        It has Z × Z and Z × V numbers: 1.7 GB at 2^14 states and 10,000 words, twice that while it is made. Training
        makes it only to drop logits. Under autocast the factors are rounded as they are in training.
        """
        every = torch.arange(self.num_states, device=self.network.embedding.device)
        embedding = self.network.embed(every)
        (u, _), (w, log_start) = self.network.leaving(embedding, None), self.network.entering(embedding)
        own = self.subsets.states_of_word * self.lists.words.shape[1] + self.lists.slot
        by_word = self.log_emission(every).flatten().index_select(0, own.flatten()).view_as(own)
        impossible = by_word.new_full((self.vocab_size, self.num_states), float("-inf"))
        log_emission = impossible.scatter(1, self.subsets.states_of_word, by_word).t().contiguous()
        rounded = product_dtype(u)
        with torch.autocast(u.device.type, enabled=False):
            u, w = (factor.to(rounded).to(log_start.dtype) for factor in (u, w))
            logits = u @ w.t()
            if dropout:
                kept = torch.rand_like(logits).topk(states_kept(self.num_states, dropout), 1).indices
                logits = torch.full_like(logits, float("-inf")).scatter(1, kept, logits.gather(1, kept))
            return HMM(log_start, logits.log_softmax(1), log_emission)

    def scan(
        self, tokens: Tensor, lengths: Tensor | None = None, carry: Carry | None = None, restart: Tensor | None = None
    ) -> Scan:
        """Compute the likelihood of a batch under a fresh sample of columns; nothing here waits for the device.

        Every position becomes a block of its own, of the n states that may emit its word. States that are not kept are
        in it but never entered. A sequence that is impossible without them is skipped, and restarts in the next window.
        """
        if self.dropped == "logits":
            hmm, restart = self.dense(self.dropout), restart_lost(restart, carry, tokens)
            return self._skip_impossible(hmm.scan(tokens, lengths, carry, restart, exact_carry=False))
        columns = sample_columns(self.num_states, self.dropout, device=tokens.device)
        kept = columns.int().argsort(descending=True, stable=True)[: states_kept(self.num_states, self.dropout)]
        place = (columns.cumsum(0) - 1).clamp(min=0)  # of a kept state among the kept
        carried_states = None if carry is None or carry.states is None else carry.states
        left = None if carried_states is None else carried_states.flatten()
        embedding = self.network.embed(kept)
        (u, u_carried), (w, log_start) = self.network.leaving(embedding, left), self.network.entering(embedding)
        words = tokens.clamp(min=0).flatten()
        states = self.subsets.states_of_word.index_select(0, words)  # [B·T, n]
        rows = place.index_select(0, states.flatten())
        entry = None
        if carry is not None and carried_states is not None and u_carried is not None:
            entering = w.index_select(0, rows.view(*tokens.shape, -1)[:, 0].flatten()).unflatten(0, (len(tokens), -1))
            normalizer = linear_logsumexp(u_carried, w).view(*carried_states.shape, 1)
            scores = factor_logits(u_carried.unflatten(0, carried_states.shape), entering)
            entry = enter(carry, scores - normalizer)[:, None]
        cells = rows * self.lists.words.shape[1] + self.lists.slot.index_select(0, words).flatten()
        log_emission = self.log_emission(kept).flatten().index_select(0, cells)
        log_emission = log_emission.masked_fill(~columns.index_select(0, states.flatten()), float("-inf"))
        positions = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        factors = Factors(
            block_of_word=positions.flatten(),
            u=u.index_select(0, rows),
            w=w.index_select(0, rows),
            log_normalizer=split_linear_logsumexp(u, w).index_select(0, rows),
            log_start=log_start.index_select(0, rows),
            log_emission=log_emission.view_as(states),
        )
        restart = restart_lost(restart, carry, tokens)
        if blocked_refusal(tokens.device, log_start.dtype):
            result = generic_scan(from_factors(factors), positions, lengths, None, restart, entry=entry)
        else:
            result = scan_factors(factors, positions, lengths, entry, restart)
        last = self.subsets.states_of_word.index_select(0, last_tokens(tokens, lengths).clamp(min=0))
        return self._skip_impossible(result)._replace(carry=Carry(result.carry.log_probs, last))

    def _skip_impossible(self, result: Scan) -> Scan:
        impossible = result.log_likelihood.detach() == float("-inf")
        suspect = impossible if result.suspect is None else result.suspect | impossible
        return self.drop_underflowed(result._replace(suspect=suspect))
