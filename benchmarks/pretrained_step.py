"""Time one optimizer step of a pretrained Llama as a parameterization: eager, and replayed from a CUDA graph.

    PYTHONPATH=src python benchmarks/pretrained_step.py --out pretrained-step.json   # needs transformers and a GPU

The network has the shape of stories15M with random weights. A step is forward and backward over the state embeddings
and a fused AdamW update of embeddings and network.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from hmmlm.distillation.transfer import PretrainedStack

SHAPE = {"vocab_size": 32_000, "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6}
STATES, WARM_UP, REPEATS = 512, 3, 50


def make_step() -> tuple[Callable[[], None], torch.Tensor, bool]:
    """Return a training step, the state embeddings [Z, h] it updates, and whether the stack is graphable."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_attention_heads=6, max_position_embeddings=256, **SHAPE)
    stack = PretrainedStack(transformers.LlamaForCausalLM(config)).cuda()
    embeddings = torch.randn(STATES, SHAPE["hidden_size"], device="cuda").requires_grad_()
    target = torch.randn_like(embeddings)
    optimizer = torch.optim.AdamW([embeddings, *stack.parameters()], lr=1e-4, fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (stack(embeddings) - target).square().mean().backward()
        optimizer.step()

    return step, embeddings, stack.graphable


def warm_up(step: Callable[[], None]) -> None:
    """Run steps on a side stream, as capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def median_ms(step: Callable[[], Any]) -> float:
    """Return the median time of a step in milliseconds."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times), 3)


def measure() -> dict[str, Any]:
    """Time eager and graph-replayed steps, and compare their results after the same number of steps."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    step, embeddings, graphable = make_step()
    result: dict[str, Any] = {"machine": torch.cuda.get_device_name(), **versions, "graphable": graphable}
    warm_up(step)
    step()
    expected = embeddings.detach().clone()
    result["eager_ms"] = median_ms(step)
    step, embeddings, _ = make_step()
    try:
        warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        result["max_difference"] = float((embeddings - expected).abs().max())
        result["graph_ms"] = median_ms(graph.replay)
    except RuntimeError as error:
        result["capture_error"] = str(error).splitlines()[0]
    return result


def main() -> None:
    """Measure once, print the result as JSON and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is available: run this benchmark on a GPU")
    text = json.dumps(measure(), indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
