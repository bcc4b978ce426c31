"""Training a union further: it starts as the saved model, and its scan is that of the HMM it makes."""

from pathlib import Path

import pytest
import torch
from helpers.commands import failure, write_corpus
from helpers.oracle import random_blocked_hmm, random_hmm
from helpers.runs import WORDS, assert_same_run, fit_planted, planted
from test_cli_main import SMALL

from hmmlm.cli.main import main
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.hmm import HMM
from hmmlm.lm.lm import LanguageModel, load
from hmmlm.models.union import Union, UnionConfig

TOKENS = torch.randint(6, (4, 20), generator=torch.Generator().manual_seed(0))
RESTART = torch.rand(4, 20, generator=torch.Generator().manual_seed(1)) < 0.2


def joined() -> HMM:
    parts = [random_blocked_hmm(2, 4, 6, seed=1), random_blocked_hmm(3, 2, 6, seed=2)]
    return HMM.union([*parts, HMM.from_probs(*random_hmm(3, 6, seed=3))], [0.5, 0.2, 0.3])


def test_it_starts_as_the_saved_model() -> None:
    hmm = joined()
    torch.testing.assert_close(
        Union(hmm)().log_likelihood(TOKENS).double(), hmm.log_likelihood(TOKENS), rtol=1e-5, atol=1e-4
    )
    probs = random_hmm(3, 6, seed=4, zeros=0.5)
    zeros = HMM.union([HMM.from_probs(*probs)])
    other = Union(zeros)()
    other.validate()
    torch.testing.assert_close(other.dense().emission.log_probs.exp().double(), probs[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_scan_continues_over_windows(dropout: float) -> None:
    model = Union(joined(), dropout)
    torch.manual_seed(0)
    carry, total = None, torch.zeros(4)
    for first in range(0, 20, 6):
        window = slice(first, first + 6)
        result = model.scan(TOKENS[:, window], None, carry, RESTART[:, window])
        carry, total = result.carry, total + result.log_likelihood
        torch.testing.assert_close(carry.log_probs.exp().sum(1), torch.ones(4, dtype=torch.float64))
    want = joined().scan(TOKENS, None, None, RESTART).log_likelihood.float()
    if dropout:
        assert total.isfinite().all() and not torch.allclose(total, want)
    else:
        torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-4)
    total.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_gradient_of_the_weights_is_the_posterior() -> None:
    hmm = joined()
    model = Union(hmm)
    model.scan(TOKENS).log_likelihood.sum().backward()
    each = torch.stack([component.log_likelihood(TOKENS) for component in hmm.components])
    weights = hmm.log_weights.exp()
    posterior = (each + hmm.log_weights[:, None]).softmax(0)
    assert model.weights.grad is not None
    torch.testing.assert_close(model.weights.grad.double(), (posterior - weights[:, None]).sum(1), rtol=1e-4, atol=1e-4)


def test_training_lowers_the_perplexity_of_a_mixed_text(tmp_path: Path) -> None:
    """The text is drawn from a union; a union of other models, trained on it, gets near."""
    parts = [HMM.from_probs(*random_hmm(2, 6, seed=seed, sharpness=2.0)) for seed in (1, 2)]
    source = HMM.union(parts, [0.3, 0.7])
    data = planted(source.dense(), 400, 8)
    start = HMM.union([HMM.from_probs(*random_hmm(2, 6, seed=seed)) for seed in (3, 4)])
    LanguageModel(start, WordTokenizer(WORDS)).save(tmp_path / "start")
    sections = {
        "model": {"kind": "union", "joined": str(tmp_path / "start")},
        "batches": {"kind": "chunks", "batch_size": 16, "length": 8},
        "optimizer": {"lr": 0.05},
        "train": {"epochs": 6},
    }
    fit_planted(tmp_path / "run", data, **sections)
    lm, tokens = load(tmp_path / "run"), data.tokens["valid"].tokens.tolist()
    assert len(lm.hmm.components) == 2

    def score(hmm: HMM) -> float:
        own = LanguageModel(hmm, lm.tokenizer, lm.config)
        return float(own.score_sequences(own.sequences(tokens)).sum()) / len(tokens)

    assert score(lm.hmm) > score(start) + 0.5 * (score(source) - score(start))


@pytest.mark.slow
def test_a_run_of_lines_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "animals.txt")
    once = [*SMALL, "--train.epochs", "1", "--quiet"]
    blocked = ["--model.kind", "neural", "--model.num-states", "16", "--model.blocks", "4"]
    assert main(["train", "--data", str(corpus), *once, "--out", str(tmp_path / "dense")]) == 0
    assert main(["train", "--data", str(corpus), *once, *blocked, "--out", str(tmp_path / "blocked")]) == 0
    both = str(tmp_path / "both")
    assert main(["join", str(tmp_path / "dense"), str(tmp_path / "blocked"), "--weights", ".5,.5", "--out", both]) == 0
    union = ["--model.kind", "union", "--model.joined", both, "--model.dropout", "0.5"]
    start = ["train", "--data", str(tmp_path / "dense"), *union, *SMALL, "--quiet"]
    for name in ("whole", "again"):
        assert main([*start, "--train.epochs", "1", "--out", str(tmp_path / name)]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "again")
    hmm = load(tmp_path / "whole").hmm
    assert [part.num_states for part in hmm.components] == [4, 16]
    missing = [*start, "--model.joined", str(tmp_path / "none"), "--out", str(tmp_path / "new")]
    assert "no model at" in failure(capsys, *missing)
    other = write_corpus(tmp_path / "other.txt", lines=40)
    other.write_text(other.read_text().replace("cat", "unicorn"))
    wrong = ["train", "--data", str(other), *union, *SMALL, "--quiet", "--out", str(tmp_path / "new")]
    assert "another vocabulary" in failure(capsys, *wrong)
    assert not UnionConfig(joined=Path(both)).distillable
