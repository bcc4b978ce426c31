"""Emission structure, which states may emit which words: a partition into blocks, or a random subset per word."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hmmlm.errors import InputError


def _some(items: Sequence[int], limit: int = 5) -> str:
    return ", ".join(str(item) for item in items[:limit]) + (", …" if len(items) > limit else "")


@dataclass(frozen=True, eq=False)
class Blocks:
    """A partition of V words and Z states into M blocks; a state emits only the words of its block.

    The states of block m are m·k .. (m+1)·k − 1. One block (M = 1) is no constraint.
    """

    block_of_word: Tensor  # [V] int64
    num_blocks: int  # M
    states_per_block: int  # k

    @classmethod
    def from_clusters(cls, cluster: Tensor | np.ndarray, states: int, *, vocab_size: int | None = None) -> "Blocks":
        """Create blocks from the cluster 0..M−1 of each word [V] and the number of states Z = M·k.

        Args:
            vocab_size: if given, the number of words that must be clustered.
        """
        block_of_word = torch.as_tensor(cluster).to("cpu", torch.int64)
        if vocab_size is not None and len(block_of_word) != vocab_size:
            raise InputError(
                f"the clusters belong to another vocabulary: {len(block_of_word)} words are clustered, "
                f"the vocabulary has {vocab_size}; cluster the text with this vocabulary"
            )
        if len(block_of_word) == 0:
            raise InputError("the vocabulary is empty: blocks need at least one word")
        unassigned = (block_of_word < 0).nonzero().flatten().tolist()
        if unassigned:
            raise InputError(f"the words of ids {_some(unassigned)} have no block: give each one")
        widths = torch.bincount(block_of_word)
        num_blocks = len(widths)
        empty = (widths == 0).nonzero().flatten().tolist()
        if empty:
            raise InputError(
                f"{len(empty)} of {num_blocks} blocks have no words ({_some(empty)}): leave no gaps in 0..M−1"
            )
        if states < 1 or states % num_blocks:
            raise InputError(
                f"{states} states do not divide into {num_blocks} blocks of equal size: use a multiple of {num_blocks}"
            )
        return cls(block_of_word, num_blocks, states // num_blocks)

    @property
    def num_states(self) -> int:
        return self.num_blocks * self.states_per_block

    @property
    def vocab_size(self) -> int:
        return len(self.block_of_word)

    @property
    def device(self) -> torch.device:
        return self.block_of_word.device

    def to(self, device: torch.device | str) -> "Blocks":
        return Blocks(self.block_of_word.to(device), self.num_blocks, self.states_per_block)


@dataclass(frozen=True, eq=False)
class UniformSubsets:
    """For each word, the n of Z states that may emit it; subsets may overlap (Chiu & Rush 2020, Table 3)."""

    states_of_word: Tensor  # [V,n] int64, ascending
    num_states: int  # Z

    @classmethod
    def sample(cls, vocab_size: int, states: int, states_per_word: int, *, seed: int) -> "UniformSubsets":
        """Draw the n states of each word independently and uniformly, without replacement.

        A state that no word has drawn could not emit anything, so it is an error. This does not occur in practice if
        V·n is well above Z·log Z.
        """
        if not 1 <= states_per_word <= states:
            raise InputError(f"{states_per_word} states per word cannot be drawn from {states}: use 1 to {states}")
        random = np.random.default_rng(seed)
        draws = [random.choice(states, states_per_word, replace=False, shuffle=False) for _ in range(vocab_size)]
        states_of_word = torch.from_numpy(np.sort(np.array(draws, dtype=np.int64), axis=1))
        idle = (torch.bincount(states_of_word.flatten(), minlength=states) == 0).nonzero().flatten().tolist()
        if idle:
            raise InputError(
                f"{len(idle)} of {states} states ({_some(idle)}) have no words when each of {vocab_size} words draws "
                f"{states_per_word}: use fewer states or more states per word"
            )
        return cls(states_of_word, states)

    @property
    def vocab_size(self) -> int:
        return len(self.states_of_word)

    def to(self, device: torch.device | str) -> "UniformSubsets":
        return UniformSubsets(self.states_of_word.to(device), self.num_states)
