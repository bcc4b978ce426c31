"""A language model whose states are known, for the tests of reports."""

import torch

from hmmlm.data.words import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel

WORDS = ["<unk>", "<eos>", "the", "cat", "dog", "runs"]


def sentence_model() -> LanguageModel:
    """Determiner → noun → verb → <eos> → …: every state has its words and its follower; nouns may be unknown."""
    start = [1.0, 0, 0, 0]
    transition = torch.eye(4).roll(1, dims=1)
    emission = [[0, 0, 1, 0, 0, 0], [0.2, 0, 0, 0.5, 0.3, 0], [0, 0, 0, 0, 0, 1.0], [0, 1.0, 0, 0, 0, 0]]
    return LanguageModel(HMM.from_probs(start, transition, torch.tensor(emission)), WordTokenizer(WORDS))
