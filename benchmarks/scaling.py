"""Memory, work and messages per GPU of models larger than those measured, from the measurements in results/.

    python -m benchmarks.scaling

Prints the table of docs/guide/scaling.md. Sizes follow from the shapes of tensors. The time of normalizers is that of
their products at the rate of the largest model whose speed was measured on one GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
WORDS, HIDDEN, TOKENS = 10_000, 256, 64 * 32
FLOAT = 4
"""Bytes of a number."""
STATE = 4
"""Numbers per parameter: itself, its gradient, and two moments of AdamW."""
GPUS = (1, 8, 64)


@dataclass(frozen=True)
class Cost:
    """What one of several GPUs holds, computes and sends per step."""

    held: float
    """Bytes of parameters, gradients and moments."""
    transient: float
    """Bytes of the probabilities of a step and of their gradients."""
    normalizer: float
    """Operations of the normalizers: 2 K² h for the scores, again in the backward pass, and for either gradient."""
    sent: float
    """Bytes."""


def factored(states: int, kept: int, blocks: int, gpus: int) -> Cost:
    """Return the cost of networks on state embeddings, of which `kept` states are in a batch; blocks 1: dense emission.

    Parameters are whole in every GPU, normalizers are divided. Gradients are summed, as are the normalizers and their
    gradients; a sum by rings sends 2 (n − 1) / n of its bytes.
    """
    parameters = HIDDEN * (states + WORDS + 6 * (HIDDEN + 1))
    emissions = kept // blocks * WORDS
    sent = 2 * (gpus - 1) / gpus * FLOAT * (parameters + 2 * kept)
    return Cost(FLOAT * STATE * parameters, 2 * FLOAT * emissions, 8 * kept**2 * HIDDEN / gpus, sent)


def normalizer_rate() -> float:
    """Return operations per second of the normalizers in the largest step measured: 2^18 states, half of them kept."""
    rows = {row["row"]: row for row in json.loads((RESULTS / "chiu2020-largest.json").read_text())}
    measured = rows["PTB, 2^18 states, half of them kept, a third of an epoch"]["metrics"]["step_ms"]
    return factored(2**18, 2**17, 128, 1).normalizer / (measured / 1e3)


def table() -> str:
    """Return the table in Markdown."""
    models = {
        "2^20 states, dense emission, an eighth kept": lambda n: factored(2**20, 2**17, 1, n),
        "2^22 states in 256 blocks, an eighth kept": lambda n: factored(2**22, 2**19, 256, n),
    }
    lines = [
        "| model | GPUs | parameters, gradients, moments | probabilities, gradients | normalizers | sent per step |",
        "|---|---|---|---|---|---|",
    ]
    for name, cost_of in models.items():
        for gpus in GPUS:
            cost = cost_of(gpus)
            milliseconds = 1e3 * cost.normalizer / normalizer_rate()
            work = f"{cost.normalizer / 1e12:,.1f} Tflop, {milliseconds:,.1f} ms"
            sizes = " | ".join(f"{size / 1e9:,.1f} GB" for size in (cost.held, cost.transient))
            lines.append(f"| {name} | {gpus} | {sizes} | {work} | {cost.sent / 1e9:,.1f} GB |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
