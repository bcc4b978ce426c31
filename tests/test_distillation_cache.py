"""The cache of clusters and labels: what runs share, what they do not, and that sharing changes no result."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fake_teacher import LVD, FakeTeacher, use_fake_teacher
from helpers.runs import fit_planted, planted
from hypothesis import given
from hypothesis import strategies as st

import hmmlm
from hmmlm.data.batches import ChunkBatches
from hmmlm.data.files import exclusive
from hmmlm.data.tokenfile import TokenFile
from hmmlm.distillation.cache import LabelStore, cluster_facts, content_name, teacher_facts, text_facts
from hmmlm.distillation.kmeans import Clusters
from hmmlm.runs.interrupt import Stopped


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> FakeTeacher:
    """Return the teacher that every run of the test opens."""
    return use_fake_teacher(monkeypatch)


def trained(out: Path, by: FakeTeacher, seed: int = 0, model: dict[str, Any] | None = None, **start: Any) -> Path:
    fit_planted(
        out,
        planted(by.hmm, 160, 16),
        initialization={**LVD, **start},
        model={"num_states": 6, **(model or {})},
        batches={"kind": "chunks", "batch_size": 8, "length": 16},
        optimizer={"lr": 0.3},
        train={"epochs": 1, "checks_per_epoch": 1, "seed": seed},
    )
    return out


def same(first: Path, second: Path) -> bool:
    ours, theirs = (hmmlm.load(run / "final").hmm.tensors() for run in (first, second))
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("labels", ["fly", "cached"])
def test_a_cache_changes_no_result_and_the_teacher_reads_once(
    tmp_path: Path, teacher: FakeTeacher, labels: str
) -> None:
    apart = trained(tmp_path / "apart", teacher, labels=labels)
    alone = teacher.calls
    cache = {"labels": labels, "cache": str(tmp_path / "cache")}
    first = trained(tmp_path / "first", teacher, **cache)
    once = teacher.calls - alone
    if labels == "fly":  # the clustered chunks have labels already: the teacher reads the others of the phase only
        assert once < alone
    second = trained(tmp_path / "second", teacher, **cache)
    trained(tmp_path / "linear", teacher, model={"kind": "linear", "hidden": 4}, **cache)
    assert teacher.calls == alone + once
    assert same(apart, first) and same(first, second)


def test_settings_that_change_clusters_are_not_shared(tmp_path: Path, teacher: FakeTeacher) -> None:
    cache, kmeans = {"cache": str(tmp_path / "cache")}, LVD["kmeans"]
    first = trained(tmp_path / "first", teacher, **cache)
    other = trained(tmp_path / "seed", teacher, seed=1, **cache)
    trained(tmp_path / "passes", teacher, kmeans={**kmeans, "passes": 1}, **cache)
    assert len(list((tmp_path / "cache").glob("clusters-*.safetensors"))) == 3
    assert not same(first, other)
    trained(tmp_path / "memory", teacher, kmeans={**kmeans, "memory_gb": 0.0}, **cache)  # changes nothing
    fixed = trained(tmp_path / "fixed", teacher, seed=1, kmeans={**kmeans, "seed": 0}, **cache)
    assert len(list((tmp_path / "cache").glob("clusters-*.safetensors"))) == 3
    found = [Clusters.load(run / "clusters.safetensors") for run in (first, fixed)]
    assert torch.equal(found[0].centroids, found[1].centroids) and not same(fixed, other)


def test_counts_share_labels(tmp_path: Path, teacher: FakeTeacher) -> None:
    apart = trained(tmp_path / "apart", teacher, kind="counts", tokens=None)
    cache = {"kind": "counts", "tokens": None, "cache": str(tmp_path / "cache")}
    first = trained(tmp_path / "first", teacher, **cache)
    calls = teacher.calls
    second = trained(tmp_path / "second", teacher, **cache)
    assert teacher.calls == calls and same(apart, first) and same(first, second)


@given(st.lists(st.integers(0, 39), min_size=1, max_size=12, unique=True), st.integers(0, 3))
def test_a_store_returns_what_was_written(places: list[int], without: int) -> None:
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


def test_places_of_a_batch_are_the_positions_of_its_tokens() -> None:
    ids = np.random.default_rng(0).integers(0, 9, 103)
    for batch in ChunkBatches(TokenFile.from_arrays(ids, None, 9), 4, 8, shuffle=True, seed=3).epoch(1):
        assert batch.places is not None
        assert torch.equal(batch.places < 0, batch.tokens < 0)
        known = batch.places >= 0
        assert batch.tokens[known].tolist() == ids[batch.places[known].numpy()].tolist()


def test_a_teacher_is_identified_by_its_content(tmp_path: Path) -> None:
    for name, middle in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).mkdir()
        content = bytearray(3_000_000)
        content[1_500_000:1_520_000] = middle * 20_000
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, same_content, other = (teacher_facts(str(tmp_path / name)) for name in ("one", "same", "other"))
    assert one == same_content and one != other
    assert teacher_facts(str(tmp_path / "one" / "model.safetensors")) == one[0][1:]
    assert teacher_facts("hub/name") == "hub/name"
    assert content_name(one, 1) == content_name(same_content, 1) != content_name(one, 2)


def test_texts_and_clusters_are_identified_by_their_content() -> None:
    texts = [TokenFile.from_arrays(ids, None, 9, "tokenizer") for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 4])]
    assert text_facts(texts[0]) == text_facts(texts[1]) != text_facts(texts[2])
    found = [Clusters(torch.full((1, 2, 3), x), torch.zeros(3), torch.ones(1, 2), 2, 0.0) for x in (1.0, 1.0, 2.0)]
    assert cluster_facts(found[0]) == cluster_facts(found[1]) != cluster_facts(found[2])


def test_a_second_process_waits_and_can_be_stopped(tmp_path: Path) -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Stopped

    with exclusive(tmp_path / "lock", stop):
        assert calls == 0
        with pytest.raises(Stopped), exclusive(tmp_path / "lock", stop):
            pass
    with exclusive(tmp_path / "lock", stop):
        assert calls == 2
