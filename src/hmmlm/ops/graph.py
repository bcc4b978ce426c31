"""Work of a GPU: CUDA graphs, captured once and replayed by a single launch, and independent work side by side."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar

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


@cache
def _side_stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """Return one of the streams of `side_by_side`, always the same: freed memory is reused in its own stream only."""
    return torch.cuda.Stream(device)


def side_by_side(device: torch.device, main: Callable[[], Any], *sides: Callable[[], Any]) -> tuple[Any, ...]:
    """Call functions that launch independent work, on a GPU each in a stream of its own; return their results.

    The caller keeps whatever tensors they use until this returns: memory that is freed earlier could be allocated, and
    written, by another of them. Work that is launched after this waits for all. Works while a graph is captured.

    Not for functions that autograd records: their backward passes would run in the same streams, and free memory that
    another stream still reads.
    """
    if device.type != "cuda":
        return main(), *(side() for side in sides)
    stream, found = torch.cuda.current_stream(device), list[Any]()
    streams = [_side_stream(device, i) for i in range(len(sides))]
    for side, own in zip(sides, streams, strict=True):
        own.wait_stream(stream)
        with torch.cuda.stream(own):
            found.append(side())
    first = main()
    for own in streams:
        stream.wait_stream(own)
    return first, *found
