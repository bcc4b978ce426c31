"""The demonstration: train on the corpus that comes with Python, then show what was learnt."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hmmlm.experiments.explain import explain_states
from hmmlm.experiments.report import write_report
from hmmlm.experiments.results import Results, bits, gather
from hmmlm.experiments.tables import path_table, states_table
from hmmlm.learning.config import RunConfig
from hmmlm.learning.progress import Progress, perplexity_text
from hmmlm.learning.trainer import TrainResult, train

SENTENCE = "The function returns a list of the names in the module."


def demo(config: RunConfig, out: Path, progress: Progress, console: Console) -> TrainResult:
    """Train in the folder `out` and tell of it on `console`."""
    console.print("Training a hidden Markov language model on the documentation that comes with Python.")
    result = train(config, out, progress=progress)
    if result.finished:
        with console.status("evaluating and drawing"):
            results = gather(out)
            report = write_report(results, SENTENCE)
        tell(results, report, console)
    return result


def tell(results: Results, report: Path, console: Console) -> None:
    """The short report on the terminal."""
    lm, run = results.lm, results.run
    states = explain_states(lm, 8)
    console.rule("[bold]Test perplexity", align="left")
    console.print(_comparison(results))
    console.rule("[bold]Samples", align="left")
    for seed in range(4):
        console.print(Text("• " + lm.generate(max_new_tokens=40, seed=seed)))
    console.rule("[bold]The most used states and their most telling words", align="left")
    console.print(states_table(lm, states, 10))
    console.rule("[bold]The states of a sentence", align="left")
    console.print(SENTENCE)
    console.print(path_table(lm, states, SENTENCE))
    console.rule("[bold]Where things lie", align="left")
    places = {
        "report with plots": report,
        "model": run / "best",
        "to resume from": run / "last",
        "history": run / "history.jsonl",
    }
    for name, path in places.items():
        console.print(Text(f"{name:18}{path}"), soft_wrap=True)
    console.print(Text(f"next: hmmlm sample {run}   hmmlm inspect {run}   hmmlm train --data my.txt"), soft_wrap=True)


def _comparison(results: Results) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    for name in ("perplexity", "bits a token"):
        table.add_column(name, justify="right")
    rows = {name: (scores["test"], "") for name, scores in results.baselines.items()}
    rows[f"HMM, {results.lm.hmm.states:,} states"] = (results.perplexity["test"], "bold")
    for name, (perplexity, style) in sorted(rows.items(), key=lambda row: -row[1][0]):
        table.add_row(name, perplexity_text(perplexity), f"{bits(perplexity):.2f}", style=style)
    return table
