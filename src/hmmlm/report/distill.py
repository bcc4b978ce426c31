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
from hmmlm.lm.scoring import perplexity
from hmmlm.report.results import BASELINES, MODEL, RunResults, count_ngram, evaluate_run
from hmmlm.runs.progress import perplexity_text
from hmmlm.training.distill import SAMPLES

DISTILLATION = "distillation.json"
"""File of a run with these figures."""
TEACHER, NGRAM = "the language model", "5-gram"
FIRST_RANGE = 8
"""Tokens of the first range of positions; every further range is as long as all before it."""


@dataclass(frozen=True)
class DistillationResults:
    """A finished distillation."""

    run: RunResults
    positions: list[dict[str, Any]]
    """Ranges of positions in a text: first, last and tokens, and the perplexity of each model on the test samples."""
    guesses: dict[str, float]
    """The share of the model's choices in the test samples that a draw of each model predicts: its mean probability."""
    half_perplexity: float
    """Of the 5-gram of half of the samples, on the test samples."""

    @property
    def overall(self) -> dict[str, Any]:
        """The last entry of the positions: all of them."""
        return self.positions[-1]


def evaluate_distillation(out: Path, samples: Path | None = None) -> DistillationResults:
    """Evaluate a run on the folder `samples` (None: its own), and write distillation.json into the run's folder."""
    run = evaluate_run(out)
    log_probs = {**run.test_log_probs, TEACHER: SampleFolder(samples or out / SAMPLES).log_probs("test")}
    positions = by_position(log_probs, np.asarray(run.data.tokens["test"].documents))
    test, restarts = np.asarray(run.data.tokens["test"].tokens).astype(np.int64), run.lm.restarts
    half = count_ngram(run.data, BASELINES[NGRAM], restarts, len(run.data.tokens["train"]) // 2).log_probs(test)
    unigram = count_ngram(run.data, 1, restarts).log_probs(test)
    guesses = {name: float(np.exp(values).mean()) for name, values in {"unigram": unigram, **log_probs}.items()}
    results = DistillationResults(run, positions, guesses, perplexity(float(half.sum()), len(test)))
    facts = {"test": positions, "guesses": guesses, "half_perplexity": results.half_perplexity}
    write_bytes(out / DISTILLATION, (json.dumps(facts, indent=1) + "\n").encode())
    return results


def verdict(results: DistillationResults) -> str:
    """Return how good a guide the HMM is, and what more samples would give."""
    figures = {name: math.inf if value is None else value for name, value in results.overall["perplexity"].items()}
    shares, hmm, ngram = results.guesses, figures[MODEL], figures[NGRAM]
    tokens = len(results.run.data.tokens["train"])
    weak = (
        f"That is weak: counts of the same samples reach a perplexity of {perplexity_text(ngram)}, the HMM "
        f"{perplexity_text(hmm)}, so steered texts will be less natural than they could be. "
        if hmm > ngram
        else ""
    )
    return (
        f"The HMM predicts {shares[MODEL]:.1%} of the model's choices (unigram {shares['unigram']:.1%}, {NGRAM} "
        f"{shares[NGRAM]:.1%}, the model itself {shares[TEACHER]:.1%}). {weak}More samples help (--tokens): from "
        f"{tokens // 2:,} to {tokens:,} training tokens, the perplexity of a {NGRAM} changes by "
        f"{ngram / results.half_perplexity - 1:+.0%}; expect about as much of twice as many."
    )


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
    Console().print(verdict(results), markup=False, highlight=False)
