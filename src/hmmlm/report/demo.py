"""Run the demonstration: train on the corpus that comes with Python, then print and write a report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hmmlm.config.run import RunConfig
from hmmlm.report.explain import explain_states
from hmmlm.report.page import write_report
from hmmlm.report.results import MIXTURE, RunResults, evaluate_run
from hmmlm.report.tables import path_table
from hmmlm.runs.commands import program
from hmmlm.runs.progress import Progress, perplexity_text
from hmmlm.terminal import printable
from hmmlm.training.train import train
from hmmlm.training.trainer import TrainResult

SENTENCE = "The function returns a list of the names in the module."
BLANK = "The function returns the ___ of the list."
WORDS = ("function", "list")


def run_demo(config: RunConfig, out: Path, progress: Progress, console: Console) -> TrainResult:
    """Train in the folder `out`, write the report there and print a summary on `console`."""
    console.print("Training a hidden Markov language model on the documentation that comes with Python.")
    result = train(config, out, progress=progress)
    if result.finished:
        with console.status("evaluating and plotting"):
            results = evaluate_run(out)
            report = write_report(results, SENTENCE)
        print_summary(results, report, console)
    return result


def print_summary(results: RunResults, report: Path, console: Console) -> None:
    """Print perplexities, samples, states, the states of a sentence, and the files of a run."""
    lm, run = results.lm, results.run
    summary = explain_states(lm, 8)
    console.rule("[bold]Test perplexity", align="left")
    console.print(_comparison(results))
    console.print(_verdict(results))
    console.rule("[bold]Samples", align="left")
    short: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.7, "seed": 0, "allow_unk": False, "num_samples": 4}
    _print_texts(lm.generate(**short), console)
    console.rule("[bold]Exact, and what no n-gram or LSTM can do: a word by both its sides", align="left")
    console.print(BLANK)
    console.print(", ".join(f"{word} {p:.0%}" for word, p in lm.infill(BLANK, 6, allow_unk=False)[0]), markup=False)
    console.rule(f"[bold]Texts that must contain {' and '.join(map(repr, WORDS))}", align="left")
    _print_texts(lm.generate(must=WORDS, **short), console)
    console.rule("[bold]The states of a sentence", align="left")
    console.print(SENTENCE)
    console.print(path_table(lm, summary, SENTENCE))
    console.rule("[bold]Files", align="left")
    files = {
        "report with plots": report,
        "model": run / "best",
        "last checkpoint": run / "last",
        "history": run / "history.jsonl",
    }
    for name, path in files.items():
        console.print(Text(printable(f"{name:18}{path}")), soft_wrap=True)
    console.rule("[bold]Three things to try next", align="left")
    for command, purpose in next_steps(run).items():
        console.print(Text(printable(command)), soft_wrap=True)
        console.print(Text(f"    {purpose}"), style="dim", soft_wrap=True)


def _print_texts(texts: Sequence[str], console: Console) -> None:
    for text in texts:
        console.print(Text(f"• {text}"))


def next_steps(run: Path) -> dict[str, str]:
    """Return the commands that the demonstration ends with, each with what it does; the report lists others."""
    hmmlm, folder = program(), shlex.quote(str(run))
    return {
        f"{hmmlm} explore {folder}": "look at sentences and states in the browser",
        f'{hmmlm} sample {folder} --prompt "the" --must "a list"': "generate text that must contain a phrase",
        f"{hmmlm} train --data my.txt": "train on your own text: one example per line",
    }


def _verdict(results: RunResults) -> str:
    """Return what the comparison shows."""
    hmm, ngram, both = (scores["test"] for scores in (results.scores, results.baselines["5-gram"], results.mixture))
    share = 1 - both.perplexity / ngram.perplexity
    ahead = "behind" if hmm.perplexity > ngram.perplexity else "ahead of"
    return (
        f"{MIXTURE}, the average of their probabilities ({results.mixture_weight:.0%} HMM), is {share:.0%} below the "
        f"5-gram: states know which words are alike, and counts remember phrases. Alone, the HMM is {ahead} the 5-gram."
    )


def _comparison(results: RunResults) -> Table:
    """Return a table of the test perplexities of the HMM and its baselines, best last."""
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    for name in ("perplexity", "known words", "bits per token"):
        table.add_column(name, justify="right")
    rows = {name: (scores["test"], "") for name, scores in results.baselines.items()}
    rows[f"HMM, {results.lm.hmm.num_states:,} states"] = (results.scores["test"], "bold")
    rows[MIXTURE] = (results.mixture["test"], "bold")
    for name, (score, style) in sorted(rows.items(), key=lambda row: -row[1][0].perplexity):
        figures = (score.perplexity, score.known_perplexity)
        table.add_row(name, *map(perplexity_text, figures), f"{score.bits_per_token:.2f}", style=style)
    table.caption = f"{results.scores['test'].unknown_share:.1%} of the words are unknown"
    table.caption_justify, table.caption_style = "left", ""
    return table
