"""k-means over embeddings that come in pieces: never all in memory, every pass streams, PCA on the way if wanted.

What is clustered may be in groups, each with k centroids of its own: the states of a blocked model, whose words lie in
one block. Without groups there is one.

Cost of a pass over N points of D dimensions with k centroids a group: 2·N·D·k operations for the distances and as many
for the sums, which are products with one-hot labels on a GPU (10M × 2,048 with 512 centroids: 21 TFLOP each, so a pass
in float32 is about a second of an H200; reading the points is the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hmmlm.errors import InputError

Start = Literal["k-means++", "random"]
Update = Literal["full", "minibatch"]
FORMAT = "hmmlm clusters"
CHUNK = 1 << 24  # distances held at a time
ROUNDING = 1e-5  # of a squared distance made from squared norms, as a share of those
CONVERGED = 1e-4  # a pass that lowers the mean squared distance by less than this share is the last


class Piece(NamedTuple):
    """Points [n, H], and the group 0..M−1 of each [n]; None where there is one group."""

    points: Tensor
    group: Tensor | None = None


Pieces = Iterable[Piece]
"""Iterated once a pass, each time with the same pieces in the same order."""


@dataclass(frozen=True)
class Clusters:
    """Centroids [M, k, D] of centred (and with PCA, projected) points; float32."""

    centroids: Tensor
    mean: Tensor
    """[H] subtracted from points first."""
    components: Tensor | None
    """[H, D] principal axes that points are then projected on; None: D = H."""
    sizes: Tensor
    """[M, k] points nearest to each centroid in the last pass, before its last move."""
    points: int
    """How many points were clustered."""
    inertia: float
    """Mean squared distance of a point to its centroid, in the last pass."""

    def project(self, points: Tensor) -> Tensor:
        """[n, H] → [n, D]."""
        centred = points.to(self.mean.device, torch.float32) - self.mean
        return centred if self.components is None else centred @ self.components

    def labels(self, points: Tensor, group: Tensor | None = None) -> Tensor:
        """The nearest centroid 0..k−1 of each point's group, [n] for points [n, H]."""
        return nearest(self.project(points), self.centroids, group)[0]

    def to(self, device: torch.device | str) -> Clusters:
        components = None if self.components is None else self.components.to(device)
        return replace(
            self, centroids=self.centroids.to(device), mean=self.mean.to(device), components=components,
            sizes=self.sizes.to(device),
        )

    def save(self, path: Path) -> None:
        """One safetensors file."""
        tensors = {"centroids": self.centroids, "mean": self.mean, "sizes": self.sizes}
        if self.components is not None:
            tensors["components"] = self.components
        facts = {"format": FORMAT, "points": str(self.points), "inertia": repr(self.inertia)}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, part, facts)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Clusters:
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} is missing, truncated or not a safetensors file: {error}") from None
        if facts.get("format") != FORMAT:
            raise InputError(f"{path} holds no clusters: it may be of another program")
        components = tensors.get("components")
        return cls(
            tensors["centroids"], tensors["mean"], components, tensors["sizes"], int(facts["points"]),
            float(facts["inertia"]),
        )


def fit_clusters(
    pieces: Pieces, clusters: int, *, groups: int = 1, pca: int | None = None, start: Start = "k-means++",
    start_points: int = 65_536, update: Update = "full", passes: int = 10, seed: int = 0,
    on_piece: Callable[[str, int], None] | None = None,
) -> Clusters:  # fmt: skip
    """Cluster what `pieces` yield into `clusters` a group; `on_piece` is told the pass and the points of each piece.

    A first pass gathers the mean, with `pca` the covariance, and `start_points` points at random (spread over the
    groups) from which the start is drawn; all passes after it see every point. "full" moves centroids after a pass
    (Lloyd), "minibatch" after every piece, each centroid towards the mean of all points it has had. Centroids that
    end a pass without points are put on the points farthest from theirs. Passes end early when they bring nothing.
    Where a group has fewer distinct points than `clusters`, centroids repeat; with one group, that is an error.
    """
    heard = on_piece or (lambda name, count: None)
    survey = _survey(pieces, clusters, groups, pca is not None, start_points, seed, heard)
    if pca is not None and pca > len(survey.mean):
        raise InputError(f"pca to {pca} dimensions of embeddings of {len(survey.mean)}: use {len(survey.mean)} or less")
    components = None if pca is None else principal_axes(survey.covariance, pca)
    found = Clusters(torch.empty(0), survey.mean, components, torch.empty(0), survey.points, float("inf"))
    sample = found.project(survey.sample)
    generator = torch.Generator().manual_seed(seed)
    centroids = torch.stack([
        _start(sample[survey.group == g], clusters, start, generator, strict=groups == 1) for g in range(groups)
    ])
    before, seen = float("inf"), torch.zeros(groups, clusters, device=centroids.device)
    sizes = torch.zeros(groups, clusters, dtype=torch.long, device=centroids.device)
    for number in range(1, passes + 1):
        state = _Pass(centroids, seen, update)
        for piece in pieces:
            state.add(found.project(piece.points), piece.group)
            heard(f"k-means pass {number} of {passes}", len(piece.points))
        centroids, inertia, sizes = state.finish(), state.inertia(), state.counts.long()
        done, before = number > 1 and before - inertia <= CONVERGED * before, inertia
        if done:
            break
    return Clusters(centroids, survey.mean, components, sizes, survey.points, before)


def nearest(points: Tensor, centroids: Tensor, group: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of points [n, D] among centroids [M, k, D] of their group: the index 0..k−1 [n], the squared distance [n]."""
    labels = torch.empty(len(points), dtype=torch.long, device=points.device)
    distance = torch.empty(len(points), device=points.device)
    half = centroids.square().sum(-1) / 2
    for g, rows in _by_group(points, group, len(centroids)):
        for part in rows.split(max(1, CHUNK // centroids.shape[1])):
            own = points if len(part) == len(points) and group is None else points[part]
            # |x − c|² = |x|² − 2 (x·c − |c|²/2): the largest score is the nearest
            score, best = torch.addmm(-half[g], own, centroids[g].T).max(1)
            labels[part], distance[part] = best, (own.square().sum(1) - 2 * score).clamp(min=0)
    return labels, distance


def principal_axes(covariance: Tensor, dimensions: int) -> Tensor:
    """[H, D] eigenvectors of the largest eigenvalues, largest first, each with its largest entry positive."""
    axes = torch.linalg.eigh(covariance.double()).eigenvectors.flip(1)[:, :dimensions]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return (axes * largest.sign()).float().contiguous()


class _Survey(NamedTuple):
    mean: Tensor  # [H]
    covariance: Tensor  # [H, H]; empty unless asked for
    sample: Tensor  # [s, H]
    group: Tensor  # [s]
    points: int


def _survey(
    pieces: Pieces, clusters: int, groups: int, covariance: bool, size: int, seed: int,
    heard: Callable[[str, int], None],
) -> _Survey:  # fmt: skip
    """The first pass. The sample is of the points with the smallest of random keys: uniform, whatever the pieces."""
    generator = torch.Generator().manual_seed(seed + 1)
    limit = max(-(-size // groups), clusters)
    total, shift, sums, squares = 0, None, torch.zeros(()), torch.zeros(())
    keys, sample, group = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.long)
    for piece in pieces:
        points = piece.points.float()
        if not bool(points.isfinite().all()):
            raise InputError("the teacher's embeddings are not finite: use another layer or precision")
        if shift is None:  # close to the mean, so that squares lose no digits
            shift = points.mean(0)
            width, device = points.shape[1], points.device
            sums = torch.zeros(width, dtype=torch.float64, device=device)
            squares = torch.zeros((width, width) if covariance else 0, dtype=torch.float64, device=device)
            keys, sample, group = keys.to(device), points[:0], group.to(device)
        shifted = points - shift
        sums += shifted.sum(0, dtype=torch.float64)
        if covariance:
            squares += shifted.T @ shifted
        total += len(points)
        drawn = torch.rand(len(points), generator=generator).to(points.device)
        own = torch.zeros_like(drawn, dtype=torch.long) if piece.group is None else piece.group
        keys, sample, group = torch.cat([keys, drawn]), torch.cat([sample, points]), torch.cat([group, own])
        kept = _lowest(keys, group, limit)
        keys, sample, group = keys[kept], sample[kept], group[kept]
        heard("embedding", len(points))
    if shift is None or total < clusters:
        raise InputError(f"{total:,} embeddings cannot make {clusters:,} clusters: use fewer states or more text")
    offset = sums / total
    spread = (squares / total - offset.outer(offset)).float() if covariance else squares.float()
    return _Survey((shift + offset).float(), spread, sample, group, total)


def _start(sample: Tensor, clusters: int, start: Start, generator: torch.Generator, strict: bool) -> Tensor:
    """First centroids [k, D] from points [s, D] of one group."""
    if start == "random" or not len(sample):
        order = torch.randperm(len(sample), generator=generator).to(sample.device)
        distinct = torch.unique(sample[order[: 4 * clusters]], dim=0)
        chosen = distinct[torch.randperm(len(distinct), generator=generator)[:clusters].to(sample.device)]
        if len(chosen) < clusters and strict:
            distinct = torch.unique(sample, dim=0)
            _refuse(len(distinct), len(sample), clusters)
            chosen = distinct[torch.randperm(len(distinct), generator=generator)[:clusters].to(sample.device)]
    else:
        chosen = _plus_plus(sample, clusters, generator)
        if strict:
            _refuse(len(chosen), len(sample), clusters)
    if len(chosen) == clusters:
        return chosen.clone()
    if not len(chosen):  # a block whose words do not occur: its centroids lie in the middle of everything
        return sample.new_zeros(clusters, sample.shape[1])
    return chosen.repeat(-(-clusters // len(chosen)), 1)[:clusters]


def _refuse(distinct: int, sample: int, clusters: int) -> None:
    if distinct < clusters:
        raise InputError(
            f"only {distinct:,} distinct embeddings among {sample:,}, and {clusters:,} states need one each: "
            "use fewer states, another layer or another teacher"
        )


def _plus_plus(sample: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++: each next centroid is a point drawn in proportion to its squared distance from those before.

    As many as there are distinct points, at most `clusters`. Draws are made on the CPU, so that nothing waits for the
    device.
    """
    draws = torch.rand(clusters, generator=generator).tolist()
    chosen = _drawn_far_apart(sample, draws, exact=False)
    return chosen if len(chosen) == clusters else _drawn_far_apart(sample, draws, exact=True)


def _drawn_far_apart(sample: Tensor, draws: list[float], exact: bool) -> Tensor:
    """|x − c|² as |x|² − 2 x·c + |c|², which reads the sample once, or `exact`: three times as long.

    Rounding leaves the former above 0 where x = c; it then takes points that are nearly the same for one.
    """
    norms = sample.square().sum(1)

    def distance_to(point: Tensor) -> Tensor:
        if exact:
            return (sample - point).square().sum(1)
        norm = point.square().sum()
        apart = norms - 2 * (sample @ point) + norm
        return torch.where(apart > ROUNDING * (norms + norm), apart, 0.0)

    chosen = [sample[int(draws[0] * len(sample))]]
    distance, left = distance_to(chosen[0]), []
    for draw in draws[1:]:
        cumulated = distance.double().cumsum(0)
        left.append(cumulated[-1])
        at = torch.searchsorted(cumulated, cumulated[-1:] * draw, right=True).clamp(max=len(sample) - 1)
        chosen.append(sample.index_select(0, at)[0])
        distance = torch.minimum(distance, distance_to(chosen[-1]))
    distinct = 1 + (int((torch.stack(left) > 0).sum()) if left else 0)
    return torch.stack(chosen)[:distinct]


class _Pass:
    """Sums, counts and the farthest points of a pass."""

    def __init__(self, centroids: Tensor, seen: Tensor, update: Update) -> None:
        self.centroids, self.seen, self.update = centroids, seen, update
        self.sums, self.counts = torch.zeros_like(centroids), torch.zeros_like(seen)
        self.total, self.points = torch.zeros((), dtype=torch.float64, device=centroids.device), 0
        self.far, self.far_group = centroids[0, :0], torch.empty(0, dtype=torch.long, device=centroids.device)
        self.far_distance = torch.empty(0, device=centroids.device)

    def add(self, points: Tensor, group: Tensor | None) -> None:
        labels, distance = nearest(points, self.centroids, group)
        groups, clusters = self.counts.shape
        own = torch.zeros_like(labels) if group is None else group
        cells = own * clusters + labels
        counts = torch.bincount(cells, minlength=groups * clusters).view_as(self.counts).to(self.counts.dtype)
        sums = self._sums(points, labels, group)
        if self.update == "minibatch":
            self.seen += counts
            step = (sums - counts[..., None] * self.centroids) / self.seen.clamp(min=1)[..., None]
            self.centroids = self.centroids + step
        else:
            self.sums += sums
        self.counts += counts
        self.total += distance.sum(dtype=torch.float64)
        self.points += len(points)
        # only as many candidates of a piece as there could be empty centroids
        best = _lowest(-distance, own, clusters)
        far, far_group = torch.cat([self.far, points[best]]), torch.cat([self.far_group, own[best]])
        far_distance = torch.cat([self.far_distance, distance[best]])
        kept = _lowest(-far_distance, far_group, clusters)
        self.far, self.far_group, self.far_distance = far[kept], far_group[kept], far_distance[kept]

    def _sums(self, points: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
        """Sums [M, k, D] of the points of each centroid."""
        sums = torch.zeros_like(self.centroids)
        for g, rows in _by_group(points, group, len(sums)):
            own, mine = (points, labels) if group is None else (points[rows], labels[rows])
            if not points.is_cuda:
                sums[g].index_add_(0, mine, own)
                continue
            # a product is the same every time and does not queue for one address, as adding in place would
            for part in torch.arange(len(own), device=own.device).split(max(1, CHUNK // sums.shape[1])):
                hot = torch.nn.functional.one_hot(mine[part], sums.shape[1]).to(own.dtype)
                sums[g] += hot.T @ own[part]
        return sums

    def inertia(self) -> float:
        return float(self.total) / max(1, self.points)

    def finish(self) -> Tensor:
        """The centroids after the pass; those without points go to the farthest points, unless there are none."""
        if self.update == "full":
            means = self.sums / self.counts.clamp(min=1)[..., None]
            centroids = torch.where(self.counts[..., None] > 0, means, self.centroids)
        else:
            centroids = self.centroids.clone()
        for g in (self.counts == 0).any(1).nonzero().flatten().tolist():
            empty = (self.counts[g] == 0).nonzero().flatten()
            here = (self.far_group == g) & (self.far_distance > 0)
            places = torch.unique(self.far[here], dim=0, return_inverse=True)[1]
            order = self.far_distance[here].argsort(descending=True, stable=True)
            first = _first_of_each(places[order])
            chosen = self.far[here][order][first][: len(empty)]
            centroids[g, empty[: len(chosen)]] = chosen
            self.seen[g, empty] = 0
        return centroids


def _by_group(points: Tensor, group: Tensor | None, groups: int) -> list[tuple[int, Tensor]]:
    """The rows of the points of every group that has some."""
    if group is None:
        return [(0, torch.arange(len(points), device=points.device))]
    counts = torch.bincount(group, minlength=groups).tolist()
    rows = torch.argsort(group, stable=True).split(counts)
    return [(g, own) for g, own in enumerate(rows) if len(own)]


def _lowest(score: Tensor, group: Tensor, limit: int) -> Tensor:
    """Indices of the `limit` lowest scores of each group, ascending within a group."""
    order = score.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    counts = torch.bincount(group, minlength=1)
    begins = counts.cumsum(0) - counts
    rank = torch.arange(len(order), device=order.device) - begins[group[order]]
    return order[rank < limit]


def _first_of_each(values: Tensor) -> Tensor:
    """Indices of the first occurrence of every value, in order."""
    count = int(values.max()) + 1 if len(values) else 0
    first = values.new_full((count,), len(values))
    first.scatter_reduce_(0, values, torch.arange(len(values), device=values.device), "amin")
    return first.sort().values
