"""Measure the settings that `hmmlm train` chooses, on texts of many kinds: `python -m papers.defaults [TEXT ...]`

The texts are those of any Debian machine, or made here. `python -m papers.defaults --write FOLDER` writes them only.
"""

from __future__ import annotations

import ast
import gettext
import json
import os
import random
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from papers.records import add_record, commit, machine

ROOT = Path(__file__).resolve().parents[1]

LICENCES = Path("/usr/share/common-licenses")
MESSAGES = Path("/usr/share/locale")
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, each on one line."""
    return (" ".join(part.split()) for part in text.split("\n\n") if part.strip())


def licences() -> Iterator[str]:
    files = sorted({path.resolve() for path in LICENCES.iterdir()})
    return (line for path in files for line in paragraphs(path.read_text(encoding="utf-8", errors="ignore")))


def modules() -> Iterator[str]:
    """Yield the source of modules of Python's library."""
    for path in sorted(LIBRARY.glob("*.py")) + sorted(LIBRARY.glob("[a-z]*/*.py")):
        if not {"test", "tests", "lib2to3", "idlelib", "pydoc_data", "encodings"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="ignore")


def source_code() -> Iterator[str]:
    return (line.rstrip() for text in modules() for line in text.splitlines() if line.strip())


def docstrings() -> Iterator[str]:
    """Yield the paragraphs of docstrings of Python's library, none twice: English."""
    seen = set()
    for text in modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for line in paragraphs(ast.get_docstring(node) or ""):
                    if line not in seen and len(line) > 30:
                        seen.add(line)
                        yield line


def documentation() -> Iterator[str]:
    return (line for topic in topics.values() for line in paragraphs(topic))


def messages(language: str) -> Iterator[str]:
    """Yield the messages of programs in a language, none twice, in a random order."""
    found = set()
    for path in sorted((MESSAGES / language / "LC_MESSAGES").glob("*.mo")):
        try:
            with path.open("rb") as file:
                translated = gettext.GNUTranslations(file)._catalog.values()  # type: ignore[attr-defined]
        except UnicodeDecodeError:  # a catalog of another encoding
            continue
        found |= {line.strip() for message in translated for line in message.split("\n") if len(line.strip()) > 7}
    lines = sorted(found)
    random.Random(0).shuffle(lines)
    return iter(lines)


def spaced(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines of characters with spaces between them; an underscore is a space."""
    return (" ".join(line.replace(" ", "_")) for line in lines)


def symbols() -> Iterator[str]:
    """Yield lines of a chain of second order over A, C, G and T."""
    draw = random.Random(0)
    weights = {(a, b): [draw.gammavariate(0.5, 1) + 0.01 for _ in "ACGT"] for a in "ACGT" for b in "ACGT"}
    for _ in range(800):
        line = ["A", "C"]
        while len(line) < 60:
            line += draw.choices("ACGT", weights[line[-2], line[-1]])
        yield " ".join(line)


def two_states(lines: int = 800) -> Iterator[str]:
    """Yield lines of an HMM of two states that rarely change, each with its own distribution of A, C, G and T."""
    draw = random.Random(0)
    for _ in range(lines):
        state, line = draw.randrange(2), []
        for _ in range(60):
            line += draw.choices("ACGT", [(8, 8, 1, 1), (1, 1, 8, 8)][state])
            state ^= draw.random() < 0.05
        yield " ".join(line)


def table() -> Iterator[str]:
    """Yield lines of a table: colors, sizes, a price that depends on the size, cities and a month."""
    draw = random.Random(0)
    for _ in range(4000):
        size = draw.choices("SMLX", (4, 5, 3, 1))[0]
        price = draw.choice({"S": (9, 12, 14), "M": (14, 19, 22), "L": (22, 29, 35), "X": (35, 49, 60)}[size])
        city = draw.choices(("Bonn", "Lyon", "Oslo", "Porto", "Turin"), (5, 4, 2, 1, 1))[0]
        color = draw.choices(("red", "blue", "green", "black"), (4, 3, 2, 1) if city > "M" else (1, 2, 3, 4))[0]
        yield f"{color},{size},{price},{city},2024-{draw.randint(1, 12):02}"


def log_lines() -> Iterator[str]:
    """Yield lines of the log of a server."""
    draw, second = random.Random(0), 0
    for _ in range(6000):
        second += draw.choice((0, 1, 1, 2, 7))
        clock = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
        user = draw.choice(("root", "anna", "ben", "cron", "www"))
        host = f"10.0.{draw.randint(0, 3)}.{draw.randint(1, 40)}"
        events = (
            f"INFO session opened for user {user} from {host}",
            f"INFO session closed for user {user}",
            f"WARN disk {draw.choice('abc')} is {draw.randint(80, 99)}% full",
            f"ERROR connection to {host} failed: timeout after {draw.choice((5, 10, 30))} s",
            f"DEBUG GET /{draw.choice(('index', 'login', 'search', 'logo'))} {draw.choice((200, 200, 304, 404))}",
        )
        yield f"{clock} {draw.choices(events, (5, 5, 2, 1, 8))[0]}"


def first(size: int, lines: Iterator[str]) -> Iterator[str]:
    """Yield lines of at most `size` characters in all."""
    for line in lines:
        size -= len(line) + 1
        if size < 0:
            return
        yield line


TEXTS: dict[str, Callable[[], Iterator[str]]] = {
    "licences": licences,
    "Python's documentation": lambda: first(300_000, documentation()),
    "English, 100 kB": lambda: first(100_000, docstrings()),
    "English, 1 MB": lambda: first(1_000_000, docstrings()),
    "source code": lambda: first(400_000, source_code()),
    "German": lambda: first(600_000, messages("de")),
    "Chinese": lambda: spaced(first(120_000, messages("zh_CN"))),
    "Japanese": lambda: spaced(first(120_000, messages("ja"))),
    "letters": lambda: spaced(first(150_000, docstrings())),
    "symbols": symbols,
    "two states": two_states,
    "a table": table,
    "log lines": log_lines,
}
"""By name; Chinese, Japanese and letters have a space between characters."""
MODELS = {"": "model", "unigram_": "unigram", "bigram_": "bigram", "ngram_": "5-gram", "mixture_": "HMM + 5-gram"}
"""The models of results.json by the first word of their metric."""


def write(name: str, folder: Path) -> Path:
    """Write a text into a folder; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (re.sub(r"\W+", "-", name) + ".txt")
    file.write_text("".join(f"{line}\n" for line in TEXTS[name]()), encoding="utf-8")
    return file


def measure(name: str) -> dict[str, Any]:
    """Train on a text with default settings; return the record."""
    with tempfile.TemporaryDirectory() as folder:
        file = write(name, Path(folder))
        options = ["train", "--data", file.name, "--train.device", "cpu", "--quiet"]
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "hmmlm", *options, "--out", "run"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            check=True,
        )
        seconds = time.perf_counter() - began
        run = Path(folder) / "run"
        results = json.loads((run / "results.json").read_text())
        config = json.loads((run / "config.json").read_text())
        header = json.loads((run / "data" / "train.json").read_text())
    metrics = {f"{key}test_perplexity": round(results[of]["test"]["perplexity"], 3) for key, of in MODELS.items()}
    metrics |= {"words": header["vocab_size"], "tokens": header["count"], "states": config["model"]["num_states"]}
    return {
        "row": name,
        "recipe": "papers/defaults.py",
        "seed": 0,
        "metrics": metrics | {"seconds": round(seconds, 1)},
        "settings": {},
        "command": f"python -m papers.defaults {shlex.quote(name)}",
        "commit": commit(),
        "machine": machine(on_gpu=False),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        for text in TEXTS:
            write(text, Path(sys.argv[2]))
    else:
        for text in sys.argv[1:] or TEXTS:
            add_record(ROOT / "results" / "defaults.json", measure(text))
