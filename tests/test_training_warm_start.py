"""Runs that start with a teacher: what they learn, what they store, and that they are resumed in every phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_teacher import LVD, FakeTeacher, use_fake_teacher
from helpers.runs import Interrupting, assert_same_run, fit_planted, planted, records, tiny_config, write_text

import hmmlm
from hmmlm.config.run import RunConfig
from hmmlm.distillation.kmeans import Clusters
from hmmlm.errors import InputError
from hmmlm.hmm import HMM
from hmmlm.learning.fit import Fit
from hmmlm.models.base import Model
from hmmlm.models.factored import LinearConfig
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.runs.folders import saved_config
from hmmlm.training.train import train

CHUNKS: dict[str, Any] = {"kind": "chunks", "batch_size": 8, "length": 16}
COUNTS: dict[str, Any] = {**LVD, "kind": "counts"}


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> FakeTeacher:
    """Return the teacher that every run of the test opens."""
    return use_fake_teacher(monkeypatch)


def trained(out: Path, by: FakeTeacher, model: dict[str, Any] | None = None, **start: Any) -> Fit:
    return fit_planted(
        out,
        planted(by.hmm, 160, 16),
        initialization=start,
        batches=CHUNKS,
        model=model or {"num_states": 6},
        optimizer={"lr": 0.3, "eps": 1e-8},
        train={"epochs": 1, "checks_per_epoch": 1},
    )


def test_an_informative_teacher_helps_at_equal_tokens(tmp_path: Path, teacher: FakeTeacher) -> None:
    plain = trained(tmp_path / "plain", teacher)
    taught = trained(tmp_path / "taught", teacher, **LVD)
    counted = trained(tmp_path / "counted", teacher, **COUNTS)
    assert plain.position.tokens == taught.position.tokens == counted.position.tokens
    assert taught.plateau.best < plain.plateau.best - 0.3
    assert counted.plateau.best < plain.plateau.best - 0.3
    losses = records(tmp_path / "taught", "train")
    assert [r.get("objective") for r in losses] == ["joint"] * 2 + [None] * (len(losses) - 2)
    assert losses[1]["tokens"] == 1_024  # the first batch beyond 1000 tokens: no record is of both objectives
    assert Clusters.load(tmp_path / "taught" / "clusters.safetensors").points == 800


class Inheriting(Model):
    """A family that returns a blocked HMM and inherits everything else."""

    def __init__(self, inner: Model) -> None:
        super().__init__(inner.num_states, inner.vocab_size)
        self.inner = inner

    def forward(self) -> HMM:
        return self.inner()


def test_a_blocked_family_that_inherits_scan_learns_from_labels(
    tmp_path: Path, teacher: FakeTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"kind": "linear", "num_states": 8, "blocks": 2, "hidden": 8}
    own = trained(tmp_path / "own", teacher, model, **LVD)
    build = LinearConfig.build
    monkeypatch.setattr(LinearConfig, "build", lambda *arguments: Inheriting(build(*arguments)))
    inheriting = trained(tmp_path / "inheriting", teacher, model, **LVD)
    assert inheriting.plateau.best == pytest.approx(own.plateau.best, rel=1e-3)


def test_cached_labels_train_the_same_model(tmp_path: Path, teacher: FakeTeacher) -> None:
    trained(tmp_path / "fly", teacher, **LVD)
    trained(tmp_path / "cached", teacher, **LVD, labels="cached")
    ours, theirs = (hmmlm.load(tmp_path / name / "final").hmm.tensors() for name in ("fly", "cached"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_baum_welch_learns_from_labels(tmp_path: Path, teacher: FakeTeacher) -> None:
    fit = fit_planted(
        tmp_path / "run",
        planted(teacher.hmm, 160, 16),
        initialization=LVD,
        batches=CHUNKS,
        train={"epochs": 1, "checks_per_epoch": 1},
        schedule={"kind": "constant"},
        optimizer={"kind": "baum-welch", "full_batch": False, "pseudocount": 0.1, "step": 0.3},
    )
    assert records(tmp_path / "run", "train")[0]["objective"] == "joint"
    assert fit.plateau.best < 1.6  # a uniform guess is log 6 = 1.79


def test_embeddings_are_frozen_through_both_phases_and_when_resumed(tmp_path: Path, teacher: FakeTeacher) -> None:
    start = {**LVD, "tokens": 100, "kmeans": {"tokens": 300, "passes": 2}, "centroids": True, "frozen_tokens": 300}
    model = {"kind": "linear", "hidden": 6, "init": "normal"}
    config = tiny_config(write_text(tmp_path), initialization=start, model=model)
    assert train(config, tmp_path / "straight").finished
    states, others = [], []
    for after in (2, 8, 9):
        resume = (tmp_path / "run").exists()
        result = train(config, tmp_path / "run", resume, Interrupting("train", after))
        assert not result.finished and (result.tokens < 300) == (after < 9)
        tensors, _ = read_checkpoint(tmp_path / "run" / "last")
        states.append(tensors["parameters.embeddings.0"])
        others.append(tensors["parameters.emission"])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    assert not torch.equal(others[0], others[1])
    assert train(config, tmp_path / "run", resume=True).finished
    assert_same_run(tmp_path / "run", tmp_path / "straight")


# --- resume ---

SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"batches": {"kind": "chunks", "batch_size": 8, "length": 8}},
    "stream": {"batches": {"reset_at_eos": True}},
    "blocked": {"model": {"kind": "neural", "blocks": 2, "hidden": 8, "dropout": 0.5}},
    "cached": {"initialization": {"labels": "cached"}},
    "pca": {"initialization": {"kmeans": {"tokens": 300, "passes": 2, "pca": 3}}},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_interrupted_before_during_and_after_the_joint_phase(kind: str, tmp_path: Path, teacher: FakeTeacher) -> None:
    sections = {**SETTINGS[kind]}
    start = {**LVD, "tokens": 220, "kmeans": {"tokens": 300, "passes": 2}, **sections.pop("initialization", {})}
    config = tiny_config(write_text(tmp_path), initialization=start, **sections)
    straight = train(config, tmp_path / "straight")
    assert straight.finished and straight.tokens > 300
    calls, tokens = teacher.calls, []
    for phase, after in (("embedding", 1), ("train", 2), ("train", 3), ("train", 4), ("train", 3)):
        resume = (tmp_path / "run").exists()
        result = train(config, tmp_path / "run", resume, Interrupting(phase, after))
        assert not result.finished
        tokens.append(result.tokens)
    assert 0 < tokens[1] < 220 < tokens[-1]  # in the joint phase, and after it
    last = teacher.calls
    assert train(saved_config(RunConfig, tmp_path / "run"), tmp_path / "run", resume=True).finished
    assert teacher.calls == last > calls  # after the joint phase the teacher is not used
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    ours, theirs = (Clusters.load(tmp_path / run / "clusters.safetensors") for run in ("run", "straight"))
    assert torch.equal(ours.centroids, theirs.centroids)
    assert ours.centroids.shape[2] == (3 if kind == "pca" else 6)


def test_a_start_from_counts_is_resumed(tmp_path: Path, teacher: FakeTeacher) -> None:
    start = {**COUNTS, "tokens": 200, "kmeans": {"tokens": 300, "passes": 2}}
    config = tiny_config(write_text(tmp_path), initialization=start)
    assert train(config, tmp_path / "straight").finished
    for phase, after in (("embedding", 1), ("counting", 2), ("train", 2), ("train", 9)):
        resume = (tmp_path / "run").exists()
        assert not train(config, tmp_path / "run", resume, Interrupting(phase, after)).finished
    calls = teacher.calls
    assert train(config, tmp_path / "run", resume=True).finished
    assert teacher.calls == calls  # the counts are in the checkpoint
    assert_same_run(tmp_path / "run", tmp_path / "straight")


# --- clusters of another run, and errors ---


def test_clusters_of_another_run_can_be_used(tmp_path: Path, teacher: FakeTeacher) -> None:
    first = trained(tmp_path / "first", teacher, **LVD)
    calls, path = teacher.calls, tmp_path / "first" / "clusters.safetensors"
    second = trained(tmp_path / "second", teacher, **LVD, clusters=str(path))
    assert teacher.calls - calls < calls
    assert second.plateau.best == first.plateau.best
    with pytest.raises(InputError, match=r"1 × 6 clusters \(blocks × states\), this model 1 × 5"):
        trained(tmp_path / "third", teacher, {"num_states": 5}, **LVD, clusters=str(path))
    with pytest.raises(InputError, match=r"kmeans\.pca is 7, and the embeddings of the teacher have 6 dimensions"):
        trained(tmp_path / "wide", teacher, **{**LVD, "kmeans": {"tokens": 300, "pca": 7}})
    teacher.hidden_size = 9
    with pytest.raises(InputError, match="has embeddings of 6 dimensions, the teacher fake 9"):
        trained(tmp_path / "fourth", teacher, **LVD, clusters=str(path))
    with pytest.raises(InputError, match=r"initialization\.clusters: no file .*none"):
        trained(tmp_path / "fifth", teacher, **LVD, clusters=str(tmp_path / "none"))
    assert not (tmp_path / "fifth").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"initialization": {"kind": "lvd"}}, "initialization.teacher: required for initialization.kind = 'lvd'"),
        (
            {"initialization": {"teacher": "x"}},
            "unknown setting initialization.teacher for initialization.kind = 'none'",
        ),
        ({"initialization": COUNTS, "model": {"kind": "linear"}}, "'counts' needs model.kind = 'scalar'"),
        ({"initialization": COUNTS, "model": {"blocks": 2}}, "'counts' needs model.kind = 'scalar' and model.blocks"),
        (
            {"initialization": LVD, "model": {"kind": "uniform", "num_states": 128}},
            "does not support model.kind = 'uniform'",
        ),
        (
            {"initialization": LVD, "model": {"num_states": 900}},
            r"kmeans.tokens \(800\) must be at least model.num_states",
        ),
        ({"initialization": {**LVD, "frozen_tokens": 9}}, "frozen_tokens freezes what centroids and head set"),
        ({"initialization": {**LVD, "centroids": True}}, "need model.kind linear, mlp or transformer"),
        (
            {"initialization": {**LVD, "head": True}, "model": {"kind": "linear", "factor_emission": False}},
            "initialization.head needs model.factor_emission = true",
        ),
    ],
)
def test_impossible_configurations(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_config("unused", **sections)


def test_fewer_tokens_than_states(tmp_path: Path, teacher: FakeTeacher) -> None:
    with pytest.raises(InputError, match="has 640 tokens, fewer than the 700 states"):
        fit_planted(tmp_path / "run", planted(teacher.hmm, 40, 16), initialization=LVD, model={"num_states": 700})
    assert not (tmp_path / "run").exists()


def test_embeddings_of_another_width(tmp_path: Path, teacher: FakeTeacher) -> None:
    start, model = {**LVD, "centroids": True}, {"kind": "linear", "hidden": 5}
    with pytest.raises(InputError, match=r"a centroid has 6 dimensions and model\.hidden is 5"):
        fit_planted(tmp_path / "run", planted(teacher.hmm, 40, 16), initialization=start, model=model)
    assert not (tmp_path / "run").exists()


def test_a_missing_layer_of_the_teacher_is_named_before_any_work(tmp_path: Path, teacher: FakeTeacher) -> None:
    with pytest.raises(InputError, match="the teacher has no layer 5"):
        train(tiny_config(write_text(tmp_path), initialization={**LVD, "layer": 5}), tmp_path / "run")
    assert not (tmp_path / "run").exists() and not teacher.calls


def test_an_unknown_teacher_is_named_before_any_work(tmp_path: Path) -> None:
    config = tiny_config(write_text(tmp_path), initialization={**LVD, "teacher": str(tmp_path / "nobody")})
    with pytest.raises(InputError, match="nobody"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
