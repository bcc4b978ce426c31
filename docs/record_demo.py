"""Record what `hmmlm demo` prints, as the text of docs/guide/demo.md: python docs/record_demo.py (some minutes).

Progress lines are left out, but for the validation checks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parent / "guide" / "demo.md"
WIDTH = 100
PROGRAM = "import sys; from hmmlm.cli.main import main; sys.argv[0] = 'hmmlm'; sys.exit(main())"


def record() -> str:
    """Run the demo in an empty folder and return its output."""
    command = [sys.executable, "-c", PROGRAM, "demo", "--out", "runs/demo"]
    environment = os.environ | {"COLUMNS": str(WIDTH), "PYTHONPATH": str(PAGE.parents[2] / "src")}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout


def trim(output: str) -> str:
    """Leave out the speed of single steps, and spaces at the ends of lines."""
    passing = r"(train|tokenizer|encoding \w+|valid): [\d,]+ "
    return "\n".join(line.rstrip() for line in output.splitlines() if not re.match(passing, line))


def insert(page: str, recording: str) -> str:
    """Return the page with another recording in its block of text."""
    before, _, rest = page.partition("```text\n")
    return f"{before}```text\n$ hmmlm demo\n{recording}\n```{rest.partition('```')[2]}"


if __name__ == "__main__":
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), trim(record())), encoding="utf-8")
