"""Work of a GPU: CUDA graphs, captured once and replayed by a single launch, and independent work side by side."""

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


def side_by_side(launch: Callable[[int], None], count: int, device: torch.device) -> None:
    """Call launch(0) … launch(count − 1), which launch independent work: on a GPU each in a stream of its own.

    Tensors that parts after the first use must be allocated before, by the caller. Work that is launched after this
    waits for all parts. Works while a graph is captured.
    """
    if device.type != "cuda":
        for part in range(count):
            launch(part)
        return
    main = torch.cuda.current_stream(device)
    sides = [torch.cuda.Stream(device) for _ in range(1, count)]
    for part, stream in enumerate(sides, 1):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            launch(part)
    launch(0)
    for stream in sides:
        main.wait_stream(stream)
