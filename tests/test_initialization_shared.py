"""Clusters and labels that runs share: what is shared, what is not, and that sharing changes no result."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning_runs import planted, tiny_config
from test_initialization_lvd import LVD, FakeTeacher, teacher  # noqa: F401 (a fixture)

from hmmlm.data.batches import ChunkBatches
from hmmlm.data.tokenfile import TokenFile
from hmmlm.initialization.clustering import Clusters
from hmmlm.initialization.shared import LabelStore, name_of, only_one, places_of, teacher_facts, text_facts
from hmmlm.learning.interrupt import Stopped, StopRequest
from hmmlm.learning.loop import Trainer
from hmmlm.learning.progress import Progress


def trained(out: Path, by: FakeTeacher, seed: int = 0, model: dict[str, Any] | None = None, **start: Any) -> Trainer:
    config = tiny_config(
        Path("unused"), initialization={**LVD, **start}, model={"states": 6, **(model or {})},
        batches={"kind": "chunks", "batch_size": 8, "length": 16}, optimizer={"rate": 0.3},
        train={"epochs": 1, "checks_per_epoch": 1, "seed": seed},
    )  # fmt: skip
    out.mkdir(parents=True)
    trainer = Trainer(config, out, planted(by.hmm, 160, 16), Progress())
    assert trainer.run(StopRequest())
    return trainer


def same(first: Trainer, second: Trainer) -> bool:
    return all(map(torch.equal, first.hmm().parameters, second.hmm().parameters))  # type: ignore[union-attr]


@pytest.mark.parametrize("labels", ["fly", "cached"])
def test_sharing_changes_nothing_and_asks_once(tmp_path: Path, teacher: FakeTeacher, labels: str) -> None:  # noqa: F811
    apart = trained(tmp_path / "apart", teacher, labels=labels)
    alone = teacher.asked
    first = trained(tmp_path / "first", teacher, labels=labels, shared=str(tmp_path / "shared"))
    once = teacher.asked - alone
    if labels == "fly":  # what was clustered has its labels already: only the remaining chunks of the phase are read
        assert once < alone
    second = trained(tmp_path / "second", teacher, labels=labels, shared=str(tmp_path / "shared"))
    linear = {"parameterization": "linear", "hidden": 4}
    trained(tmp_path / "linear", teacher, model=linear, labels=labels, shared=str(tmp_path / "shared"))
    assert teacher.asked == alone + once
    assert same(apart, first) and same(first, second)


def test_what_changes_clusters_is_not_shared(tmp_path: Path, teacher: FakeTeacher) -> None:  # noqa: F811
    shared = {"shared": str(tmp_path / "shared")}
    first = trained(tmp_path / "first", teacher, **shared)
    other = trained(tmp_path / "seed", teacher, seed=1, **shared)
    kmeans = LVD["kmeans"]
    trained(tmp_path / "passes", teacher, kmeans={**kmeans, "passes": 1}, **shared)
    assert len(list((tmp_path / "shared").glob("clusters-*.safetensors"))) == 3
    assert not same(first, other)
    trained(tmp_path / "memory", teacher, kmeans={**kmeans, "memory_gb": 0.0}, **shared)  # which changes nothing
    fixed = trained(tmp_path / "fixed", teacher, seed=1, kmeans={**kmeans, "seed": 0}, **shared)
    assert len(list((tmp_path / "shared").glob("clusters-*.safetensors"))) == 3
    found = [Clusters.load(tmp_path / run / "clusters.safetensors") for run in ("first", "fixed")]
    assert torch.equal(found[0].centroids, found[1].centroids) and not same(fixed, other)


def test_counts_share_labels_too(tmp_path: Path, teacher: FakeTeacher) -> None:  # noqa: F811
    apart = trained(tmp_path / "apart", teacher, kind="counts", tokens=None)
    first = trained(tmp_path / "first", teacher, kind="counts", tokens=None, shared=str(tmp_path / "shared"))
    asked = teacher.asked
    second = trained(tmp_path / "second", teacher, kind="counts", tokens=None, shared=str(tmp_path / "shared"))
    assert teacher.asked == asked and same(apart, first) and same(first, second)


@given(st.lists(st.integers(0, 39), min_size=1, max_size=12, unique=True), st.integers(0, 3))
def test_a_store_gives_back_what_was_written(places: list[int], without: int) -> None:
    places = [*places, *[-1] * without]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.bin"
        where = torch.tensor([places])
        labels = torch.tensor([[(7 * place) % 5 for place in places]])
        store = LabelStore(path, 40, 5)
        assert bool((store.read(where) == -1).all())
        store.write(where, labels)
        expected = labels.masked_fill(where < 0, -1)
        assert torch.equal(store.read(where), expected)
        assert torch.equal(LabelStore(path, 40, 5).read(where), expected)  # opened again
        others = torch.tensor([[place for place in range(40) if place not in places]])
        assert bool((store.read(others) == -1).all())


def test_states_beyond_16_bits(tmp_path: Path) -> None:
    store = LabelStore(tmp_path / "labels.bin", 3, 1 << 16)
    store.write(torch.tensor([[0, 2]]), torch.tensor([[(1 << 16) - 1, 0]]))
    assert store.read(torch.tensor([[0, 1, 2]])).tolist() == [[(1 << 16) - 1, -1, 0]]


def test_places_are_batched_as_the_text() -> None:
    ids = np.random.default_rng(0).integers(0, 9, 103)
    text = TokenFile.from_arrays(ids, None, 9)
    files = (text, places_of(text))
    both = (ChunkBatches(file, 4, 8, shuffle=True, drop_last=False, seed=3).epoch(1) for file in files)
    for batch, where in zip(*both, strict=True):
        assert torch.equal(where.tokens < 0, batch.tokens < 0)
        known = where.tokens >= 0
        assert batch.tokens[known].tolist() == ids[where.tokens[known].numpy()].tolist()


def test_a_teacher_is_known_by_its_content(tmp_path: Path) -> None:
    for name, middle in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).mkdir()
        content = bytearray(3_000_000)
        content[1_500_000:1_520_000] = middle * 20_000
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, same_content, other = (teacher_facts(str(tmp_path / name)) for name in ("one", "same", "other"))
    assert one == same_content and one != other
    assert teacher_facts(str(tmp_path / "one" / "model.safetensors")) == one[0][1:]
    assert teacher_facts("hub/name") == "hub/name"
    assert name_of(one, 1) == name_of(same_content, 1) != name_of(one, 2)
    texts = [TokenFile.from_arrays(ids, None, 9, "tokenizer") for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 4])]
    assert text_facts(texts[0]) == text_facts(texts[1]) != text_facts(texts[2])


def test_who_comes_second_waits_and_can_be_stopped(tmp_path: Path) -> None:
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise Stopped

    with only_one(tmp_path / "lock", stop):
        assert asked == 0
        with pytest.raises(Stopped), only_one(tmp_path / "lock", stop):
            pass
    with only_one(tmp_path / "lock", stop):
        assert asked == 2
