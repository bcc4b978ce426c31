"""An HMM with dense matrices: start [Z], transition [Z, Z] and emission [Z, V]."""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hmmlm.arguments import check_type
from hmmlm.emissions.columns import EmissionMatrix
from hmmlm.errors import InputError
from hmmlm.hmm.checks import (
    ArrayLike,
    as_log_probs,
    check_batch,
    check_count,
    check_distributions,
    check_log_state,
    check_number,
    check_parameters,
    check_words,
    move,
)
from hmmlm.hmm.guided_cpu import CpuSteps
from hmmlm.hmm.guided_step import GuidedSteps
from hmmlm.hmm.lattice import Lattice, SortedBatch
from hmmlm.hmm.products import Observations, filter_products, message_products
from hmmlm.hmm.protocol import Carry, Counts, Scan, Support
from hmmlm.hmm.queries import HiddenMarkovModel
from hmmlm.hmm.recorded_scan import RecordedScans
from hmmlm.numerics.logmatrix import LogMatrix
from hmmlm.ops.common import NEG_INF, Impl, installed, logsumexp
from hmmlm.ops.maximize_rows import maximize_rows
from hmmlm.ops.scan import Evidence, Parameters, expected_counts, log_likelihood, path_loops_pay, scan
from hmmlm.ops.scan.scaled import distinct
from hmmlm.transitions.origins import best_origins, entropy_of_origins

_RANDOM_CELLS = 2**30  # probabilities of a random model: 8 GB while they are drawn
_BULK_CELLS = 2**25  # largest [T, B, Z] tensor of a recursion over all steps at once


class Stacked(NamedTuple):
    """The forward recursion of all steps at once."""

    given: Observations
    log_filtered: Tensor  # [T, B, Z]


class HMM(HiddenMarkovModel):
    """Start [Z], transition [Z, Z] (row = from-state) and emission [Z, V], as log-probabilities.

    The constructor does not check whether each distribution sums to one; `validate()` does, and `from_probs` calls it.
    Tokens are integers [B, T]; −1 is a missing token, which is summed over; `lengths` [B] gives ragged batches.
    Results are detached, except `log_likelihood` (and `filter(...).log_likelihood`) when a parameter requires a
    gradient. `impl` selects the implementation of the likelihood: "auto", "scaled", "compiled", "triton" or "naive"
    (log space).
    """

    kind: ClassVar[str] = "dense"
    TENSORS: ClassVar[dict[str, str]] = {"log_start": "Z", "log_transition": "ZZ", "log_emission": "ZV"}

    def __init__(self, log_start: Tensor, log_transition: Tensor, log_emission: Tensor, impl: Impl = "auto") -> None:
        named = {"log_start": log_start, "log_transition": log_transition, "log_emission": log_emission}
        check_parameters(named, "; HMM.from_probs takes arrays")
        if log_start.dim() != 1 or log_start.shape[0] == 0:
            raise InputError(f"log_start must have shape [states], not {list(log_start.shape)}")
        states = log_start.shape[0]
        if log_transition.shape != (states, states):
            raise InputError(f"log_transition must have shape [{states}, {states}], not {list(log_transition.shape)}")
        if log_emission.dim() != 2 or log_emission.shape[0] != states or log_emission.shape[1] == 0:
            raise InputError(f"log_emission must have shape [{states}, words], not {list(log_emission.shape)}")
        self.log_start, self.log_transition, self.log_emission = log_start, log_transition, log_emission
        check_type("impl", impl, Impl)
        self.impl: Impl = impl

    @classmethod
    def from_probs(cls, start: ArrayLike, transition: ArrayLike, emission: ArrayLike, impl: Impl = "auto") -> "HMM":
        """Create an HMM from probabilities, as arrays, lists or tensors; each distribution must sum to one.

        Lists give a float32 model; parameters of different dtypes give a float64 one.
        """
        given = {"start": start, "transition": transition, "emission": emission}
        logs, dtypes = zip(*(as_log_probs(values, name) for name, values in given.items()), strict=True)
        dtype = dtypes[0] if len(set(dtypes)) == 1 else torch.float64
        hmm = cls(*Parameters(*(log.to(dtype) for log in logs)), impl)
        for name, log_probs in zip(given, hmm.parameters, strict=True):
            check_distributions(log_probs, name)
        return hmm

    @classmethod
    def random(cls, states: int, vocab_size: int, seed: int = 0) -> "HMM":
        """Create an HMM of random distributions (uniform over all distributions), to `fit`."""
        check_count("states", states, 1)
        check_count("vocab_size", vocab_size, 1)
        check_count("states × (states + vocab_size)", states * (states + vocab_size), 1, _RANDOM_CELLS)
        check_count("seed", seed, -(2**63))
        generator = torch.Generator().manual_seed(seed)
        shapes = ((states,), (states, states), (states, vocab_size))
        draws = [torch.empty(shape, dtype=torch.float64).exponential_(generator=generator) for shape in shapes]
        start, transition, emission = ((draw / draw.sum(-1, keepdim=True)).float() for draw in draws)
        return cls.from_probs(start, transition, emission)

    @classmethod
    def from_hmmlearn(cls, model: Any) -> "HMM":
        """Create an HMM from a fitted `CategoricalHMM` of hmmlearn."""
        for name in ("startprob_", "transmat_", "emissionprob_"):
            if not hasattr(model, name):
                raise InputError(f"from_hmmlearn needs a fitted CategoricalHMM: {type(model).__name__} has no {name}")
        return cls.from_probs(model.startprob_, model.transmat_, model.emissionprob_)

    @classmethod
    def from_dynamax(cls, params: Any) -> "HMM":
        """Create an HMM from the parameters of a `CategoricalHMM` of dynamax with one emission."""
        try:
            probs = params.initial.probs, params.transitions.transition_matrix, params.emissions.probs
        except AttributeError as error:
            raise InputError(f"from_dynamax needs the parameters of a CategoricalHMM: {error}") from None
        start, transition, emission = map(np.array, probs)  # copies: arrays of JAX cannot be written to
        if emission.ndim != 3 or emission.shape[1] != 1:
            raise InputError(f"from_dynamax needs one emission, [states, 1, words], not {list(emission.shape)}")
        return cls.from_probs(start, transition, emission[:, 0])

    def validate(self) -> None:
        """Raise an InputError that names the first distribution that does not sum to one."""
        for name, log_probs in self.tensors().items():
            check_distributions(log_probs, name)

    @property
    def states(self) -> int:
        return self.log_start.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.log_emission.shape[1]

    @property
    def device(self) -> torch.device:
        return self.log_start.device

    @property
    def dtype(self) -> torch.dtype:
        return self.log_start.dtype

    @property
    def parameters(self) -> Parameters:
        return Parameters(self.log_start, self.log_transition, self.log_emission)

    @property
    def requires_grad(self) -> bool:
        return any(p.requires_grad for p in self.parameters)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, as a model file stores them."""
        return self.parameters._asdict()

    def to(self, *args: Any, **kwargs: Any) -> "HMM":
        """Return the model on another device or in another dtype, like `Tensor.to`."""
        return HMM(*Parameters(*move(self.parameters, *args, **kwargs)), self.impl)

    def detach(self) -> "HMM":
        """Return the model without gradients; the model itself if it has none."""
        if not self.requires_grad:
            return self
        return HMM(self.log_start.detach(), self.log_transition.detach(), self.log_emission.detach(), self.impl)

    def dense(self) -> "HMM":
        """Return the model itself."""
        return self

    def __repr__(self) -> str:
        return f"HMM(states={self.states}, vocab_size={self.vocab_size}, dtype={self.dtype}, device={self.device})"

    # --- likelihood and expected counts ---

    def scan(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        carry: Carry | None = None,
        restart: Tensor | None = None,
        exact_carry: bool = True,
    ) -> Scan:
        evidence = Evidence(tokens, lengths, None if carry is None else carry.over_all(self.states), restart)
        replayed = self._replay(evidence, exact_carry)
        return scan(self.parameters, evidence, self.impl, exact_carry) if replayed is None else replayed

    def _replay(self, evidence: Evidence, exact_carry: bool) -> Scan | None:
        """Return the scan of a batch from a CUDA graph, if its shape recurs."""
        if not evidence.tokens.is_cuda:
            return None
        return self._recorded_scans.run(self.parameters, evidence, self.impl, exact_carry)

    @cached_property
    def _recorded_scans(self) -> RecordedScans:
        return RecordedScans()

    def _log_likelihood(self, tokens: Tensor, lengths: Tensor | None, carry: Carry | None) -> Tensor:
        evidence = Evidence(*self._inside(tokens, lengths), None if carry is None else carry.over_all(self.states))
        replayed = self._replay(evidence, exact_carry=False)
        return log_likelihood(self.parameters, evidence, self.impl) if replayed is None else replayed.log_likelihood

    def _inside(self, tokens: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return tokens that are missing beyond a sequence's end, where they must not matter."""
        if lengths is None:
            return tokens, None
        return tokens.masked_fill(torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None], -1), lengths

    def _expected_counts(self, tokens: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Counts:
        evidence = Evidence(*self._inside(tokens, lengths))
        total, counts = expected_counts(self.parameters, evidence, weights, self.impl)
        return Counts(*counts, (total if weights is None else torch.where(weights > 0, weights * total, 0.0)).sum())

    def fit(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike | None = None,
        iterations: int = 100,
        tolerance: float = 1e-4,
        pseudocount: float = 0.0,
    ) -> "HMM":
        """Return the model after expectation maximization (Baum-Welch) on all sequences; this one stays unchanged.

        Every iteration raises the likelihood, unless there are pseudocounts. It stops after `iterations`, or when the
        log-likelihood per token rises by less than `tolerance`. For a corpus, use `hmmlm.train`.

        Args:
            pseudocount: added to every expected count.
        """
        check_count("iterations", iterations, 1)
        check_number("tolerance", tolerance)
        check_number("pseudocount", pseudocount)
        checked, sizes = check_batch(tokens, lengths, self.vocab_size, self.device)
        total = int(checked.numel() if sizes is None else sizes.sum())
        rows = max(1, _BULK_CELLS // (checked.shape[1] * self.states))
        pieces = [
            (checked[i : i + rows], None if sizes is None else sizes[i : i + rows])
            for i in range(0, len(checked), rows)
        ]
        model, before = self.detach(), NEG_INF
        for _ in range(iterations):
            counts = [model.expected_counts(*piece) for piece in pieces]
            start, transition, emission, log_likelihood = (sum(each[1:], each[0]) for each in zip(*counts, strict=True))
            if float(log_likelihood) == NEG_INF:
                model._possible(checked, sizes)  # names the impossible token
            if float(log_likelihood) - before < tolerance * total:
                break
            before = float(log_likelihood)
            model = HMM(
                maximize_rows(start, model.log_start, pseudocount),
                maximize_rows(transition, model.log_transition, pseudocount),
                maximize_rows(emission, model.log_emission, pseudocount),
                self.impl,
            )
        return model

    # --- operations of the queries: every support is all states ---

    @cached_property
    def _into(self) -> Tensor:
        return self.log_transition.t().contiguous()  # row = to-state

    @cached_property
    def forward_product(self) -> LogMatrix:
        """The transition [Z, Z], prepared for products."""
        return LogMatrix(self.log_transition)

    @cached_property
    def backward_product(self) -> LogMatrix:
        """The transition into each state [Z, Z], prepared for products."""
        return LogMatrix(self._into)

    @property
    def has_kernels(self) -> bool:
        """Whether the GPU kernels of constraints serve this model."""
        there = self.log_start.is_cuda or "TRITON_INTERPRET" in os.environ
        return there and self.dtype == torch.float32 and installed("triton")

    def guided_steps(self) -> GuidedSteps | CpuSteps | None:
        on_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        return self._guided_steps if on_cpu or self.has_kernels else None

    @cached_property
    def _guided_steps(self) -> GuidedSteps | CpuSteps:
        return GuidedSteps(self) if self.has_kernels else CpuSteps(self)

    @cached_property
    def row_peaks(self) -> Tensor:
        """The largest transition probability of each state [Z]."""
        return self.backward_product.peak.exp()

    @cached_property
    def emissions(self) -> EmissionMatrix:
        """The emission [Z, V], prepared for products."""
        return EmissionMatrix(self.log_emission)

    def observe(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        scores = self.log_emission.index_select(1, tokens.clamp(min=0) if missing else tokens).t().contiguous()
        if missing:
            explained = scores.new_zeros(()) if log_missing is None else log_missing
            scores = torch.where((tokens < 0)[:, None], explained, scores)
        return None, scores

    def _observed(self, batch: SortedBatch, log_missing: Tensor | None) -> Observations | None:
        """Return the emission scores of all steps; None if [T, B, Z] is too large to be held several times."""
        steps = len(batch.active)
        if steps * len(batch.tokens) * self.states > _BULK_CELLS:
            return None
        words, index = distinct(batch.tokens[:, :steps].t() + 1, self.vocab_size + 1)
        words -= 1
        return Observations(self.observe(words, bool(words[0] < 0), log_missing)[1], index, batch.active)

    def _observations(self, batch: SortedBatch, log_missing: Tensor | None = None) -> Iterator[tuple[Support, Tensor]]:
        given = self._observed(batch, log_missing)
        if given is None:
            return super()._observations(batch, log_missing)
        return ((None, here) for here in active_rows(given.at(given.scores), batch))

    def _forward(
        self, batch: SortedBatch, log_initial: Tensor | None = None, log_missing: Tensor | None = None
    ) -> Lattice:
        """See `HiddenMarkovModel._forward`; in products of probabilities, unless these may have underflowed."""
        given = self._observed(batch, log_missing)
        first = self.log_start.expand(len(batch.tokens), -1) if log_initial is None else self.pull(log_initial)
        result = None if given is None else filter_products(self.forward_product, first, given)
        if given is None or result is None:
            return super()._forward(batch, log_initial, log_missing)
        log_filtered, log_scales, scores = (active_rows(v, batch) for v in (*result, given.at(given.scores)))
        return Lattice(batch, [None] * len(scores), scores, log_filtered, log_scales, Stacked(given, result[0]))

    def _messages(self, lattice: Lattice) -> list[Tensor]:
        """See `HiddenMarkovModel._messages` and `_forward`."""
        stacked = lattice.stacked
        messages = None if stacked is None else message_products(self.backward_product, stacked.given)
        if stacked is None or messages is None:
            return super()._messages(lattice)
        messages.sub_((stacked.log_filtered + messages).logsumexp(2, keepdim=True))
        return active_rows(messages, lattice.batch)

    def _best_paths(self, batch: SortedBatch) -> tuple[Tensor, Tensor]:
        """See `HiddenMarkovModel._best_paths`; in compiled loops where these are faster."""
        pays = path_loops_pay(self.states, len(batch.tokens), self.device)
        if not pays or self.impl not in ("auto", "compiled"):
            return super()._best_paths(batch)
        from hmmlm.ops.scan.compiled import best_paths

        return best_paths(self.parameters, batch.tokens, batch.active)

    def restrict(self, values: Tensor, support: Support) -> Tensor:
        return values

    def spread(self, values: Tensor, support: Support, fill: float) -> Tensor:
        return values

    def state_ids(self, support: Support, index: Tensor) -> Tensor:
        return index

    def log_start_scores(self) -> Tensor:
        return self.log_start

    def pull(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        return self.forward_product.product(log_probs, normalized=True)

    def push(self, log_values: Tensor, source: Support = None, target: Support = None) -> Tensor:
        return self.backward_product.product(log_values)

    def push_probs(self, values: Tensor) -> Tensor:
        """Compute Σ_j A(i, j) values_j [n, Z] for values [n, Z] of at most 1; products below FLOOR may be lost."""
        return (values @ self.backward_product.scaled).mul_(self.row_peaks)

    def pull_max(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        return best_origins(log_probs, self._into)

    def origin_entropy(self, log_probs: Tensor, source: Support, target: Support) -> Tensor:
        return entropy_of_origins(log_probs, self.forward_product, self._into)

    def transitions_into(self, source: Support, states: Tensor) -> Tensor:
        return self._into[states]

    def transitions_from(self, states: Tensor) -> Tensor:
        return self.log_transition[states]

    def emissions_from(self, states: Tensor) -> tuple[Tensor, Tensor]:
        words = torch.arange(self.vocab_size, device=self.device)
        return words.expand(len(states), -1), self.log_emission[states]

    @torch.no_grad()
    def emit(self, log_states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Compute log Σ_z p(z) p(word | z) for log-distributions [..., Z]: [..., V], or [..., n] for `tokens` [n]."""
        check_log_state(log_states, self.states, self.device)
        if tokens is None:
            return self.detach().emissions.product(log_states)
        check_words(tokens, self.vocab_size)
        return logsumexp(log_states[..., None] + self.log_emission.index_select(1, tokens), -2)

    @property
    def column_of_word(self) -> Tensor | None:
        return self.detach().emissions.column_of

    @torch.no_grad()
    def emit_columns(self, log_states: Tensor) -> Tensor:
        return self.detach().emissions.matrix.product(log_states)

    @torch.no_grad()
    def emit_ratio(self, log_states: Tensor, log_base: Tensor, rows: list[int]) -> Tensor:
        return self.detach().emissions.matrix.ratio(log_states, log_base, rows)

    @torch.no_grad()
    def group_emission(self, group_of_word: Tensor, groups: int) -> Tensor:
        """Compute log p(a word of the group | z) [groups, Z] for a partition of the vocabulary, group_of_word [V]."""
        return self.detach().emissions.group_sums(group_of_word, groups)

    def joint_scores(self, origins: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moved = self.log_transition.flatten().index_select(0, origins * self.states + states)
        emitted = self.log_emission.flatten().index_select(0, states * self.vocab_size + tokens)
        return self.log_start.index_select(0, states), moved, emitted

    def carry_at(self, states: Tensor) -> Carry:
        certain = torch.full((len(states), self.states), NEG_INF, dtype=torch.float64, device=self.device)
        return Carry(certain.scatter_(1, states[:, None], 0.0))


def active_rows(values: Tensor, batch: SortedBatch) -> list[Tensor]:
    """Return the active rows of each step of values [T, B, …]."""
    return [here[:rows] for here, rows in zip(values.unbind(), batch.active, strict=True)]
