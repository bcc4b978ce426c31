"""The operations that each kind of hidden Markov model implements, and the types of results."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from hmmlm.numerics.logmatrix import log_ratio
from hmmlm.ops.common import Carry, Scan

__all__ = ["Carry", "Counts", "Filtered", "Primitives", "Scan", "Support"]

Support = Any
"""The states that a row of values covers: None for all states; other values are private to the kind of HMM."""
Self = TypeVar("Self", bound="Primitives")


class Filtered(NamedTuple):
    """Result of filtering: the distribution of the state given the tokens so far."""

    log_likelihood: Tensor  # [B]
    carry: Carry
    """For the next window of the same sequences."""
    probs: Tensor  # [B, T, Z] p(z_t | x_1..t); zero beyond a sequence's length


class Predictions(NamedTuple):
    """p(next word | words before) at some positions of a batch."""

    sequence: Tensor  # [n]
    step: Tensor  # [n] t, from 0
    possible: Tensor  # [n] bool, whether the words before are possible
    log_observed: Tensor  # [n] log p(x_t | x_1..t−1) of the word there; −inf from an impossible one on
    probs: Tensor  # [n, W] p(x_t = v | x_1..t−1) of words v; zero after an impossible word


class Counts(NamedTuple):
    """Expected counts under the posterior, summed over the batch (the E step of Baum-Welch)."""

    start: Tensor  # [Z]
    transition: Tensor  # [Z, Z]
    emission: Tensor  # [Z, V]
    log_likelihood: Tensor  # [] of all sequences


class Primitives(ABC):
    """The operations that every kind of HMM implements; `hmmlm.hmm.queries` is written with them.

    An HMM has Z states and V words. Tokens are integers [B, T]; −1 is a missing token, which is summed over; `lengths`
    [B] gives ragged batches. Code outside `hmmlm.hmm` does not depend on the kind.
    """

    kind: ClassVar[str]
    """The name of the kind in model files."""
    TENSORS: ClassVar[dict[str, str]]
    """The tensors of a model file and their dimensions: Z states, V words, ? any."""
    INDICES: ClassVar[tuple[str, ...]] = ()
    """Those of them that are int64."""

    @property
    @abstractmethod
    def states(self) -> int: ...
    @property
    @abstractmethod
    def vocab_size(self) -> int: ...
    @property
    @abstractmethod
    def device(self) -> torch.device: ...
    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def requires_grad(self) -> bool: ...

    # --- representation ---

    @classmethod
    def layout(cls, names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the tensors of a model file that has `names`, with their dimensions, and those that are int64."""
        return cls.TENSORS, cls.INDICES

    @classmethod
    def from_tensors(cls: type[Self], tensors: Mapping[str, Tensor]) -> Self:
        """Return the model from the tensors of a model file."""
        return cls(**{name: tensors[name] for name in cls.TENSORS})

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, as a model file stores them."""

    @abstractmethod
    def validate(self) -> None:
        """Raise an InputError that names the first tensor with a distribution that does not sum to one."""

    @abstractmethod
    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Return the model on another device or in another dtype, like `Tensor.to`."""

    @abstractmethod
    def dense(self) -> Any:
        """Return the same model with dense matrices, as an `HMM`."""

    @abstractmethod
    def detach(self: Self) -> Self:
        """Return the model without gradients; the model itself, with its caches, if it requires none."""

    # --- likelihood ---

    @abstractmethod
    def scan(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        carry: Carry | None = None,
        restart: Tensor | None = None,
        exact_carry: bool = True,
    ) -> Scan:
        """Compute log p(x) [B], differentiable, and the carry of a training or evaluation batch; nothing is checked.

        Args:
            carry: of the previous window; position 0 continues from it unless it restarts.
            restart: [B, T] bool, True where the chain restarts from the start distribution.
            exact_carry: also recompute sequences of which only the carry underflows; training does without.
        """

    @abstractmethod
    def _log_likelihood(self, tokens: Tensor, lengths: Tensor | None, carry: Carry | None) -> Tensor:
        """Compute log p(x) [B], differentiable, of checked tokens and carry."""

    @abstractmethod
    def _expected_counts(self, tokens: Tensor, lengths: Tensor | None, weights: Tensor | None) -> Counts:
        """Compute the expected counts of checked tokens; a sequence counts `weights` [B] times (None: once)."""

    # --- operations of the recursions ---

    @abstractmethod
    def observe(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        """Return the states that can emit tokens [n], and log p(x | z) [n, K] over them.

        Args:
            missing: whether some token is −1; its score is `log_missing` [Z] (by default zero).
        """

    @abstractmethod
    def restrict(self, values: Tensor, support: Support) -> Tensor:
        """Restrict values [n, Z] to a support [n, K]."""

    @abstractmethod
    def spread(self, values: Tensor, support: Support, fill: float) -> Tensor:
        """Return values [n, K] over a support as values over all states [n, Z], `fill` outside the support."""

    @abstractmethod
    def state_ids(self, support: Support, index: Tensor) -> Tensor:
        """Return the states [..., n] at positions `index` [..., n] of a support."""

    @abstractmethod
    def log_start_scores(self) -> Tensor:
        """Return log p(z_1) [Z]."""

    @abstractmethod
    def pull(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        """Compute log Σ_i p_i A[i, j] [n, K'] for distributions log_probs [n, K] over the source."""

    @abstractmethod
    def pull_max(self, log_probs: Tensor, source: Support = None, target: Support = None) -> Tensor:
        """Compute max_i log p_i + log A[i, j] [n, K'] for log_probs [n, K] over the source."""

    @abstractmethod
    def push(self, log_values: Tensor, source: Support = None, target: Support = None) -> Tensor:
        """Compute log Σ_j A[i, j] v_j [n, K] for log_values [n, K'] over the target."""

    @abstractmethod
    def origin_entropy(self, log_probs: Tensor, source: Support, target: Support) -> Tensor:
        """Compute the entropy of p(i | j) ∝ p_i A[i, j] for each target j [n, K'], given log_probs [n, K]."""

    @abstractmethod
    def transitions_into(self, source: Support, states: Tensor) -> Tensor:
        """Return log A[i, j] [..., n, K] from the states i of a source support into states j [..., n]."""

    @abstractmethod
    def transitions_from(self, states: Tensor) -> Tensor:
        """Return log A[i, j] [n, Z] from states i [n]."""

    @abstractmethod
    def emissions_from(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words that states z [n] can emit [n, W], and log p(word | z) [n, W]; −inf for padding."""

    @abstractmethod
    def emit(self, log_states: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Compute log Σ_z p(z) p(word | z) for log-distributions [..., Z]: [..., V], or [..., n] for `tokens` [n]."""

    @property
    def column_of_word(self) -> Tensor | None:
        """The number [V] of each word's column of the emission, if equal columns are stored once."""
        return None

    def emit_columns(self, log_states: Tensor) -> Tensor:
        """Compute `emit` for each column [..., U] that `column_of_word` numbers."""
        return self.emit(log_states)

    def emit_ratio(self, log_states: Tensor, log_base: Tensor, rows: list[int]) -> Tensor:
        """Compute emit_columns(log_states) − emit_columns(log_base)[rows] [n, U]; −inf where the first is.

        Args:
            log_states: [n, Z]
            log_base: [b, Z]
            rows: [n]
        """
        emitted = self.emit_columns(torch.cat([log_base, log_states]))
        return log_ratio(emitted[len(log_base) :], emitted[: len(log_base)][rows])

    @abstractmethod
    def group_emission(self, group_of_word: Tensor, groups: int) -> Tensor:
        """Compute log p(a word of the group | z) [groups, Z] for a partition of the vocabulary, group_of_word [V]."""

    @abstractmethod
    def joint_scores(self, origins: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log π(s), log A(origin, s) and log O(s, x), each [n], differentiable, for single states and tokens."""

    @abstractmethod
    def carry_at(self, states: Tensor) -> Carry:
        """Return the carry of chains that are known to be in `states` [n]."""
