"""Time commands on the CPU, start and loading included: writes results/commands-cpu.json.

    PYTHONPATH=src python -m benchmarks.commands                        # some minutes
    PYTHONPATH=src python -m benchmarks.commands --data ptb.test.txt    # that text instead of one with its length
    PYTHONPATH=src python -m benchmarks.commands --states 256 --out small.json

These are `import hmmlm`, `hmmlm --help`, and `hmmlm eval` of a large blocked model. The model is random, with the words
of the text by frequency in 128 blocks in turn: what a trained one of its size takes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hmmlm
from benchmarks.text import WORDS, blocked_model, sentences
from hmmlm.data.words import WordTokenizer
from papers.records import add_record, commit, machine

BLOCKS, REPEATS = 128, 5
LINES = 3_761  # of PTB's test text


class Recorder:
    """Times commands and adds the medians to a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._out, self._repeats = options.out, options.repeats

    def add(self, row: str, arguments: list[str], settings: dict[str, Any], tokens: int | None = None) -> None:
        """Time Python with these arguments."""
        times = []
        for _ in range(self._repeats):
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            times.append(time.perf_counter() - began)
        seconds = sorted(times)[len(times) // 2]
        metrics = {"command_seconds": float(f"{seconds:.3g}")}
        if tokens is not None:
            metrics["tokens_per_second"] = round(tokens / seconds)
        print(row, metrics, [f"{each:.3g}" for each in times], flush=True)
        record = {
            "row": row,
            "recipe": "benchmarks/commands.py",
            "metrics": metrics,
            "seed": 0,
            "settings": settings | {"cores": os.cpu_count()},
            "command": "python -m benchmarks.commands",
            "commit": commit(),
            "machine": machine(False),
            "date": time.strftime("%Y-%m-%d"),
            "note": f"median of {len(times)}: {', '.join(f'{each:.3g}' for each in times)} s",
        }
        add_record(self._out, record)


def save_model(folder: Path, lines: list[str], states: int) -> None:
    """Save a random model of the words of a text."""
    counts = Counter(word for line in lines for word in line.split() if word not in ("<unk>", "<eos>"))
    words = [word for word, _ in counts.most_common(WORDS - 2)]
    words += [f"filler{number}" for number in range(WORDS - 2 - len(words))]
    evaluation = {"batches": {"kind": "stream", "eval_reset_at_eos": False}}
    tokenizer = WordTokenizer(["<unk>", "<eos>", *words])
    hmmlm.LanguageModel(blocked_model(states, BLOCKS), tokenizer, evaluation).save(folder)


def main(arguments: list[str] | None = None) -> None:
    """Time the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text, one sentence a line")
    parser.add_argument("--states", type=int, default=2**15)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, default=Path("results/commands-cpu.json"))
    options = parser.parse_args(arguments)
    recorder = Recorder(options)
    recorder.add("import hmmlm", ["-c", "import hmmlm"], {})
    recorder.add("hmmlm --help", ["-m", "hmmlm", "--help"], {})
    lines = options.data.read_text().splitlines() if options.data else (sentences() * 2)[:LINES]
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder) / "model", Path(folder) / "text.txt"
        text.write_text("\n".join(lines) + "\n")
        save_model(model, lines, options.states)
        tokens = sum(len(line.split()) + 1 for line in lines)
        recorder.add(
            f"hmmlm eval, {options.states:,} states, {options.data.name if options.data else 'drawn text'}",
            ["-m", "hmmlm", "eval", str(model), "--data", str(text), "--device", "cpu"],
            {"states": options.states, "blocks": BLOCKS, "tokens": tokens},
            tokens,
        )


if __name__ == "__main__":
    main()
