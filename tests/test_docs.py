"""The documentation: every block of Python and shell runs, every notebook runs, and the site has no broken link."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers.browser import BROWSER
from helpers.causal import save_causal
from helpers.commands import python_environment

from docs import modules
from docs.record_demo import trim
from docs.run_notebooks import NOTEBOOKS, execute
from hmmlm import HMM
from hmmlm.cli.main import main
from hmmlm.report import demo, page

ROOT = Path(__file__).parent.parent
PAGES = [
    file for file in sorted((ROOT / "docs").rglob("*.md")) if re.search(r"^```(sh|python)$", file.read_text(), re.M)
]
NOT_RUN = {
    "lm_eval": "needs lm-evaluation-harness with tasks from the hub; tests/test_lm_harness.py runs a local task",
    "hmmlm.lm.harness": "needs lm-evaluation-harness with tasks from the hub",
    "torchrun": "needs several machines; tests/test_ranks_training.py runs it on one",
    "ptb": "needs the Penn Treebank",
    "mine.toml": "extends a recipe for the Penn Treebank; tests/test_readme.py loads it",
    "python -m papers": "takes hours, or rewrites results; tests/test_papers_*.py run the studies",
}
"""Parts of commands and of blocks of Python that tests do not run, and why. Everything else in docs/ runs."""
LIBRARIES = {"to_hmmlearn": "hmmlearn", "to_dynamax": "dynamax"}
"""Blocks of Python that run where a library is installed."""
FASTER = {
    "train": ["--train.epochs", "1"],
    "baseline": ["--train.epochs", "1"],
    "teacher": ["--train.epochs", "1"],
    "distill": ["--tokens", "2000", "--length", "20", "--num-states", "4", "--epochs", "1"],
    "explore": ["--export", "page.html"],
}
"""Options that make commands short, and end."""
SMALLER = {"--model.num-states": "16", "--train.devices": "2", "--workers": "2"}
"""Values in place of those of the guides."""
FEWER_TOKENS = ("tokens=1_000_000", "tokens=2_000, length=20, num_states=4")
WORDS = "the a of list None text line another returns value is returned sentence sequence item"
STORY = ["Once", "upon", "a", "time", "Lily", "Tom", "had", "park", "ice", "cream", "dog", "ran", "."]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a user with texts, a causal language model, and the runs that the guides start from."""
    home, chance = tmp_path_factory.mktemp("home"), random.Random(0)
    lines = ["the " + " ".join(chance.choices(WORDS.split(), k=10)) + " a list" for _ in range(100)]
    for name in ("my.txt", "another.txt", "large.txt"):
        (home / name).write_text("\n".join(lines) + "\n")
    save_causal(home / "path" / "to" / "model", rows=len(STORY) + 3, context=256, words=STORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for seed, names in enumerate((("mine", "first"), ("other", "second"))):
            run = ["--out", f"runs/{names[0]}", "--model.num-states", "16", "--train.seed", str(seed)]
            assert main(["train", "--data", "my.txt", "--quiet", *run, *FASTER["train"]]) == 0
            shutil.copytree(f"runs/{names[0]}", f"runs/{names[1]}", symlinks=True)
    return home


def pieces(file: Path) -> list[tuple[str, str]]:
    """Return the blocks of Python, and the single commands of the shell, of a page in order."""
    found = []
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", file.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        if language == "python" or "#SBATCH" in block:
            found.append((language, block))
        else:
            lines = block.replace("\\\n", " ").splitlines()
            found += [(language, line) for line in lines if line.strip() and not line.startswith("#")]
    return found


def missing_library(piece: str) -> str | None:
    """Return the first library that a block of Python needs and that is not installed."""
    names = (name for use, name in LIBRARIES.items() if use in piece)
    return next((name for name in names if importlib.util.find_spec(name) is None), None)


def run_command(line: str) -> None:
    """Run a command of `hmmlm` with small models. Anything else in a block of the shell is an error."""
    program, command, *argv = shlex.split(line.replace("MODEL", "path/to/model"), comments=True)
    assert program in ("hmmlm", ".venv/bin/hmmlm"), f"no test runs {line!r}: see NOT_RUN"
    if "--out" in argv:  # a page starts where it likes: runs/mine may be what it trains, or what it uses
        shutil.rmtree(argv[argv.index("--out") + 1], ignore_errors=True)
    for option in SMALLER.keys() & set(argv):
        argv[argv.index(option) + 1] = SMALLER[option]
    chosen = "--model.kind" in argv or "--model.num-states" in argv
    extra = [] if chosen or command != "train" else ["--model.num-states", SMALLER["--model.num-states"]]
    if "neural" in argv:
        extra = ["--model.num-states", "16", "--model.blocks", "4", "--model.hidden", "8"]
    extra += [] if "--export" in argv else FASTER.get(command, [])
    assert main([command, *argv, *extra]) == 0, line


@pytest.mark.slow
@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_every_block_runs(file: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = shutil.copytree(home, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr(page, "write_report", lambda results, *rest: results.run / "report.html")
    names: dict[str, Any] = {"MODEL": "path/to/model"}
    missing = set()
    for language, piece in pieces(file):
        if any(part in piece for part in NOT_RUN):
            continue
        if language == "sh":
            run_command(piece)
        elif missing_library(piece) is None:
            exec(compile(piece.replace(*FEWER_TOKENS), file.name, "exec"), names)
        else:
            missing.add(missing_library(piece))
    if missing:
        pytest.skip(f"{file.name}: a block needs {missing.pop()}, which is not installed; all other blocks ran")


@pytest.mark.parametrize("part", NOT_RUN)
def test_what_is_not_run_says_why(part: str) -> None:
    """Show in the list of skipped tests what users may find broken, and fail when it is no longer in the pages."""
    where = {file.name for file in PAGES for _, piece in pieces(file) if part in piece}
    assert where, f"no page has {part!r}: remove it from NOT_RUN"
    pytest.skip(f"{', '.join(sorted(where))}: {part!r} is not run: {NOT_RUN[part]}")


@pytest.mark.slow
def test_the_tables_of_modules_are_current() -> None:
    page = modules.PAGE.read_text(encoding="utf-8")
    assert modules.written(page) == page, "run python docs/modules.py"


def test_folders_import_only_from_those_above_them_in_the_table() -> None:
    page, package = modules.PAGE.read_text(encoding="utf-8"), ROOT / "src" / "hmmlm"
    table = page[page.index("| folder | subject |") :].split("\n\n")[0]
    rooms = [name.rstrip("/") for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    found = sorted(p.name for p in package.iterdir() if p.suffix == ".py" or list(p.glob("*.py")))
    assert sorted(rooms) == sorted({*found, "papers"} - {"__init__.py", "__main__.py"})
    for path in package.rglob("*.py"):
        own = path.relative_to(package).parts[0]
        if own in rooms:
            text = path.read_text(encoding="utf-8")
            used = {
                name if name in rooms else f"{name}.py" for name in re.findall(r"^\s*from hmmlm\.(\w+)", text, re.M)
            }
            higher = [name for name in used if rooms.index(name) > rooms.index(own)]
            assert not higher, f"{path} imports from {higher}"


def test_the_page_of_hmms_has_all_that_a_user_sees() -> None:
    page = (ROOT / "docs" / "api" / "hmm.md").read_text(encoding="utf-8")
    assert not [name for name in dir(HMM) if name[0] != "_" and not re.search(rf"\b{name}\b", page)]


def test_the_list_of_studies_is_printed() -> None:
    command = [sys.executable, "-m", "papers", "--list"]
    assert "chiu2020-table1" in subprocess.check_output(command, cwd=ROOT, env=python_environment(), text=True)


def test_the_recording_of_the_demo_has_all_that_it_prints() -> None:
    """Record it again with docs/record_demo.py."""
    recording = (ROOT / "docs" / "guide" / "demo.md").read_text(encoding="utf-8")
    titles = re.findall(r'console\.rule\("\[bold\]([^"]+)"', Path(demo.__file__).read_text(encoding="utf-8"))
    assert len(titles) > 4
    for text in (*titles, *(text for step in demo.next_steps(Path("runs/demo")).items() for text in step)):
        assert f"\n{text}" in recording.replace("\n    ", "\n"), text
    assert (
        trim("train: 6,144 of 9 tokens\nepoch 1.00, step 8\nencoding valid: 3 documents\nend ")
        == "epoch 1.00, step 8\nend"
    )


def test_there_are_notebooks() -> None:
    assert {file.stem for file in NOTEBOOKS} == {"exact-questions", "train-and-compare", "distil-and-steer"}


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_and_keeps_light_outputs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if file.stem == "distil-and-steer":
        pytest.importorskip("transformers", reason="transformers is not installed")
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored["nbformat"] == 4 and len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])
    assert file.stat().st_size < 200_000
    monkeypatch.chdir(tmp_path)
    fresh = json.loads(file.read_text(encoding="utf-8"))
    execute(fresh, file.name)
    for before, now in zip(stored["cells"], fresh["cells"], strict=True):
        kinds = [[output["output_type"] for output in cell.get("outputs", ())] for cell in (before, now)]
        assert kinds[0] == kinds[1], "".join(now["source"])


def test_a_cell_that_raises_is_an_error(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["x = 1\n", "x / 0"]}
    with pytest.raises(ZeroDivisionError):
        execute({"cells": [{"cell_type": "markdown", "source": ["# title"]}, cell]}, "bad.ipynb")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the documentation site; a warning of its build is an error."""
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason="the extra `docs` is not installed: the site is not built")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for name in ("index.html", "guide/train.html", "api/hmm.html", *(f"notebooks/{n.stem}.html" for n in NOTEBOOKS)):
        html = (site / name).read_text()
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?://[^"]+)"', html)
        assert not [url for url in loaded if "canonical" not in url], name  # the pages load nothing from elsewhere


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without printing requests."""

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_pages_fit_a_phone_and_need_no_network(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make env installs it")
    problems: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
        page.on("console", lambda line: problems.append(f"{page.url}: {line.text}") if line.type == "error" else None)
        page.on("request", lambda r: r.url.startswith((home, "data:", "blob:")) or problems.append(r.url))
        for file in sorted(site.rglob("*.html")):
            page.goto(home + file.relative_to(site).as_posix())
            if page.evaluate("document.scrollingElement.scrollWidth > innerWidth"):
                problems.append(f"{page.url} is wider than a phone")
            if page.evaluate("[...document.images].some((image) => image.complete && !image.naturalWidth)"):
                problems.append(f"{page.url} lacks an image")
        browser.close()
    server.shutdown()
    server.server_close()
    assert not problems
