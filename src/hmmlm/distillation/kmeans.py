"""k-means over embeddings that arrive in pieces and never have to fit in memory together.

Points may be in groups, each with k centroids of its own: in a blocked model, points whose words share a block form a
group. A pass over N points of D dimensions costs 2·N·D·k operations for the distances and, on a GPU, where sums are
products with one-hot labels, as many for the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmmlm.data.files import replacing
from hmmlm.data.modelfolder import require_tensors
from hmmlm.data.tensorfiles import read_tensors, write_tensors
from hmmlm.errors import InputError
from hmmlm.numerics.distributions import check_finite
from hmmlm.terminal import counted

FORMAT = "hmmlm clusters"
SAMPLE_POINTS = 65_536
"""Points, over all groups, that the initial centroids are drawn from."""
CHUNK = 1 << 24  # distances held at a time
ROUNDING = 1e-5  # error of a squared distance computed from squared norms, relative to those
CONVERGED = 1e-4  # stop after a pass that lowers the mean squared distance by less than this fraction

OnPiece = Callable[[str, int], None]
"""Receives the name of the pass and the number of points of each piece."""


class Piece(NamedTuple):
    """Points [n, D] and the group 0..M−1 of each [n]; None if there is one group."""

    points: Tensor
    group: Tensor | None = None


Pieces = Iterable[Piece]
"""Iterated once per pass; every pass must yield the same pieces in the same order."""


@dataclass(frozen=True)
class Clusters:
    """Result of k-means; tensors are float32."""

    centroids: Tensor
    """[M, k, D] centroids of the centered points; D = H without `components`."""
    mean: Tensor
    """[H] mean that is subtracted from points."""
    sizes: Tensor
    """[M, k] points assigned to each centroid in the last pass."""
    points: int
    """Number of points that were clustered."""
    inertia: float
    """Mean squared distance of a point to its centroid in the last pass."""
    components: Tensor | None = None
    """[H, D] principal axes that centered points are projected on; None: they are clustered as they are."""

    def labels(self, points: Tensor, group: Tensor | None = None) -> Tensor:
        """Return the nearest centroid 0..k−1 in each point's group, [n] for points [n, H]."""
        return nearest(_project(points, self.mean, self.components), self.centroids, group)[0]

    def vectors(self) -> Tensor:
        """Return the centroids as points [M·k, H]."""
        centroids = self.centroids.flatten(0, 1)
        return self.mean + (centroids if self.components is None else centroids @ self.components.T)

    def to(self, device: torch.device | str) -> Clusters:
        """Return a copy on `device`."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        found = {"centroids": self.centroids, "mean": self.mean, "sizes": self.sizes}
        return found if self.components is None else {**found, "components": self.components}

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        metadata = {"format": FORMAT, "points": str(self.points), "inertia": repr(self.inertia)}
        with replacing(path) as (part,):
            write_tensors(part, self.tensors(), metadata)

    @classmethod
    def load(cls, path: Path) -> Clusters:
        """Read a file written by `save`."""
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise InputError(f"{path} contains no clusters: give clusters.safetensors of a run with a teacher")
        require_tensors(path, tensors, {"centroids": [None, None, None], "mean": [None], "sizes": [None, None]})
        if "components" in tensors:
            shape = [len(tensors["mean"]), tensors["centroids"].shape[2]]
            require_tensors(path, tensors, {"components": shape})
        for name, tensor in tensors.items():
            check_finite(tensor, f"{path}: {name}")
        try:
            points, inertia = int(metadata["points"]), float(metadata["inertia"])
        except (KeyError, ValueError) as error:
            raise InputError(f"{path}: its metadata is damaged ({error!r}): cluster the embeddings again") from None
        return cls(tensors["centroids"], tensors["mean"], tensors["sizes"], points, inertia, tensors.get("components"))


def fit_clusters(
    pieces: Pieces,
    clusters: int,
    *,
    groups: int = 1,
    passes: int = 10,
    seed: int = 0,
    pca: int | None = None,
    sample_points: int = SAMPLE_POINTS,
    on_piece: OnPiece = lambda name, count: None,
) -> Clusters:
    """Cluster the points of all pieces with k-means++ and Lloyd's algorithm.

    A first pass computes the mean and draws the sample that k-means++ starts from; every later pass is one iteration of
    Lloyd over all points. Centroids that end a pass without points move to the points farthest from their centroids. If
    a group has fewer distinct points than `clusters`, its centroids repeat; with a single group that is an error.

    Args:
        pieces: the points; see `Pieces`.
        clusters: centroids per group.
        groups: number of groups M.
        passes: maximum number of Lloyd iterations; they stop early on convergence.
        seed: seed of the sample and of the initial centroids.
        pca: principal components that points are projected on before they are clustered, found in the first pass;
            None: no projection.
        sample_points: points of the sample.
        on_piece: called after each piece of each pass.
    """
    limit = max(-(-sample_points // groups), clusters)
    sample = _draw_sample(pieces, clusters, limit, seed, on_piece, covariance=pca is not None)
    components = None if pca is None else principal_axes(sample.covariance, pca)
    points = _project(sample.points, sample.mean, components)
    generator = torch.Generator().manual_seed(seed)
    centroids = torch.stack(
        [_initial_centroids(points[sample.group == g], clusters, generator, strict=groups == 1) for g in range(groups)]
    )
    sizes = torch.zeros(groups, clusters, dtype=torch.long, device=centroids.device)
    inertia = float("inf")
    for number in range(1, passes + 1):
        lloyd = _LloydPass(centroids)
        for piece in pieces:
            lloyd.add(_project(piece.points, sample.mean, components), piece.group)
            on_piece(f"k-means pass {number} of {passes}", len(piece.points))
        centroids, sizes = lloyd.finish(), lloyd.counts.long()
        before, inertia = inertia, lloyd.inertia()
        if number > 1 and before - inertia <= CONVERGED * before:
            break
    return Clusters(centroids, sample.mean, sizes, sample.total, inertia, components)


def nearest(
    points: Tensor, centroids: Tensor, group: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Find the nearest centroid in each point's group.

    Args:
        points: [n, D].
        centroids: [M, k, D].
        group: [n] group of each point; None if M = 1.
        chunk: distances held at a time.

    Returns:
        The index 0..k−1 [n] and the squared distance [n].
    """
    labels = torch.empty(len(points), dtype=torch.long, device=points.device)
    distance = points.new_empty(len(points))
    half_norm = centroids.square().sum(-1) / 2
    for g, rows in _rows_by_group(points, group, len(centroids)):
        for part in rows.split(max(1, chunk // centroids.shape[1])):
            own = points if len(part) == len(points) and group is None else points[part]
            # |x − c|² = |x|² − 2 (x·c − |c|²/2): the largest score is the nearest centroid
            score, best = torch.addmm(-half_norm[g], own, centroids[g].T).max(1)
            labels[part], distance[part] = best, (own.square().sum(1) - 2 * score).clamp(min=0)
    return labels, distance


def _project(points: Tensor, mean: Tensor, components: Tensor | None) -> Tensor:
    """Return points [n, H] minus the mean, on the components [H, D] if there are any."""
    centered = points.to(mean.device, torch.float32) - mean
    return centered if components is None else centered @ components


def principal_axes(covariance: Tensor, count: int) -> Tensor:
    """Return the eigenvectors [H, count] of the largest eigenvalues of a covariance [H, H], largest first."""
    return torch.linalg.eigh(covariance).eigenvectors[:, -count:].flip(1).float()


# --- initial centroids ----------------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    mean: Tensor  # [D] of all points
    points: Tensor  # [s, D]
    group: Tensor  # [s]
    total: int  # points in all
    covariance: Tensor  # [D, D] of all points, float64; of no use unless it was asked for


def _draw_sample(
    pieces: Pieces, clusters: int, limit: int, seed: int, on_piece: OnPiece, covariance: bool = False
) -> _Sample:
    """Compute the mean, if asked the covariance, and draw a uniform sample of each group, of at most `limit` points.

    The sample has the points with the smallest random keys, so it does not depend on how points are cut into pieces.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    total, shift, sums, products = 0, None, torch.zeros(()), torch.zeros((), dtype=torch.float64)
    keys, sample, group = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.long)
    for piece in pieces:
        points = piece.points.float()
        if not bool(points.isfinite().all()):
            raise InputError("the teacher's embeddings are not finite: use another layer or precision")
        if shift is None:  # sums of points near zero lose fewer digits
            shift = points.mean(0)
            sums = torch.zeros(points.shape[1], dtype=torch.float64, device=points.device)
            keys, sample, group = keys.to(points.device), points[:0], group.to(points.device)
        sums += (points - shift).sum(0, dtype=torch.float64)
        if covariance:
            shifted = (points - shift).double()
            products = products.to(points.device) + shifted.T @ shifted
        total += len(points)
        drawn = torch.rand(len(points), generator=generator).to(points.device)
        own = torch.zeros_like(drawn, dtype=torch.long) if piece.group is None else piece.group
        keys, sample, group = torch.cat([keys, drawn]), torch.cat([sample, points]), torch.cat([group, own])
        kept = _lowest_per_group(keys, group, limit)
        keys, sample, group = keys[kept], sample[kept], group[kept]
        on_piece("embedding", len(points))
    if shift is None or total < clusters:
        raise InputError(f"{counted(total, 'embedding')} cannot make {clusters:,} clusters: use fewer states")
    mean = sums / total
    return _Sample((shift + mean).float(), sample, group, total, products / total - mean.outer(mean))


def _initial_centroids(sample: Tensor, clusters: int, generator: torch.Generator, strict: bool) -> Tensor:
    """Draw initial centroids [k, D] from the sample [s, D] of one group; `strict` requires k distinct points."""
    if not len(sample):  # the words of a block may not occur; zero is the mean of all points
        return sample.new_zeros(clusters, sample.shape[1])
    chosen = _plus_plus(sample, clusters, generator)
    if strict and len(chosen) < clusters:
        raise InputError(
            f"only {counted(len(chosen), 'distinct embedding')} among {len(sample):,}, and {clusters:,} states need "
            "one each: use fewer states, another layer or another teacher"
        )
    return chosen.repeat(-(-clusters // len(chosen)), 1)[:clusters]


def _plus_plus(sample: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Draw up to `clusters` distinct points by k-means++.

    Each next point is drawn in proportion to its squared distance from those already drawn. Random numbers come from
    the CPU, so that nothing waits for the device.
    """
    draws = torch.rand(clusters, generator=generator).tolist()
    chosen = _draw_far_apart(sample, draws, exact=False)
    return chosen if len(chosen) == clusters else _draw_far_apart(sample, draws, exact=True)


def _draw_far_apart(sample: Tensor, draws: list[float], exact: bool) -> Tensor:
    """Draw points [≤ k, D] by k-means++ with the uniform random numbers `draws` [k].

    Distances are |x|² − 2 x·c + |c|², which reads the sample once but cannot tell nearly equal points apart, or with
    `exact` |x − c|², which takes three times as long.
    """
    norms = sample.square().sum(1)

    def distance_to(point: Tensor) -> Tensor:
        if exact:
            return (sample - point).square().sum(1)
        norm = point.square().sum()
        distance = norms - 2 * (sample @ point) + norm
        return torch.where(distance > ROUNDING * (norms + norm), distance, 0.0)

    chosen = [sample[int(draws[0] * len(sample))]]
    distance, totals = distance_to(chosen[0]), []
    for draw in draws[1:]:
        cumulative = distance.double().cumsum(0)
        totals.append(cumulative[-1])
        index = torch.searchsorted(cumulative, cumulative[-1:] * draw, right=True).clamp(max=len(sample) - 1)
        chosen.append(sample.index_select(0, index)[0])
        distance = torch.minimum(distance, distance_to(chosen[-1]))
    distinct = 1 + (int((torch.stack(totals) > 0).sum()) if totals else 0)
    return torch.stack(chosen)[:distinct]


# --- Lloyd's algorithm ----------------------------------------------------------------------------------------------


class _LloydPass:
    """Sums, counts and farthest points of one pass over all pieces."""

    def __init__(self, centroids: Tensor) -> None:
        self.centroids, device = centroids, centroids.device
        self.sums, self.counts = torch.zeros_like(centroids), centroids.new_zeros(centroids.shape[:2])
        self.total, self.points = torch.zeros((), dtype=torch.float64, device=device), 0
        self.far, self.far_group = centroids[0, :0], torch.empty(0, dtype=torch.long, device=device)
        self.far_distance = centroids.new_empty(0)

    def add(self, points: Tensor, group: Tensor | None) -> None:
        """Assign points [n, D] to their nearest centroids."""
        labels, distance = nearest(points, self.centroids, group)
        groups, clusters = self.counts.shape
        own = torch.zeros_like(labels) if group is None else group
        cells = own * clusters + labels
        counts = torch.bincount(cells, minlength=groups * clusters).view_as(self.counts)
        self.sums += self._sum_by_label(points, labels, group)
        self.counts += counts.to(self.counts.dtype)
        self.total += distance.sum(dtype=torch.float64)
        self.points += len(points)
        # no group can have more empty centroids than it has centroids, so k candidates per group are enough
        best = _lowest_per_group(-distance, own, clusters)
        far, far_group = torch.cat([self.far, points[best]]), torch.cat([self.far_group, own[best]])
        far_distance = torch.cat([self.far_distance, distance[best]])
        kept = _lowest_per_group(-far_distance, far_group, clusters)
        self.far, self.far_group, self.far_distance = far[kept], far_group[kept], far_distance[kept]

    def _sum_by_label(self, points: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
        """Sum the points of each centroid, [M, k, D]."""
        sums = torch.zeros_like(self.centroids)
        for g, rows in _rows_by_group(points, group, len(sums)):
            own, own_labels = (points, labels) if group is None else (points[rows], labels[rows])
            if not points.is_cuda:
                sums[g].index_add_(0, own_labels, own)
                continue
            # unlike atomic additions, a product is deterministic and its writes do not contend
            for part in torch.arange(len(own), device=own.device).split(max(1, CHUNK // sums.shape[1])):
                one_hot = torch.nn.functional.one_hot(own_labels[part], sums.shape[1]).to(own.dtype)
                sums[g] += one_hot.T @ own[part]
        return sums

    def inertia(self) -> float:
        """Return the mean squared distance of a point to its centroid."""
        return float(self.total) / max(1, self.points)

    def finish(self) -> Tensor:
        """Return the new centroids [M, k, D]: means of their points; empty ones move to the farthest points."""
        means = self.sums / self.counts.clamp(min=1)[..., None]
        centroids = torch.where(self.counts[..., None] > 0, means, self.centroids)
        for g in (self.counts == 0).any(1).nonzero().flatten().tolist():
            empty = (self.counts[g] == 0).nonzero().flatten()
            candidates = (self.far_group == g) & (self.far_distance > 0)
            distinct = torch.unique(self.far[candidates], dim=0, return_inverse=True)[1]
            order = self.far_distance[candidates].argsort(descending=True, stable=True)
            first = _first_of_each(distinct[order])
            chosen = self.far[candidates][order][first][: len(empty)]
            centroids[g, empty[: len(chosen)]] = chosen
        return centroids


def _rows_by_group(points: Tensor, group: Tensor | None, groups: int) -> list[tuple[int, Tensor]]:
    """Return (group, indices of its points) for every group that has points."""
    if group is None:
        return [(0, torch.arange(len(points), device=points.device))]
    counts = torch.bincount(group, minlength=groups).tolist()
    rows = torch.argsort(group, stable=True).split(counts)
    return [(g, own) for g, own in enumerate(rows) if len(own)]


def _lowest_per_group(score: Tensor, group: Tensor, limit: int) -> Tensor:
    """Return the indices of the `limit` lowest scores of each group, ascending within a group."""
    order = score.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    counts = torch.bincount(group, minlength=1)
    begins = counts.cumsum(0) - counts
    rank = torch.arange(len(order), device=order.device) - begins[group[order]]
    return order[rank < limit]


def _first_of_each(values: Tensor) -> Tensor:
    """Return the index of the first occurrence of every value, in ascending order."""
    count = int(values.max()) + 1 if len(values) else 0
    first = values.new_full((count,), len(values))
    first.scatter_reduce_(0, values, torch.arange(len(values), device=values.device), "amin")
    return first.sort().values
