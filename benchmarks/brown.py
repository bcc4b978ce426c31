"""Time Brown clustering on one core, and compare its mutual information with that of the classic tool's clusters.

    python -m benchmarks.brown train.txt --clusters 128 --paths other.paths --out results/chiu2020-brown.json

The text consists of whitespace-separated words, read as the classic tool does: one sequence, line breaks are spaces.
--paths is a `paths` file that the classic tool wrote for the same text. The mutual information is between the clusters
of neighboring words, in nats.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np

from hmmlm.structure.bigrams import average_mutual_information
from hmmlm.structure.brown import brown_clusters
from hmmlm.structure.paths import read_paths
from papers.records import commit, machine


def main() -> None:
    """Cluster the text, print the metrics and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--clusters", type=int, default=128)
    parser.add_argument("--paths", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    text = options.text.read_text().split()
    words = sorted(set(text))
    number = {word: i for i, word in enumerate(words)}
    tokens = np.array([number[word] for word in text])
    began = time.perf_counter()
    ours = brown_clusters(tokens, len(words), options.clusters)
    metrics = {"seconds_in_all": round(time.perf_counter() - began, 1)}
    metrics["mutual_information"] = round(average_mutual_information(tokens, ours.cluster), 4)
    if options.paths:
        other = read_paths(options.paths, words)
        metrics["classic_mutual_information"] = round(average_mutual_information(tokens, other.cluster), 4)
        metrics["ratio"] = round(metrics["mutual_information"] / metrics["classic_mutual_information"], 4)
    print(f"{len(text):,} words, {len(words):,} of them different: {metrics}")
    record = {
        "row": f"{len(text):,} words of text, {len(words):,} types, {options.clusters} clusters",
        "recipe": "benchmarks/brown.py",
        "seed": 0,
        "metrics": metrics,
        "settings": {"clusters": options.clusters},
        "command": f"python -m benchmarks.brown TEXT --clusters {options.clusters} --paths PATHS",
        "commit": commit(),
        "machine": f"one core of {machine(False)}",
        "date": time.strftime("%Y-%m-%d"),
    }
    if options.out:
        options.out.write_text(json.dumps([record], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
