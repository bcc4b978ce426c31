"""Which states may emit which words: a partition into blocks, or a subset of states drawn for each word."""

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
    """A partition of V words and Z states into M blocks; a state emits the words of its block and no others.

    States of block m are m·k .. (m+1)·k − 1. One block (M = 1) is no constraint.
    """

    block_of_word: Tensor  # [V] int64
    num_blocks: int  # M
    states_per_block: int  # k
    words: Tensor  # [V] int64, all words sorted by block, within a block by id
    word_start: Tensor  # [M+1] int64, offsets of the blocks in `words`
    index_in_block: Tensor  # [V] int64, position of a word among its block's words

    @classmethod
    def from_clusters(cls, cluster: Tensor | np.ndarray, states: int, *, vocab_size: int | None = None) -> "Blocks":
        """Blocks from the cluster 0..M−1 of each word ([V]) and the number of states Z = M·k.

        vocab_size: when given, the clusters have to be for a vocabulary of this size.
        """
        block_of_word = torch.as_tensor(cluster).to("cpu", torch.int64)
        if vocab_size is not None and len(block_of_word) != vocab_size:
            raise InputError(
                f"clusters for another vocabulary: {len(block_of_word)} words are clustered, "
                f"the vocabulary has {vocab_size}; cluster the text with this vocabulary"
            )
        if len(block_of_word) == 0:
            raise InputError("no words: blocks need at least one")
        homeless = (block_of_word < 0).nonzero().flatten().tolist()
        if homeless:
            raise InputError(f"{len(homeless)} words are in no block (ids {_some(homeless)}): place every word")
        widths = torch.bincount(block_of_word)
        num_blocks = len(widths)
        empty = (widths == 0).nonzero().flatten().tolist()
        if empty:
            raise InputError(f"{len(empty)} of {num_blocks} blocks have no word ({_some(empty)}): number blocks 0..M−1")
        if states < 1 or states % num_blocks:
            raise InputError(
                f"{states} states do not divide into {num_blocks} blocks of equal size: use a multiple of {num_blocks}"
            )
        words = torch.sort(block_of_word, stable=True).indices
        word_start = torch.cat([torch.zeros(1, dtype=torch.int64), widths.cumsum(0)])
        index_in_block = torch.empty_like(words)
        index_in_block[words] = torch.arange(len(words)) - word_start[block_of_word[words]]
        return cls(block_of_word, num_blocks, states // num_blocks, words, word_start, index_in_block)

    @classmethod
    def from_words(cls, words_of_block: Sequence[Sequence[int]], vocab_size: int, states: int) -> "Blocks":
        """Blocks from the ids of the words of each block."""
        block_of_word = torch.full((vocab_size,), -1)
        for block, words in enumerate(words_of_block):
            if len(words) == 0:
                raise InputError(f"block {block} of {len(words_of_block)} has no word: leave it out")
            for word in words:
                if not 0 <= word < vocab_size:
                    raise InputError(
                        f"clusters for another vocabulary: word {word} of block {block} is not among {vocab_size} words"
                    )
                other = int(block_of_word[word])
                if other >= 0:
                    raise InputError(f"word {word} is in two blocks ({other} and {block}): a word has one block")
                block_of_word[word] = block
        return cls.from_clusters(block_of_word, states)

    @property
    def states(self) -> int:
        return self.num_blocks * self.states_per_block

    @property
    def vocab_size(self) -> int:
        return len(self.block_of_word)

    @property
    def widths(self) -> Tensor:
        """[M] words in each block."""
        return self.word_start.diff()

    @property
    def device(self) -> torch.device:
        return self.block_of_word.device

    def mask(self) -> Tensor:
        """[Z,V] bool: may this state emit this word? For small sizes: this is what blocks are there to avoid."""
        block_of_state = torch.arange(self.states, device=self.device) // self.states_per_block
        return block_of_state[:, None] == self.block_of_word

    def to(self, device: torch.device | str) -> "Blocks":
        return Blocks(
            self.block_of_word.to(device),
            self.num_blocks,
            self.states_per_block,
            self.words.to(device),
            self.word_start.to(device),
            self.index_in_block.to(device),
        )


@dataclass(frozen=True, eq=False)
class UniformSubsets:
    """For each word a subset of n of the Z states that may emit it, not a partition (Chiu & Rush 2020, Table 3)."""

    states_of_word: Tensor  # [V,n] int64, ascending
    states: int  # Z

    @classmethod
    def sample(cls, vocab_size: int, states: int, states_per_word: int, *, seed: int) -> "UniformSubsets":
        """Draw each word's n states independently, uniformly, without replacement.

        A state that no word drew could not emit anything, so that is an error; with V·n well above Z·log Z it is not
        met in practice.
        """
        if not 1 <= states_per_word <= states:
            raise InputError(f"{states_per_word} states a word cannot be drawn from {states}: use 1 to {states}")
        random = np.random.default_rng(seed)
        draws = [random.choice(states, states_per_word, replace=False, shuffle=False) for _ in range(vocab_size)]
        states_of_word = torch.from_numpy(np.sort(np.array(draws, dtype=np.int64), axis=1))
        idle = (torch.bincount(states_of_word.flatten(), minlength=states) == 0).nonzero().flatten().tolist()
        if idle:
            raise InputError(
                f"{len(idle)} of {states} states ({_some(idle)}) have no word when each of {vocab_size} words draws "
                f"{states_per_word}: use fewer states or more states a word"
            )
        return cls(states_of_word, states)

    @property
    def vocab_size(self) -> int:
        return len(self.states_of_word)

    def mask(self) -> Tensor:
        """[Z,V] bool: may this state emit this word?"""
        by_word = torch.zeros(self.vocab_size, self.states, dtype=torch.bool, device=self.states_of_word.device)
        return by_word.scatter_(1, self.states_of_word, True).T.contiguous()

    def to(self, device: torch.device | str) -> "UniformSubsets":
        return UniformSubsets(self.states_of_word.to(device), self.states)
