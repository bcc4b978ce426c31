"""Work of a GPU: CUDA graphs, captured once and replayed by a single launch, and independent work side by side."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")
_STREAMS = 4


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
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the streams of `side_by_side`, always the same: freed memory is reused in its own stream only."""
    return [torch.cuda.Stream(device) for _ in range(_STREAMS)]


def side_by_side(
    device: torch.device, main: Callable[[], Any], *sides: Callable[[], Any], shared: Tensor | None = None
) -> tuple[Any, ...]:
    """Call functions that launch independent work, on a GPU each in a stream of its own; return their results.

    The caller keeps whatever tensors they use until this returns: memory that is freed earlier could be allocated, and
    written, by another of them. Work that is launched after this waits for all. Works while a graph is captured.

    A function may call this again. The backward pass of a function runs in its stream too.

    Args:
        shared: a tensor that the backward passes of the sides read, and that was allocated before.
    """
    if device.type != "cuda":
        return main(), *(side() for side in sides)
    stream, found = torch.cuda.current_stream(device), list[Any]()
    streams = [own for own in _side_streams(device) if own != stream][: len(sides)]
    for side, own in zip(sides, streams, strict=True):
        own.wait_stream(stream)
        if shared is not None:
            shared.record_stream(own)
        with torch.cuda.stream(own):
            found.append(side())
    first = main()
    for own in streams:
        stream.wait_stream(own)
    for tensor in tree_leaves(found):
        if isinstance(tensor, Tensor):
            tensor.record_stream(stream)  # freed memory is not reused in its own stream before this one has read it
    return first, *found
