"""Next-word distillation: a neural baseline draws words in place of those of the text, and the HMM learns from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.network_runs import interrupt_after, write_pairs
from helpers.runs import assert_same_run, tiny_config, write_text

from hmmlm.baselines.neural import load_baseline
from hmmlm.config.networks import BaselineConfig
from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.data.batches import StreamBatches
from hmmlm.data.tokenfile import TokenFile
from hmmlm.distillation.next_words import NEXT_WORDS, NextWordBatches
from hmmlm.errors import InputError
from hmmlm.learning.learners import AdamWLearner
from hmmlm.runs.progress import Progress
from hmmlm.training.estimate import estimate
from hmmlm.training.networks import train_baseline
from hmmlm.training.prepare import reopen
from hmmlm.training.train import train

NEURAL = {"kind": "neural", "num_states": 64, "blocks": 4, "hidden": 32, "dropout": 0.0}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a baseline that has learned which of eight words follows which."""
    folder = tmp_path_factory.mktemp("teacher")
    config = {
        "data": str(write_pairs(folder)),
        "model": {"kind": "feedforward", "order": 2, "hidden": 32, "layers": 1, "dropout": 0.0},
        "batches": {"batch_size": 8, "length": 16},
        "optimizer": {"lr": 0.03},
        "train": {"epochs": 6, "tensorboard": False, "device": "cpu"},
    }
    assert train_baseline(read_config(BaselineConfig, config), folder / "run").best_perplexity < 2.3
    return folder / "run"


def pairs_config(teacher: Path, epochs: int = 6, **next_words: Any) -> RunConfig:
    return tiny_config(
        teacher if teacher.exists() else "embedded",
        model=NEURAL,
        batches={"batch_size": 8, "length": 9, "reset_at_eos": True, "eval_reset_at_eos": True},
        optimizer={"lr": 0.01},
        train={"epochs": epochs},
        next_words={"teacher": teacher, **next_words},
    )


@pytest.mark.slow
def test_a_model_learns_from_the_words_of_its_teacher_alone(teacher: Path, tmp_path: Path) -> None:
    config = pairs_config(teacher, epochs=6, weight=1.0, drawn=8)
    assert train(config, tmp_path / "run").best_perplexity < 2.6  # the optimum is 2; a unigram has 8


def test_the_words_are_those_that_the_teacher_expects(teacher: Path, tmp_path: Path) -> None:
    config = pairs_config(teacher, epochs=1, drawn=256)
    train(config, tmp_path / "run")
    drawn, data = np.load(tmp_path / "run" / NEXT_WORDS), reopen(tmp_path / "run")
    tokens = np.asarray(data.tokens["train"].tokens)
    assert drawn.shape == (len(tokens), 256)
    assert drawn.dtype == np.uint16
    network, _ = load_baseline(teacher)
    with torch.no_grad():  # an order of 2: the previous word alone matters
        features, _ = network.read(torch.from_numpy(tokens[None, :40].astype(np.int64)), None)
        expected = network.logits(features)[0].softmax(1).numpy()
    for t in range(40):
        share = np.bincount(drawn[t], minlength=expected.shape[1]) / 256
        assert np.abs(share - expected[t]).max() < 0.15


@pytest.mark.slow
def test_resumed_runs_are_the_same(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pairs_config(teacher, epochs=2)
    assert train(config, tmp_path / "straight").finished
    with monkeypatch.context() as patch:
        interrupt_after(7, patch)
        assert not train(config, tmp_path / "resumed").finished
    assert train(config, tmp_path / "resumed", resume=True).finished
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


def test_a_run_resumes_without_its_teacher(teacher: Path, tmp_path: Path) -> None:
    own = shutil.copytree(teacher, tmp_path / "teacher", symlinks=True)
    config = pairs_config(own, epochs=1)
    assert train(config, tmp_path / "run").finished
    shutil.rmtree(own)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
    assert train(longer, tmp_path / "run", resume=True).epochs == 2
    (tmp_path / "run" / NEXT_WORDS).unlink()
    with pytest.raises(InputError, match=r"no model at .*teacher"):
        train(longer, tmp_path / "run", resume=True)


def test_a_dry_run_has_next_words(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[Any] = []
    step = AdamWLearner.step
    monkeypatch.setattr(AdamWLearner, "step", lambda *args: learned.append(args[1].next_words) or step(*args))
    estimate(pairs_config(teacher, samples=3), Progress())
    assert learned and all(words is not None and words.shape[2] == 3 for words in learned)


def test_batches_depend_on_seed_epoch_and_index_alone() -> None:
    tokens = np.arange(40) % 7
    file = TokenFile.from_arrays(tokens, np.array([0, 10, 25, 40]), 7)
    stored = (np.arange(40)[:, None] * 10 + np.arange(5)).astype(np.uint16)  # tells place and column
    inner = StreamBatches(file, 3, 4, shuffle=True, reset_at_eos=True, eos_id=1, seed=3)
    batches = NextWordBatches(inner, stored, samples=2, seed=3)
    whole = list(batches.epoch(1))
    assert all(torch.equal(a.next_words, b.next_words) for a, b in zip(whole[2:], batches.epoch(1, 2), strict=True))
    for batch in whole:
        known = batch.places >= 0
        assert torch.equal(batch.next_words[known] // 10, batch.places[known][:, None].expand(-1, 2))
    columns = torch.cat([batch.next_words.flatten() % 10 for batch in whole])
    assert set(columns.tolist()) == set(range(5))
    assert not torch.equal(whole[0].next_words, next(iter(batches.epoch(2))).next_words)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"kind": "scalar"}}, "next_words.teacher needs model.kind = 'neural'"),
        ({"model": {"kind": "mlp"}}, "next_words.teacher needs model.kind = 'neural'"),
        ({"next_words": {"samples": 9, "drawn": 8}}, r"next_words.samples \(9\) is more than next_words.drawn"),
    ],
)
def test_settings_that_do_not_fit(sections: dict[str, Any], message: str) -> None:
    values = {"model": NEURAL, **sections, "next_words": {"teacher": "x", **sections.get("next_words", {})}}
    with pytest.raises(InputError, match=message):
        read_config(RunConfig, values)


def test_a_teacher_of_another_vocabulary_is_refused(teacher: Path, tmp_path: Path) -> None:
    config = tiny_config(write_text(tmp_path), model=NEURAL, next_words={"teacher": teacher})
    with pytest.raises(InputError, match="has another vocabulary than this run"):
        train(config, tmp_path / "run")
    with pytest.raises(InputError, match=r"next_words.teacher: no folder .*none"):
        train(pairs_config(tmp_path / "none"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_stored_words_of_another_text_are_refused(teacher: Path, tmp_path: Path) -> None:
    config = pairs_config(teacher, epochs=1)
    train(config, tmp_path / "run")
    np.save(tmp_path / "run" / NEXT_WORDS, np.zeros((3, 2), np.uint16))
    longer = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 2})})
    with pytest.raises(InputError, match="remove it, and the teacher draws again"):
        train(longer, tmp_path / "run", resume=True)
