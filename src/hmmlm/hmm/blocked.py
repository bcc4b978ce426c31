"""An HMM for very many states: each emits the words of one block, and the transition matrix is factored."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hmmlm.device import total_memory
from hmmlm.emissions.columns import log_group_sums
from hmmlm.errors import InputError
from hmmlm.hmm.blocked_counts import count_expected
from hmmlm.hmm.blocked_products import (
    BlockSupport,
    conditional_entropy,
    log_product,
    log_product_of_row,
    max_sum,
    narrow,
    reduce_sources,
    reduce_targets,
)
from hmmlm.hmm.blocked_stream import filter_stream, is_stream
from hmmlm.hmm.checks import ArrayLike, check_factors, check_log_state, check_parameters, check_words, move
from hmmlm.hmm.dense import HMM
from hmmlm.hmm.lattice import Lattice, SortedBatch
from hmmlm.hmm.next_words import next_words
from hmmlm.hmm.protocol import Carry, Counts, Predictions, Scan, Support
from hmmlm.hmm.queries import HiddenMarkovModel
from hmmlm.hmm.word_products import WordProducts
from hmmlm.numerics.logmatrix import LogMatrix, LogTiles, least_sum
from hmmlm.ops.blocked_scan import Factors, blocked_scan
from hmmlm.ops.common import NEG_INF, exp
from hmmlm.transitions.tilestore import TileStore

_CELLS = 2**24  # largest piece of the transition matrix computed at once
_STORED_SHARE = 1 / 8  # of the memory of the machine, for tiles that queries on a CPU keep
_TABLE_CELLS = 2**22  # up to this size the whole transition matrix is computed once and kept


class BlockedHMM(HiddenMarkovModel):
    """Z = M·k states in M blocks; state m·k + i is state i of block m, and a word belongs to one block.

    log A[i, j] = u_i · w_j − log_normalizer_i, with u, w [Z, h]; log_emission [V, k] has a row for each word, over the
    k states of its block. Supports every query of `HMM`, with the same shapes (expected transition and emission counts
    are sparse tensors), without a Z × Z or Z × V matrix.
    """

    kind: ClassVar[str] = "blocked"
    TENSORS: ClassVar[dict[str, str]] = {
        "block_of_word": "V",
        "u": "Z?",
        "w": "Z?",
        "log_normalizer": "Z",
        "log_start": "Z",
        "log_emission": "V?",
    }
    INDICES: ClassVar[tuple[str, ...]] = ("block_of_word",)

    def __init__(
        self,
        block_of_word: Tensor,
        u: Tensor,
        w: Tensor,
        log_normalizer: Tensor,
        log_start: Tensor,
        log_emission: Tensor,
    ) -> None:
        self.factors = Factors(block_of_word, u, w, log_normalizer, log_start, log_emission)
        named = self.factors._asdict()
        del named["block_of_word"]
        check_parameters(named)
        if not isinstance(block_of_word, Tensor) or block_of_word.dtype not in (torch.int32, torch.int64):
            raise InputError("block_of_word must be an integer tensor: the block of each word")
        layouts = {"u": "states, width", "log_start": "states", "log_emission": "words, states per block"}
        for name, layout in layouts.items():
            if named[name].dim() != len(layout.split(", ")) or not named[name].numel():
                raise InputError(f"{name} must have shape [{layout}], not {list(named[name].shape)}")
        states, k = log_start.shape[0], log_emission.shape[1]
        if states % k:
            raise InputError(f"{states} states do not divide into blocks of {k}, the width of log_emission")
        shapes = {
            "u": (states, u.shape[1]),
            "w": (states, u.shape[1]),
            "log_normalizer": (states,),
            "block_of_word": tuple(log_emission.shape[:1]),
        }
        for name, shape in shapes.items():
            value = getattr(self.factors, name)
            if tuple(value.shape) != shape:
                raise InputError(f"{name} must have shape {list(shape)}, not {list(value.shape)}")
        if bool((block_of_word < 0).any()) or bool((block_of_word >= states // k).any()):
            raise InputError(f"block_of_word must be between 0 and {states // k - 1}, the number of blocks minus one")

    def validate(self) -> None:
        check_factors(Factors(*(value.detach() for value in self.factors)))

    @property
    def states(self) -> int:
        return self.factors.log_start.shape[0]

    @property
    def states_per_block(self) -> int:
        return self.factors.log_emission.shape[1]

    @property
    def blocks(self) -> int:
        return self.states // self.states_per_block

    @property
    def vocab_size(self) -> int:
        return self.factors.log_emission.shape[0]

    @property
    def device(self) -> torch.device:
        return self.factors.log_start.device

    @property
    def dtype(self) -> torch.dtype:
        return self.factors.log_start.dtype

    @property
    def requires_grad(self) -> bool:
        return any(value.requires_grad for value in self.factors)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, as a model file stores them."""
        return self.factors._asdict()

    def to(self, *args: Any, **kwargs: Any) -> "BlockedHMM":
        """Return the model on another device or in another dtype, like `Tensor.to`."""
        block_of_word, *rest = self.factors
        moved = move(rest, *args, **kwargs)
        return BlockedHMM(block_of_word.to(moved[0].device), *moved)

    def detach(self) -> "BlockedHMM":
        """Return the model without gradients; the model itself if it has none."""
        return BlockedHMM(*(value.detach() for value in self.factors)) if self.requires_grad else self

    def __repr__(self) -> str:
        return f"BlockedHMM(states={self.states}, blocks={self.blocks}, vocab_size={self.vocab_size})"

    def dense(self) -> HMM:
        """Return the same model with dense matrices; for small sizes."""
        factors, k = self.factors, self.states_per_block
        words = torch.arange(self.vocab_size, device=self.device)
        rows = factors.block_of_word[:, None] * k + torch.arange(k, device=self.device)
        emission = torch.full((self.states, self.vocab_size), NEG_INF, dtype=self.dtype, device=self.device)
        emission = emission.index_put((rows, words[:, None].expand_as(rows)), factors.log_emission)
        return HMM(factors.log_start, factors.u @ factors.w.t() - factors.log_normalizer[:, None], emission)

    # --- likelihood ---

    def scan(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        carry: Carry | None = None,
        restart: Tensor | None = None,
        exact_carry: bool = True,
    ) -> Scan:
        """See `Primitives.scan`; tokens may not be missing."""
        factors, block_of_word, entry = self.factors, self.factors.block_of_word, None
        if carry is not None:
            source = None if carry.states is None else BlockSupport(carry.states[:, 0] // self.states_per_block, False)
            target = BlockSupport(block_of_word[tokens[:, 0].clamp(min=0)], False)
            entry = self.pull(carry.log_probs.to(self.dtype), source, target)[:, None]
        result = blocked_scan(factors, tokens, entry=entry, lengths=lengths, restart=restart, exact_carry=exact_carry)
        last = block_of_word[last_tokens(tokens, lengths).clamp(min=0)]
        states = self.all_states.view(self.blocks, -1)[last]
        return result._replace(carry=Carry(result.carry.log_probs, states))

    @property
    def all_states(self) -> Tensor:
        return torch.arange(self.states, device=self.device)

    def _log_likelihood(self, tokens: Tensor, lengths: Tensor | None, carry: Carry | None) -> Tensor:
        """See `Primitives._log_likelihood`.

        Missing tokens need the recursion of the queries. It is also several times faster on a CPU where the transition
        matrix is kept, and slower otherwise.
        """
        inside = lengths is None or torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        kept = self.device.type == "cpu" and self._table is not None
        if not kept and not bool(((tokens < 0) & inside).any()):
            return self.scan(tokens, lengths, carry, exact_carry=False).log_likelihood
        batch = self._batch(tokens, lengths)
        lattice = self._forward(batch, self._log_initial(carry, batch))
        return batch.unsort(lattice.log_likelihood()).to(self.dtype)

    # --- pieces of the transition matrix ---

    @cached_property
    def _table(self) -> Tensor | None:
        """Return log A as tiles [M, M, k, k]; None if it is large or requires a gradient."""
        if self.states**2 > _TABLE_CELLS or self.requires_grad:
            return None
        blocks, factors = self.blocks, self.factors
        matrix = factors.u @ factors.w.t() - factors.log_normalizer[:, None]
        return matrix.view(blocks, self.states_per_block, blocks, -1).transpose(1, 2).contiguous()

    @cached_property
    def forward_tiles(self) -> LogTiles | None:
        return None if self._table is None else LogTiles(self._table)

    @cached_property
    def _backward_tiles(self) -> LogTiles | None:
        return None if self._table is None else LogTiles(self._table.transpose(2, 3).contiguous())

    @cached_property
    def backward_matrix(self) -> LogMatrix | None:
        """Return log A transposed, for products with all states; None if it is large or requires a gradient.

        A constraint takes one such product per token of a text: computing the matrix again takes 20 times as long.
        """
        if self.states**2 > _CELLS or self.requires_grad:
            return None
        factors = self.factors
        return LogMatrix((factors.w @ factors.u.t()).sub_(factors.log_normalizer))

    @cached_property
    def _scaled_emission(self) -> tuple[Tensor, Tensor]:
        """Return the largest log p(word | z) of each word [V], and exp(log_emission) [V, k] relative to it."""
        peak = self.factors.log_emission.amax(1)
        peak = torch.where(peak == NEG_INF, 0.0, peak)
        return peak, exp(self.factors.log_emission - peak[:, None])

    def tiles(self, sources: Tensor, targets: Tensor) -> Tensor:
        """Return log A [n, k, k] between pairs of blocks [n]."""
        if self._table is not None:
            return self._table[sources, targets]
        shape, factors = (self.blocks, self.states_per_block, -1), self.factors
        u, w = factors.u.view(shape)[sources], factors.w.view(shape)[targets]
        return u @ w.transpose(1, 2) - factors.log_normalizer.view(shape[:2])[sources][:, :, None]

    def span(self, block: int) -> slice:
        """Return the states of a block, or all states (−1)."""
        k = self.states_per_block
        return slice(0, self.states) if block < 0 else slice(block * k, (block + 1) * k)

    def pieces(self, source: slice, target: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield pieces of `target`, relative to its start, with log A from all of `source` into them."""
        factors, size = self.factors, max(1, _CELLS // (source.stop - source.start))
        for first in range(target.start, target.stop, size):
            part = slice(first, min(first + size, target.stop))
            tile = factors.u[source] @ factors.w[part].t() - factors.log_normalizer[source][:, None]
            yield slice(part.start - target.start, part.stop - target.start), tile

    def _gather(self, lattice: Lattice, values: list[Tensor], fill: float = 0.0) -> Tensor:
        """See `HiddenMarkovModel._gather`; the values of a block are written without spreading them first."""
        shape = (*lattice.batch.tokens.shape, self.blocks, self.states_per_block)
        result = torch.full(shape, fill, dtype=self.dtype, device=self.device)
        for t, (value, support) in enumerate(zip(values, lattice.supports, strict=True)):
            rows = lattice.batch.order[: len(value)]
            if support.wide:
                result[rows, t] = value.unflatten(1, (self.blocks, -1))
            else:
                result[rows, t, support.blocks] = value
        return result.flatten(2)

    # --- operations of the queries ---

    def observe(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        factors, words = self.factors, tokens.clamp(min=0)
        support, scores = BlockSupport(factors.block_of_word[words], False), factors.log_emission[words]
        if missing:
            explained = torch.zeros_like(factors.log_start) if log_missing is None else log_missing
            scores = torch.where((tokens < 0)[:, None], explained, self.spread(scores, support, NEG_INF))
            support = BlockSupport(torch.where(tokens < 0, -1, support.blocks), True)
        return support, scores

    def restrict(self, values: Tensor, support: Support) -> Tensor:
        if support is None:
            return values
        by_block = values.unflatten(1, (self.blocks, -1))
        if not support.wide:
            return by_block[torch.arange(len(values), device=self.device), support.blocks]
        inside = (support.blocks[:, None] == torch.arange(self.blocks, device=self.device)) | (support.blocks < 0)[
            :, None
        ]
        return by_block.masked_fill(~inside[..., None], NEG_INF).flatten(1)

    def spread(self, values: Tensor, support: Support, fill: float) -> Tensor:
        if support is None or support.wide:
            return values
        result = values.new_full((len(values), self.blocks, self.states_per_block), fill)
        result[torch.arange(len(values), device=self.device), support.blocks] = values
        return result.flatten(1)

    def state_ids(self, support: Support, index: Tensor) -> Tensor:
        return index if support is None or support.wide else support.blocks * self.states_per_block + index

    def log_start_scores(self) -> Tensor:
        return self.factors.log_start

    def _forward(
        self, batch: SortedBatch, log_initial: Tensor | None = None, log_missing: Tensor | None = None
    ) -> Lattice:
        """See `Recursions._forward`."""
        if is_stream(self, batch):
            return filter_stream(self, batch, log_initial)
        return super()._forward(batch, log_initial, log_missing)

    def pull(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        if narrow(source, target) and self.forward_tiles is not None:
            return self.forward_tiles.product(log_probs, (source.blocks, target.blocks))
        if narrow(source, target) and self.device.type == "cpu" and not self.requires_grad:
            return self.store.product(log_probs, source.blocks, target.blocks)
        return reduce_sources(self, log_probs, source, target, log_product, log_product_of_row)

    @cached_property
    def store(self) -> TileStore:
        tile = self.states_per_block**2 * self.factors.u.element_size()
        return TileStore(self._tile, self.blocks, int(_STORED_SHARE * total_memory(self.device)) // tile)

    def _tile(self, source: int, target: int) -> Tensor:
        """Return log A [k, k] from one block to another."""
        rows, factors = self.span(source), self.factors
        return torch.addmm(-factors.log_normalizer[rows, None], factors.u[rows], factors.w[self.span(target)].t())

    def pull_max(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        return reduce_sources(self, log_probs, source, target, max_sum)

    def origin_entropy(self, log_probs: Tensor, source: Support, target: Support) -> Tensor:
        return reduce_sources(self, log_probs, source, target, conditional_entropy).clamp_min(0)

    def push(self, log_values: Tensor, source: Support = None, target: Support = None) -> Tensor:
        if narrow(source, target) and self._backward_tiles is not None:
            return self._backward_tiles.product(log_values, (source.blocks, target.blocks))
        return reduce_targets(self, log_values, source, target)

    def transitions_into(self, source: Support, states: Tensor) -> Tensor:
        factors, shape = self.factors, (self.blocks, self.states_per_block, -1)
        if source is None or source.wide:
            result = (factors.w[states] @ factors.u.t()) - factors.log_normalizer
            return result if source is None else torch.where(self._outside(source), NEG_INF, result)
        if self._table is not None:
            k = self.states_per_block
            return self._table[source.blocks.expand_as(states), states // k, :, states % k]
        u, normalizer = factors.u.view(shape)[source.blocks], factors.log_normalizer.view(shape[:2])[source.blocks]
        return torch.einsum("nkh,...nh->...nk", u, factors.w[states]) - normalizer

    def _outside(self, support: BlockSupport) -> Tensor:
        """Return a mask [n, Z], True for states outside a row's block."""
        block = torch.arange(self.blocks, device=self.device).repeat_interleave(self.states_per_block)
        return (support.blocks[:, None] != block) & (support.blocks >= 0)[:, None]

    def transitions_from(self, states: Tensor) -> Tensor:
        factors = self.factors
        return factors.u[states] @ factors.w.t() - factors.log_normalizer[states][:, None]

    @cached_property
    def words_of_block(self) -> Tensor:
        """Return the words of each block [M, W]; −1 beyond their number."""
        block = self.factors.block_of_word
        order, counts = block.argsort(stable=True), block.bincount(minlength=self.blocks)
        return pad_sequence(order.split(counts.tolist()), batch_first=True, padding_value=-1)

    def emissions_from(self, states: Tensor) -> tuple[Tensor, Tensor]:
        k = self.states_per_block
        words = self.words_of_block[states // k]
        log_probs = self.factors.log_emission[words.clamp(min=0), (states % k)[:, None]]
        return words, log_probs.masked_fill(words < 0, NEG_INF)

    @torch.no_grad()
    def emit(self, log_states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Compute log Σ_z p(z) p(word | z) for log-distributions [..., Z]: [..., V], or [..., n] for `tokens` [n].

        In products relative to the largest entries; sums that underflow may have changed are recomputed in log space.
        """
        check_log_state(log_states, self.states, self.device)
        if tokens is not None:
            check_words(tokens, self.vocab_size)
        factors, model = self.factors, self.detach()
        words = slice(None) if tokens is None else tokens
        blocks, scores = factors.block_of_word[words], factors.log_emission[words]
        peak, scaled = (values[words] for values in model._scaled_emission)
        least = least_sum(self.states_per_block, self.dtype)
        flat = log_states.reshape(-1, self.states)
        emitted = []
        for piece in flat.split(max(1, _CELLS // max(1, scores.numel()))):
            top = piece.amax(1, keepdim=True).clamp_min(torch.finfo(self.dtype).min)
            weights = exp(piece - top).unflatten(1, (self.blocks, -1))
            relative = torch.einsum("bvk,vk->bv", weights[:, blocks], scaled)
            result = relative.log().add_(peak).add_(top)
            rows, columns = (relative < least).nonzero(as_tuple=True)
            exact = piece.unflatten(1, (self.blocks, -1))[rows, blocks[columns]] + scores[columns]
            result[rows, columns] = torch.logsumexp(exact, 1)
            emitted.append(result)
        return torch.cat(emitted).view(*log_states.shape[:-1], -1)

    @cached_property
    def _word_products(self) -> WordProducts:
        return WordProducts(self)

    @torch.no_grad()
    def predict(self, log_probs: Tensor, source: Support) -> Tensor:
        """See `HiddenMarkovModel.predict`; rows of one block share a matrix, which is kept for later calls."""
        if source is None or source.wide:
            return super().predict(log_probs, source)
        blocks, group = source.blocks.unique(return_inverse=True)
        result = torch.empty(len(log_probs), self.vocab_size, dtype=self.dtype, device=self.device)
        for i, block in enumerate(blocks.tolist()):
            rows = group == i
            result[rows] = self._word_products.product(log_probs[rows], block)
        return result

    @torch.no_grad()
    def predictions(
        self, tokens: ArrayLike, lengths: ArrayLike | None = None, words: Tensor | None = None
    ) -> Iterator[Predictions]:
        """See `HiddenMarkovModel.predictions`; what follows the words of a block is predicted together."""
        model, batch = self.detach(), self._batch(tokens, lengths)
        if any(batch.missing):
            yield from super().predictions(tokens, lengths, words)
        else:
            yield model._first_predictions(batch, words)
            yield from next_words(model, model._forward(batch), words)

    @torch.no_grad()
    def group_emission(self, group_of_word: Tensor, groups: int) -> Tensor:
        """Compute log p(a word of the group | z) [groups, Z] for a partition of the vocabulary, group_of_word [V]."""
        blocks, factors = self.blocks, self.factors
        group = group_of_word * blocks + factors.block_of_word
        return log_group_sums(factors.log_emission, group, groups * blocks).view(groups, -1)

    def joint_scores(self, origins: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factors, k = self.factors, self.states_per_block
        u, w = factors.u.index_select(0, origins), factors.w.index_select(0, states)
        moved = (u * w).sum(1) - factors.log_normalizer.index_select(0, origins)
        emitted = factors.log_emission.flatten().index_select(0, tokens * k + states % k)
        outside = states // k != factors.block_of_word.index_select(0, tokens)
        return factors.log_start.index_select(0, states), moved, emitted.masked_fill(outside, NEG_INF)

    def carry_at(self, states: Tensor) -> Carry:
        every = self.all_states.view(self.blocks, -1)[states // self.states_per_block]
        return Carry((every == states[:, None]).double().log(), every)

    @torch.no_grad()
    def _expected_counts(self, tokens: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Counts:
        model = self.detach()
        lattice = model._forward(model._batch(tokens, lengths))
        return count_expected(model, lattice, model._messages(lattice), weights)


def last_tokens(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the last token [B] of each sequence."""
    return tokens[:, -1] if lengths is None else tokens.gather(1, lengths[:, None] - 1).squeeze(1)
