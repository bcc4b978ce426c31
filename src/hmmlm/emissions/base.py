"""The interface of emissions, O[z, v] = p(x_t = v | z_t = z)."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hmmlm.numerics.support import Support
from hmmlm.numerics.tables import Tables


class Emission(Tables):
    """An emission of V words by Z states. A token −1 is missing: it is summed over."""

    role = "emission"

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def score(self, tokens: Tensor, missing: bool, log_missing: Tensor | None = None) -> tuple[Support, Tensor]:
        """Return the states that can emit tokens [n], and log p(x | z) [n, K] over them.

        Args:
            missing: whether some token is −1; its score is `log_missing` [Z] (by default zero).
        """

    @abstractmethod
    def word_log_probs(self, log_states: Tensor, words: Tensor | None = None) -> Tensor:
        """Compute log Σ_z p(z) p(word | z) for log-distributions [..., Z]: [..., V], or [..., n] for `words` [n]."""

    @abstractmethod
    def group_log_probs(self, group_of_word: Tensor, groups: int) -> Tensor:
        """Compute log p(a word of the group | z) [groups, Z] for a partition of the vocabulary, group_of_word [V]."""

    @abstractmethod
    def log_rows(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words that states z [n] can emit [n, W], and log p(word | z) [n, W]; −inf for padding."""

    @abstractmethod
    def log_entries(self, states: Tensor, words: Tensor) -> Tensor:
        """Return log p(word | z) [n] of pairs, differentiable."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return log O [Z, V]."""

    @abstractmethod
    def gradient(self, tokens: Tensor, posterior: Tensor, support: Support) -> dict[str, Tensor]:
        """Compute Σ_n posterior_n [n, K] of the states that emit tokens [n], in the shapes of the tensors."""

    # --- words whose columns are equal, stored once ---

    @property
    def column_of_word(self) -> Tensor | None:
        """The number [V] of each word's column, if equal columns are stored once."""
        return None

    def column_log_probs(self, log_states: Tensor) -> Tensor:
        """Compute `word_log_probs` for each column [..., U] that `column_of_word` numbers."""
        return self.word_log_probs(log_states)
