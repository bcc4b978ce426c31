"""How well an HMM knows the language model that it was distilled from: perplexities of held-out samples."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hmmlm.baselines.ngram import FloatArray
from hmmlm.data.files import write_bytes
from hmmlm.distillation.samples import SampleFolder
from hmmlm.learning.distill import SAMPLES
from hmmlm.lm.scoring import perplexity
from hmmlm.report.results import MODEL, RunResults, evaluate_run

DISTILLATION = "distillation.json"
"""File of a run with these figures."""
TEACHER = "the language model"
FIRST_RANGE = 8
"""Tokens of the first range of positions; every further range is as long as all before it."""


@dataclass(frozen=True)
class DistillationResults:
    """A finished distillation."""

    run: RunResults
    positions: list[dict[str, Any]]
    """Ranges of positions in a text: first, last and tokens, and the perplexity of each model on the test samples."""

    @property
    def overall(self) -> dict[str, Any]:
        """The last entry of the positions: all of them."""
        return self.positions[-1]


def evaluate_distillation(out: Path, samples: Path | None = None) -> DistillationResults:
    """Evaluate a run on the folder `samples` (None: its own), and write distillation.json into the run's folder."""
    run = evaluate_run(out)
    log_probs = {**run.test_log_probs, TEACHER: SampleFolder(samples or out / SAMPLES).log_probs("test")}
    positions = by_position(log_probs, np.asarray(run.data.tokens["test"].documents))
    results = DistillationResults(run, positions)
    write_bytes(out / DISTILLATION, (json.dumps({"test": positions}, indent=1) + "\n").encode())
    return results


def by_position(log_probs: dict[str, FloatArray], documents: np.ndarray) -> list[dict[str, Any]]:
    """Return perplexities by ranges of the position in a document, the first token being 1, and of all positions.

    Args:
        log_probs: [N] of the same tokens, by model.
        documents: [D+1] offsets of the documents.
    """
    lengths = np.diff(documents)
    position = np.arange(documents[-1]) - np.repeat(documents[:-1], lengths) + 1
    longest = int(lengths.max())
    edges = [0, *(FIRST_RANGE << i for i in range(64) if FIRST_RANGE << i < longest), longest]
    rows = []
    for first, last in [*pairwise(edges), (0, longest)]:
        chosen = (position > first) & (position <= last)
        tokens = int(chosen.sum())
        found = {name: perplexity(float(values[chosen].sum()), tokens) for name, values in log_probs.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
        rows.append({"first": first + 1, "last": last, "tokens": tokens, "perplexity": finite})
    return rows


def print_distillation(results: DistillationResults) -> None:
    """Print the perplexities of held-out samples by position."""
    from rich.console import Console
    from rich.table import Table

    from hmmlm.runs.progress import perplexity_text

    names = {MODEL: "HMM", TEACHER: TEACHER}
    table = Table(title="perplexity of held-out samples", title_justify="left", box=None, pad_edge=False)
    table.add_column("position")
    for name in ("tokens", *(names.get(name, name) for name in results.overall["perplexity"])):
        table.add_column(name, justify="right")
    for row in results.positions:
        label = "all" if row is results.overall else f"{row['first']}–{row['last']}"
        values = (math.inf if value is None else value for value in row["perplexity"].values())
        table.add_row(label, f"{row['tokens']:,}", *(perplexity_text(value, 2) for value in values))
    Console().print(table)
