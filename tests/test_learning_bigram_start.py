"""Where training starts: at a bigram, or at the best of several starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import records, tiny_config, write_text

import hmmlm
from hmmlm.baselines.ngram import NgramModel
from hmmlm.data.tokenfile import TokenFile
from hmmlm.errors import InputError
from hmmlm.learning.bigram_start import assign_bigram
from hmmlm.models.scalar import BlockedScalar
from hmmlm.runs.progress import Progress
from hmmlm.structure.blocks import Blocks
from hmmlm.training.prepare import word_blocks
from hmmlm.training.train import train
from papers.defaults import two_states

EOS, WORDS = 1, 12


@pytest.fixture(scope="module")
def text() -> TokenFile:
    tokens = np.random.default_rng(0).zipf(1.6, 4_000) % WORDS
    tokens[-1] = EOS
    return TokenFile.from_arrays(tokens, np.array([0, len(tokens)]), WORDS)


@pytest.mark.parametrize(("states_per_word", "tolerance"), [(1, 1e-6), (3, 0.02)])
def test_a_model_of_single_words_starts_as_their_kneser_ney_bigram(
    text: TokenFile, states_per_word: int, tolerance: float
) -> None:
    blocks = Blocks.from_clusters(torch.tensor(word_blocks(text, WORDS, Progress())), WORDS * states_per_word)
    model = BlockedScalar(blocks, dropout=0.0)
    assign_bigram(model, text, EOS, restarts=True, seed=0)
    with torch.no_grad():
        hmm, line = model(), [3, 5, 2, 2, 7, EOS]
    hmm.validate()
    bigram = NgramModel(np.asarray(text.tokens), WORDS, 2, EOS)
    assert float(hmm.log_likelihood([line])) == pytest.approx(bigram.log_probs(line).sum(), rel=tolerance)


def test_frequent_words_have_blocks_of_their_own_and_no_block_is_empty(text: TokenFile) -> None:
    found = np.array(word_blocks(text, 8, Progress()))
    assert np.unique(found).tolist() == list(range(8))
    frequent = np.argsort(-text.word_counts(), kind="stable")[:6]
    assert all((found == found[word]).sum() == 1 for word in frequent)
    with pytest.raises(InputError, match="the vocabulary has 12 words"):
        word_blocks(text, 13, Progress())


def test_the_best_start_is_trained_to_the_end(tmp_path: Path) -> None:
    notes: list[str] = []

    class Notes(Progress):
        def note(self, line: str) -> None:
            notes.append(line)

    config = tiny_config(write_text(tmp_path), train={"restarts": 3, "log_every": 1, "epochs": 8})
    train(config, tmp_path / "run", progress=Notes())
    starts = [float(note.rpartition(" ")[2]) for note in notes if note.startswith("start with seed")]
    assert len(set(starts)) == 3
    once = tiny_config(config.data, train={"log_every": 1, "epochs": 8})
    train(once, tmp_path / "once")
    # The first step is on the same batch, from parameters that the best start has reached instead of random ones.
    first, random = (records(tmp_path / run, "train")[0]["loss"] for run in ("run", "once"))
    assert first < random - 0.1


@pytest.mark.slow
def test_two_states_are_found_by_default(tmp_path: Path) -> None:
    text = tmp_path / "two-states.txt"
    text.write_text("".join(f"{line}\n" for line in two_states()))
    for seed in (0, 1):
        lm = hmmlm.train(text, tmp_path / f"run{seed}", model={"num_states": 2}, train={"seed": seed})
        assert lm.perplexity(list(two_states())[-100:]) < 3.6  # 3.5 of the chain itself, 4.3 of a unigram
