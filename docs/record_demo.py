"""Record what `hmmlm demo` prints, for docs/guide/demo.md, in results/demo.json: python docs/record_demo.py

It takes some minutes; `python -m papers publish` then writes the page. Progress lines are left out, but for the
validation checks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # papers is beside docs, and no package of the environment
from hmmlm.report.results import MIXTURE, MODEL  # noqa: E402
from papers.records import add_record, commit, machine  # noqa: E402

WIDTH = 100
PROGRAM = "import sys; from hmmlm.cli.main import main; sys.argv[0] = 'hmmlm'; sys.exit(main())"


def record() -> dict[str, Any]:
    """Run the demo in an empty folder and return its record."""
    command = [sys.executable, "-c", PROGRAM, "demo", "--out", "runs/demo"]
    environment = os.environ | {"COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT / "src")}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        results = json.loads((Path(folder) / "runs/demo/results.json").read_text())
    return {
        "row": "hmmlm demo",
        "recipe": "demo",
        "seed": 0,
        "metrics": metrics(results) | {"seconds": round(time.perf_counter() - began, 1)},
        "settings": {},
        "command": "hmmlm demo",
        "commit": commit(),
        "machine": machine(on_gpu=False),
        "date": time.strftime("%Y-%m-%d"),
        "output": f"$ hmmlm demo\n{trim(output)}",
    }


def metrics(results: dict[str, Any]) -> dict[str, float]:
    """Return the perplexities of a results.json: of the model, the 5-gram, and the interpolation of the two."""
    names = {"": MODEL, "ngram_": "5-gram", "mixture_": MIXTURE}
    return {
        f"{prefix}{split}_perplexity": round(results[name][split]["perplexity"], 3)
        for prefix, name in names.items()
        for split in ("valid", "test")
    }


def trim(output: str) -> str:
    """Leave out the speed of single steps, and spaces at the ends of lines."""
    passing = r"(train|tokenizer|encoding \w+|valid): [\d,]+ "
    return "\n".join(line.rstrip() for line in output.splitlines() if not re.match(passing, line))


if __name__ == "__main__":
    add_record(ROOT / "results" / "demo.json", record())
