"""Time k-means as latent variable distillation does it, over embeddings that are never all in memory.

    PYTHONPATH=src python benchmarks/kmeans.py --out kmeans.json
    PYTHONPATH=src python benchmarks/kmeans.py --points 20000 --dims 64 --clusters 16 --piece 2048   (a CPU, a second)

Embeddings are made on the device again in every pass, piece by piece: planted centres and noise, in bfloat16. Making
them is timed alone and left in the total. As a check, the mean squared distance that k-means ends with is given as a
share of that to the planted centres: 1.1 to 1.3 is usual, because k-means++ misses some of them and a pass moves
centroids only a little. (With --pca it is of other dimensions, and not given.)
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.initialization.clustering import Piece, fit_clusters


class Planted:
    """`points` points around `centres` [k, D], the same in every pass."""

    def __init__(self, points: int, dims: int, clusters: int, piece: int, device: torch.device) -> None:
        self.points, self.piece, self.device = points, piece, device
        self.centres = torch.randn(clusters, dims, generator=self.generator(0), device=device)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def __iter__(self) -> Iterator[Piece]:
        for number, begin in enumerate(range(0, self.points, self.piece), 1):
            yield Piece(self.make(number, min(self.piece, self.points - begin))[0])

    def make(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Points [n, D], and the centre [n, D] of each."""
        generator = self.generator(number)
        clusters, dims = self.centres.shape
        own = self.centres[torch.randint(clusters, (size,), generator=generator, device=self.device)]
        return (own + torch.randn(size, dims, generator=generator, device=self.device)).to(torch.bfloat16), own

    def spread(self) -> float:
        """Mean squared distance to the planted centres, of the first piece."""
        points, own = self.make(1, min(self.piece, self.points))
        return float((points.float() - own).square().sum(1).mean())


def wait(device: torch.device) -> float:
    """The time, when the device has done everything so far."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    pieces = Planted(options.points, options.dims, options.clusters, options.piece, device)
    fit_clusters(Planted(4 * options.clusters, options.dims, options.clusters, options.piece, device), options.clusters)
    began = wait(device)
    for _ in pieces:
        pass
    making = wait(device) - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    names: list[str] = []  # of the passes, in order
    began = wait(device)
    first = began

    def on_piece(name: str, count: int) -> None:
        nonlocal first
        if name not in names:
            if len(names) == 1:
                first = wait(device)  # with the start, and one piece of the next
            names.append(name)

    found = fit_clusters(
        pieces, options.clusters, pca=options.pca, start=options.start, update=options.update, passes=options.passes,
        on_piece=on_piece,
    )  # fmt: skip
    total = wait(device) - began
    passes = len(names) - 1  # the first only looks, and draws the start
    return {
        "seconds": round(total, 3), "seconds_a_pass": round((began + total - first) / max(1, passes), 3),
        "seconds_making_points_a_pass": round(making, 3), "passes": passes,
        "points_per_second": round(options.points * (passes + 1) / total), "points": options.points,
        "dims": options.dims, "clusters": options.clusters, "piece": options.piece, "pca": options.pca,
        "start": options.start, "update": options.update,
        "distance_share": None if options.pca else round(found.inertia / pieces.spread(), 4),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if device.type == "cuda" else None,
        "all_points_gb": round(options.points * options.dims * 2 / 1e9, 3),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10_000_000)
    parser.add_argument("--dims", type=int, default=2048)
    parser.add_argument("--clusters", type=int, default=512)
    parser.add_argument("--piece", type=int, default=12_800, help="points at a time: a batch of 200 chunks of 64")
    parser.add_argument("--passes", type=int, default=10, help="at most; they end when centroids hardly move")
    parser.add_argument("--pca", type=int, default=None)
    parser.add_argument("--start", choices=("k-means++", "random"), default="k-means++")
    parser.add_argument("--update", choices=("full", "minibatch"), default="full")
    parser.add_argument("--device", default=None, help="cpu or cuda; cuda if there is one")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
