"""Recording of CUDA graphs: what a function launches is captured once, and replayed by a single launch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

Result = TypeVar("Result")


def record(
    launch: Callable[[], Result], mode: Literal["global", "thread_local"] = "global"
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture what `launch` launches; return the graph and the result, whose tensors each replay overwrites.

    Args:
        mode: "thread_local" if other threads may use the GPU meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    # Freeing what an earlier run left in a reference cycle, its graph included, would invalidate the capture.
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            result = launch()
    finally:
        if enabled:
            gc.enable()
    return graph, result
