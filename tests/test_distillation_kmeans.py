"""k-means in pieces: compared with Lloyd by hand, with any pieces, groups, empty clusters and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hmmlm.distillation.kmeans import Clusters, Piece, _LloydPass, fit_clusters, nearest
from hmmlm.errors import InputError


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blobs(centres: int, each: int, dimensions: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return shuffled points around distant centres, and the centre of each."""
    label = torch.arange(centres).repeat(each)[torch.randperm(centres * each, generator=torch.manual_seed(seed))]
    noise = 0.3 * normal(len(label), dimensions, seed=seed + 1)
    return 20 * normal(centres, dimensions, seed=seed)[label] + noise, label


def cut(points: Tensor, size: int, group: Tensor | None = None) -> list[Piece]:
    groups = [None] * len(points) if group is None else group.split(size)
    return [Piece(piece, own) for piece, own in zip(points.split(size), groups, strict=False)]


def brute_labels(points: Tensor, centroids: Tensor) -> Tensor:
    return torch.cdist(points.double(), centroids.double()).argmin(1)


def test_separate_blobs_are_found() -> None:
    points, label = blobs(5, 40)
    found = fit_clusters(cut(points, 37), 5, passes=25, seed=3)
    pairs = {(int(a), int(b)) for a, b in zip(found.labels(points), label, strict=True)}
    assert len(pairs) == 5 and len({a for a, _ in pairs}) == 5
    assert sorted(found.sizes.flatten().tolist()) == [40] * 5
    assert found.inertia < 1
    assert found.points == 200 and found.centroids.shape == (1, 5, 6)


def test_passes_are_those_of_lloyd() -> None:
    points = normal(300, 4)
    first = fit_clusters(cut(points, 300), 7, passes=1)
    for passes in (2, 5):
        expected = first.centroids[0].double()
        centered = (points - first.mean).double()
        for _ in range(passes - 1):
            labels = brute_labels(centered, expected)
            expected = torch.stack([centered[labels == i].mean(0) for i in range(7)])
        found = fit_clusters(cut(points, 300), 7, passes=passes)
        torch.testing.assert_close(found.centroids[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_the_cut_into_pieces_does_not_matter() -> None:
    points = normal(256, 5)
    whole, cut_up = (fit_clusters(cut(points, size), 6, passes=4) for size in (256, 50))
    torch.testing.assert_close(whole.mean, cut_up.mean)
    torch.testing.assert_close(whole.centroids, cut_up.centroids, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole.labels(points), cut_up.labels(points))
    again = fit_clusters(cut(points, 50), 6, passes=4)
    assert torch.equal(again.centroids, cut_up.centroids)


def test_passes_are_reported_and_stop_on_convergence() -> None:
    points, _ = blobs(3, 20)
    reported: list[tuple[str, int]] = []
    fit_clusters(cut(points, 25), 3, passes=50, on_piece=lambda name, count: reported.append((name, count)))
    assert reported[:3] == [("embedding", 25), ("embedding", 25), ("embedding", 10)]
    assert reported[3][0] == "k-means pass 1 of 50"
    assert len(reported) % 3 == 0 and len(reported) // 3 - 1 < 10


def test_nearest_against_all_distances() -> None:
    points, centroids = normal(50, 3), normal(2, 4, 3, seed=1)
    group = torch.arange(50) % 2
    labels, distance = nearest(points, centroids, group)
    for g in (0, 1):
        every = torch.cdist(points[group == g], centroids[g]).square()
        assert torch.equal(labels[group == g], every.argmin(1))
        torch.testing.assert_close(distance[group == g], every.min(1).values, rtol=1e-4, atol=1e-5)


def test_chunks_of_distances_do_not_matter() -> None:
    points, centroids = normal(50, 3), normal(1, 4, 3, seed=1)
    assert all(map(torch.equal, nearest(points, centroids, chunk=28), nearest(points, centroids)))


def test_empty_clusters_go_to_the_farthest_points() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0], [10.0], [7.0]])
    lloyd = _LloydPass(torch.tensor([[[0.5], [100.0], [-100.0]]]))
    lloyd.add(points[:4], None)
    lloyd.add(points[4:], None)
    after = lloyd.finish()
    torch.testing.assert_close(after[0, 0], points.mean(0))
    assert {float(after[0, 1]), float(after[0, 2])} == {10.0, 7.0}  # not the same point twice


def test_groups_are_clustered_separately_and_small_ones_repeat() -> None:
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


def test_initial_centroids_from_a_small_sample() -> None:
    points, _ = blobs(4, 50)
    found = fit_clusters(cut(points, 30), 4, passes=5, sample_points=10)
    assert found.points == 200 and int(found.sizes.sum()) == 200  # every pass sees all points


def test_fewer_distinct_embeddings_than_clusters() -> None:
    points = torch.arange(3.0).repeat(20)[:, None]
    with pytest.raises(InputError, match="only 3 distinct embeddings among 60, and 4 states need one each"):
        fit_clusters(cut(points, 7), 4)
    assert fit_clusters(cut(points, 7), 3).inertia == pytest.approx(0, abs=1e-6)


def test_nearly_equal_points_are_distinct() -> None:
    points = 1000 + torch.arange(5.0).repeat(6)[:, None].expand(30, 3)
    points = torch.cat([points, -points])
    found = fit_clusters(cut(points, 60), 10, passes=1)
    assert len(torch.unique(found.centroids[0], dim=0)) == 10


def test_bad_input() -> None:
    with pytest.raises(InputError, match="2 embeddings cannot make 3 clusters"):
        fit_clusters([Piece(normal(2, 4))], 3)
    with pytest.raises(InputError, match="0 embeddings cannot make 3 clusters"):
        fit_clusters([], 3)
    with pytest.raises(InputError, match="not finite"):
        fit_clusters([Piece(torch.full((20, 4), float("nan")))], 3)


def test_pca_clusters_the_projected_points(tmp_path: Path) -> None:
    scales = torch.tensor([1.0, 30.0, 0.1, 5.0, 10.0, 0.5])
    points = 100 + normal(500, 6) * scales @ torch.linalg.qr(normal(6, 6, seed=1))[0]
    found = fit_clusters(cut(points, 90), 7, passes=5, pca=3)
    assert found.components is not None and found.centroids.shape == (1, 7, 3)
    centered = (points - points.mean(0)).double()
    axes = torch.linalg.svd(centered, full_matrices=False)[2][:3].T  # [6, 3], by the largest singular values
    torch.testing.assert_close((found.components.double().T @ axes).abs(), torch.eye(3).double(), atol=1e-3, rtol=0)
    projected = centered @ found.components.double()
    torch.testing.assert_close(found.mean, points.mean(0), rtol=1e-5, atol=1e-4)
    assert (found.labels(points) == brute_labels(projected, found.centroids[0])).float().mean() > 0.99
    alone = fit_clusters(cut(projected.float(), 90), 7, passes=5)  # the same sample: the draws do not depend on points
    torch.testing.assert_close(found.centroids, alone.centroids + alone.mean, rtol=1e-3, atol=1e-2)
    vectors = found.vectors()
    torch.testing.assert_close((vectors - found.mean) @ found.components, found.centroids[0], rtol=1e-4, atol=1e-3)
    assert len(found.labels(vectors).unique()) == 7  # centroids are nearest to themselves
    found.save(tmp_path / "c.safetensors")
    assert torch.equal(Clusters.load(tmp_path / "c.safetensors").labels(points), found.labels(points))
    assert torch.equal(found.to("cpu").vectors(), vectors)


def test_saved_and_loaded(tmp_path: Path) -> None:
    points = normal(60, 4)
    found = fit_clusters(cut(points, 20), 3)
    found.save(tmp_path / "c.safetensors")
    loaded = Clusters.load(tmp_path / "c.safetensors")
    assert torch.equal(loaded.labels(points), found.labels(points))
    assert (loaded.points, loaded.inertia) == (60, found.inertia) and torch.equal(loaded.sizes, found.sizes)
    (tmp_path / "c.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"c\.safetensors is missing, truncated"):
        Clusters.load(tmp_path / "c.safetensors")
    tensors = {"centroids": found.centroids, "mean": found.mean, "sizes": found.sizes}
    named = {"format": "hmmlm clusters", "points": "60", "inertia": "1.0"}
    save_file({**tensors, "components": torch.eye(3)}, tmp_path / "c.safetensors", named)
    with pytest.raises(InputError, match=r"components has shape \[3, 3\], .* \[4, 4\]"):
        Clusters.load(tmp_path / "c.safetensors")
    save_file(tensors, tmp_path / "c.safetensors")
    with pytest.raises(InputError, match="contains no clusters"):
        Clusters.load(tmp_path / "c.safetensors")
