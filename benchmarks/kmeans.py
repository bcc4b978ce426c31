"""Time the k-means of latent variable distillation, over embeddings that are never all in memory.

    PYTHONPATH=src python benchmarks/kmeans.py --out kmeans.json
    PYTHONPATH=src python benchmarks/kmeans.py --points 20000 --dims 64 --clusters 16 --piece 2048   (a CPU, a second)

Every pass generates the embeddings again on the device, piece by piece: planted centers plus noise, in bfloat16. The
total time includes the generation, which is also timed separately. As a check, `distance_share` is the final mean
squared distance divided by that to the planted centers: 1.1 to 1.3 is usual, because k-means++ misses some centers and
a pass moves centroids only a little.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hmmlm.distillation.kmeans import Piece, fit_clusters


class Planted:
    """Random points around `centres` [k, D], in pieces, the same in every pass."""

    def __init__(self, points: int, dims: int, clusters: int, piece: int, device: torch.device) -> None:
        self.points, self.piece, self.device = points, piece, device
        self.centres = torch.randn(clusters, dims, generator=self.generator(0), device=device)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def __iter__(self) -> Iterator[Piece]:
        for number, begin in enumerate(range(0, self.points, self.piece), 1):
            yield Piece(self.make(number, min(self.piece, self.points - begin))[0])

    def make(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Return points [n, D], and the center [n, D] of each."""
        generator = self.generator(number)
        clusters, dims = self.centres.shape
        own = self.centres[torch.randint(clusters, (size,), generator=generator, device=self.device)]
        return (own + torch.randn(size, dims, generator=generator, device=self.device)).to(torch.bfloat16), own

    def spread(self) -> float:
        """Return the mean squared distance of the first piece to its planted centers."""
        points, own = self.make(1, min(self.piece, self.points))
        return float((points.float() - own).square().sum(1).mean())


def wait(device: torch.device) -> float:
    """Synchronize with the device and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run k-means once and return times, settings and the check."""
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
                first = wait(device)  # includes k-means++, and one piece of the next pass
            names.append(name)

    found = fit_clusters(pieces, options.clusters, passes=options.passes, on_piece=on_piece)
    total = wait(device) - began
    passes = len(names) - 1  # the first pass only draws the sample
    return {
        "seconds": round(total, 3),
        "seconds_a_pass": round((began + total - first) / max(1, passes), 3),
        "seconds_making_points_a_pass": round(making, 3),
        "passes": passes,
        "points_per_second": round(options.points * (passes + 1) / total),
        "points": options.points,
        "dims": options.dims,
        "clusters": options.clusters,
        "piece": options.piece,
        "distance_share": round(found.inertia / pieces.spread(), 4),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if device.type == "cuda" else None,
        "all_points_gb": round(options.points * options.dims * 2 / 1e9, 3),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure once, print the result as JSON and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10_000_000)
    parser.add_argument("--dims", type=int, default=2048)
    parser.add_argument("--clusters", type=int, default=512)
    parser.add_argument("--piece", type=int, default=12_800, help="points per piece: a batch of 200 chunks of 64")
    parser.add_argument("--passes", type=int, default=10, help="maximum; stops early when centroids hardly move")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: cuda if available)")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
