"""k-means in pieces: against Lloyd by hand, whatever the pieces, with groups, PCA, empty clusters and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hmmlm.errors import InputError
from hmmlm.initialization.clustering import Clusters, Piece, _Pass, fit_clusters, nearest, principal_axes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blobs(centres: int, each: int, dimensions: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around far-apart centres, shuffled, and which centre each is of."""
    label = torch.arange(centres).repeat(each)[torch.randperm(centres * each, generator=torch.manual_seed(seed))]
    noise = 0.3 * normal(len(label), dimensions, seed=seed + 1)
    return 20 * normal(centres, dimensions, seed=seed)[label] + noise, label


def cut(points: Tensor, size: int, group: Tensor | None = None) -> list[Piece]:
    groups = [None] * len(points) if group is None else group.split(size)
    return [Piece(piece, own) for piece, own in zip(points.split(size), groups, strict=False)]


def brute_labels(points: Tensor, centroids: Tensor) -> Tensor:
    return torch.cdist(points.double(), centroids.double()).argmin(1)


@pytest.mark.parametrize("update", ["full", "minibatch"])
@pytest.mark.parametrize("start", ["k-means++", "random"])
def test_separate_blobs_are_found(start: str, update: str) -> None:
    points, label = blobs(5, 40)
    found = fit_clusters(cut(points, 37), 5, start=start, update=update, passes=25, seed=3)  # type: ignore[arg-type]
    labels = found.labels(points)
    if start == "k-means++":  # a random start may leave two blobs to one centroid
        pairs = {(int(a), int(b)) for a, b in zip(labels, label, strict=True)}
        assert len(pairs) == 5 and len({a for a, _ in pairs}) == 5
        assert sorted(found.sizes.flatten().tolist()) == [40] * 5
        assert found.inertia < 1
    assert found.points == 200 and found.centroids.shape == (1, 5, 6)


def test_full_passes_are_those_of_lloyd() -> None:
    points = normal(300, 4)
    first = fit_clusters(cut(points, 300), 7, passes=1)
    for passes in (2, 5):
        expected = first.centroids[0].double()
        centred = (points - first.mean).double()
        for _ in range(passes - 1):
            labels = brute_labels(centred, expected)
            expected = torch.stack([centred[labels == i].mean(0) for i in range(7)])
        found = fit_clusters(cut(points, 300), 7, passes=passes)
        torch.testing.assert_close(found.centroids[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_the_cut_into_pieces_does_not_matter() -> None:
    points = normal(256, 5)
    whole, cut_up = (fit_clusters(cut(points, size), 6, passes=4, pca=3) for size in (256, 50))
    torch.testing.assert_close(whole.mean, cut_up.mean)
    torch.testing.assert_close(whole.components, cut_up.components)
    torch.testing.assert_close(whole.centroids, cut_up.centroids, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole.labels(points), cut_up.labels(points))
    again = fit_clusters(cut(points, 50), 6, passes=4, pca=3)
    assert torch.equal(again.centroids, cut_up.centroids)


def test_passes_are_told_and_end_when_nothing_changes() -> None:
    points, _ = blobs(3, 20)
    heard: list[tuple[str, int]] = []
    fit_clusters(cut(points, 25), 3, passes=50, on_piece=lambda name, count: heard.append((name, count)))
    assert heard[:3] == [("embedding", 25), ("embedding", 25), ("embedding", 10)]
    assert heard[3][0] == "k-means pass 1 of 50"
    assert len(heard) % 3 == 0 and len(heard) // 3 - 1 < 10


def test_nearest_against_all_distances() -> None:
    points, centroids = normal(50, 3), normal(2, 4, 3, seed=1)
    group = torch.arange(50) % 2
    labels, distance = nearest(points, centroids, group)
    for g in (0, 1):
        every = torch.cdist(points[group == g], centroids[g]).square()
        assert torch.equal(labels[group == g], every.argmin(1))
        torch.testing.assert_close(distance[group == g], every.min(1).values, rtol=1e-4, atol=1e-5)


def test_chunks_of_distances_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    points, centroids = normal(50, 3), normal(1, 4, 3, seed=1)
    expected = nearest(points, centroids)
    monkeypatch.setattr("hmmlm.initialization.clustering.CHUNK", 28)
    assert all(map(torch.equal, nearest(points, centroids), expected))


def test_empty_clusters_go_to_the_farthest_points() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0], [10.0], [7.0]])
    for update in ("full", "minibatch"):
        centroids = torch.tensor([[[0.5], [100.0], [-100.0]]])
        state = _Pass(centroids, torch.zeros(1, 3), update)  # type: ignore[arg-type]
        state.add(points[:4], None)
        state.add(points[4:], None)
        after = state.finish()
        if update == "full":
            torch.testing.assert_close(after[0, 0], points.mean(0))
        assert {float(after[0, 1]), float(after[0, 2])} == {10.0, 7.0}  # not the same place twice


def test_groups_are_clustered_apart_and_poor_ones_repeat() -> None:
    points = torch.cat([blobs(3, 30)[0], torch.full((4, 6), 5.0)])
    group = torch.cat([torch.zeros(90), torch.full((4,), 2.0)]).long()
    order = torch.randperm(94, generator=torch.manual_seed(0))
    points, group = points[order], group[order]
    found = fit_clusters(cut(points, 20, group), 3, groups=3, passes=20)
    assert found.centroids.shape == (3, 3, 6)
    alone = fit_clusters(cut(points[group == 0], 20), 3, passes=20)
    own = found.labels(points[group == 0], group[group == 0])
    theirs = alone.labels(points[group == 0])
    assert len({(int(a), int(b)) for a, b in zip(own, theirs, strict=True)}) == 3
    assert found.sizes.sum(1).tolist() == [90, 0, 4]
    torch.testing.assert_close(found.centroids[2], (points[group == 2][:1] - found.mean).expand(3, 6))


def test_principal_axes_against_the_singular_value_decomposition() -> None:
    points = normal(400, 6) @ torch.diag(torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.1])) @ normal(6, 6, seed=1) + 100
    found = fit_clusters(cut(points, 64), 4, pca=2, passes=2)
    centred = points - points.mean(0)
    axes = torch.linalg.svd(centred.double(), full_matrices=False).Vh[:2].T.float()
    assert found.components is not None
    assert torch.allclose((axes * found.components).sum(0).abs(), torch.ones(2), atol=1e-3)
    torch.testing.assert_close(found.project(points).abs(), (centred @ axes).abs(), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(principal_axes(torch.eye(3), 3).abs().sum(), torch.tensor(3.0))


def test_a_start_drawn_from_a_few_points_still_sees_all() -> None:
    points, _ = blobs(4, 50)
    found = fit_clusters(cut(points, 30), 4, start_points=10, passes=5)
    assert found.points == 200 and int(found.sizes.sum()) == 200


@pytest.mark.parametrize("start", ["k-means++", "random"])
def test_fewer_distinct_embeddings_than_clusters(start: str) -> None:
    points = torch.arange(3.0).repeat(20)[:, None]
    with pytest.raises(InputError, match="only 3 distinct embeddings among 60, and 4 states need one each"):
        fit_clusters(cut(points, 7), 4, start=start)  # type: ignore[arg-type]
    assert fit_clusters(cut(points, 7), 3, start=start).inertia == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]


def test_points_that_are_nearly_the_same_still_count() -> None:
    points = 1000 + torch.arange(5.0).repeat(6)[:, None].expand(30, 3)
    points = torch.cat([points, -points])
    found = fit_clusters(cut(points, 60), 10, passes=1)
    assert len(torch.unique(found.centroids[0], dim=0)) == 10


def test_bad_input() -> None:
    with pytest.raises(InputError, match="2 embeddings cannot make 3 clusters"):
        fit_clusters([Piece(normal(2, 4))], 3)
    with pytest.raises(InputError, match="0 embeddings cannot make 3 clusters"):
        fit_clusters([], 3)
    with pytest.raises(InputError, match="pca to 5 dimensions of embeddings of 4"):
        fit_clusters([Piece(normal(20, 4))], 3, pca=5)
    with pytest.raises(InputError, match="not finite"):
        fit_clusters([Piece(torch.full((20, 4), float("nan")))], 3)


def test_saved_and_loaded(tmp_path: Path) -> None:
    points = normal(60, 4)
    found = fit_clusters(cut(points, 20), 3, pca=2)
    found.save(tmp_path / "c.safetensors")
    loaded = Clusters.load(tmp_path / "c.safetensors")
    assert torch.equal(loaded.labels(points), found.labels(points))
    assert (loaded.points, loaded.inertia) == (60, found.inertia) and torch.equal(loaded.sizes, found.sizes)
    (tmp_path / "c.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"c\.safetensors is missing, truncated"):
        Clusters.load(tmp_path / "c.safetensors")
