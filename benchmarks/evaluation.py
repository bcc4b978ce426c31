"""Time `hmmlm eval` of a large blocked model on the CPU: writes results/evaluation-cpu.json.

    PYTHONPATH=src python -m benchmarks.evaluation                        # a minute
    PYTHONPATH=src python -m benchmarks.evaluation --data ptb.test.txt    # that text instead of one with its length
    PYTHONPATH=src python -m benchmarks.evaluation --states 256 --out small.json

The model is random, with the words of the text by frequency in 128 blocks in turn: what a trained one of its size
takes. The time is that of the whole command, start and loading included.
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

# isort: off
import hmmlm  # before torch: it sets how long idle threads spin

from benchmarks.text import WORDS, blocked_model, sentences
from hmmlm.data.words import WordTokenizer
from papers.records import add_record, commit, machine
# isort: on

BLOCKS, REPEATS = 128, 3
LINES = 3_761  # of PTB's test text


def command_seconds(model: Path, text: Path) -> float:
    """Return the duration of the command."""
    command = [sys.executable, "-m", "hmmlm", "eval", str(model), "--data", str(text), "--device", "cpu"]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> None:
    """Make the model, time its evaluation and add the result to the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text, one sentence a line")
    parser.add_argument("--states", type=int, default=2**15)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, default=Path("results/evaluation-cpu.json"))
    options = parser.parse_args(arguments)
    lines = options.data.read_text().splitlines() if options.data else (sentences() * 2)[:LINES]
    counts = Counter(word for line in lines for word in line.split() if word not in ("<unk>", "<eos>"))
    words = [word for word, _ in counts.most_common(WORDS - 2)]
    words += [f"filler{number}" for number in range(WORDS - 2 - len(words))]
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder) / "model", Path(folder) / "text.txt"
        text.write_text("\n".join(lines) + "\n")
        evaluation = {"batches": {"kind": "stream", "eval_reset_at_eos": False}}
        hmm = blocked_model(options.states, BLOCKS)
        hmmlm.LanguageModel(hmm, WordTokenizer(["<unk>", "<eos>", *words]), evaluation).save(model)
        del hmm
        times = [command_seconds(model, text) for _ in range(options.repeats)]
    tokens, seconds = sum(len(line.split()) + 1 for line in lines), sorted(times)[len(times) // 2]
    metrics = {"command_seconds": round(seconds, 1), "tokens_per_second": round(tokens / seconds)}
    print(metrics, [round(each, 1) for each in times], flush=True)
    record = {
        "row": f"blocked, {options.states:,} states, {options.data.name if options.data else 'drawn text'}",
        "metrics": metrics,
        "seed": 0,
        "settings": {"states": options.states, "blocks": BLOCKS, "tokens": tokens, "cores": os.cpu_count()},
        "command": "python -m benchmarks.evaluation",
        "commit": commit(),
        "machine": machine(False),
        "date": time.strftime("%Y-%m-%d"),
        "note": f"median of {len(times)}: {', '.join(f'{each:.1f}' for each in times)} s",
    }
    add_record(options.out, record)


if __name__ == "__main__":
    main()
