"""Compare the speed and memory of this tree with those of a commit: fails if a row has become slower or larger.

    python -m benchmarks.gate HEAD
    python -m benchmarks.gate faf155d --rows viterbi "512 states" --out gate.json

COMMIT is a commit, or a folder with its tree (of `git archive COMMIT`, on a machine without the repository). Each tree
runs its own `benchmarks` and `hmmlm` (`benchmarks.gate_worker` has the rows, and what it uses of a tree). A row has a
process in each tree; they take turns, first one, then the other in front, and one sleeps while the other is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hmmlm.errors import InputError

PRESENT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).resolve().with_name("gate_worker.py")
VISIT_SECONDS = 0.15
LEAST_SPEED, MOST_MEMORY = 0.95, 1.05
SECTIONS = {"cpu": ("steering", "peers", "queries", "text"), "cuda": ("training", "steering")}
COSTLY = "text"  # a section whose names take seconds


class Tree:
    """The process of a tree, which forks those of its rows."""

    def __init__(self, folder: Path, device: str) -> None:
        self.rows = dict[str, list[str]]()  # by section
        own = {f"{library}_NUM_THREADS": "2" for library in ("OMP", "MKL", "OPENBLAS")}
        own |= {"PYTHONPATH": os.pathsep.join([f"{folder / 'src'}", f"{folder}", *installed()]), "PYTHONHASHSEED": "0"}
        own["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask for a GPU does not begin to use it
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | own,
            process_group=0,  # Ctrl-C is for this process, which ends the others
        )

    def send(self, *request: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def receive(self) -> tuple[Any, str]:
        """Return the answer, and the error if there is none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer, error = json.loads(line) if line else (None, "the process of the tree ended")
        return answer, error

    def ask(self, *request: Any) -> tuple[Any, str]:
        self.send(*request)
        return self.receive()

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Result:
    """What was measured of a row, of the base tree and of the present one; or why it was not."""

    row: str
    seconds: list[list[float]] = field(default_factory=lambda: [[], []])  # per unit, of each alternation
    memory: list[int] = field(default_factory=lambda: [0, 0])  # peak in bytes
    errors: list[str] = field(default_factory=lambda: ["", ""])

    @property
    def ratio(self) -> float:
        return statistics.median(ratios(*self.seconds))

    @property
    def spread(self) -> float:
        return half_interquartile_range(ratios(*self.seconds))

    @property
    def memory_ratio(self) -> float:
        return self.memory[1] / self.memory[0]

    @property
    def faults(self) -> list[str]:
        """What the present tree does worse."""
        if any(self.errors):
            return ["fails"] if not self.errors[0] else []
        slow, large = self.ratio + self.spread < LEAST_SPEED, self.memory_ratio > MOST_MEMORY
        return ["too slow"] * slow + ["too large"] * large

    def __str__(self) -> str:
        if any(self.errors):
            return f"{self.row:58} " + "; ".join(
                f"{name}: {error}" for name, error in zip(("base", "present"), self.errors, strict=True) if error
            )
        base, present = (1e3 * statistics.median(seconds) for seconds in self.seconds)
        sizes = " → ".join(f"{size / 1e6:,.0f}" for size in self.memory)
        return (
            f"{self.row:58} {self.ratio:6.3f} ± {self.spread:.3f}  {base:10.4g} → {present:<10.4g} ms   "
            f"memory {self.memory_ratio:.3f}  {sizes} MB   {', '.join(self.faults)}"
        )

    def record(self, **about: Any) -> dict[str, Any]:
        """Return the row as an object of the JSON file."""
        if any(self.errors):
            return {"row": self.row, "errors": self.errors, "faults": self.faults, **about}
        base, present = map(statistics.median, self.seconds)
        return {
            "row": self.row,
            "ratio": self.ratio,
            "spread": self.spread,
            "memory_ratio": self.memory_ratio,
            "base_seconds": base,
            "present_seconds": present,
            "base_memory": self.memory[0],
            "present_memory": self.memory[1],
            "alternations": len(self.seconds[0]),
            "faults": self.faults,
            **about,
        }


def ratios(base: list[float], present: list[float]) -> list[float]:
    """Return the speed of the present tree relative to the base, of each alternation."""
    return [before / now for before, now in zip(base, present, strict=True)]


def half_interquartile_range(values: list[float]) -> float:
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / 2


# --- the trees ---


def installed() -> list[str]:
    """Return the folders of PYTHONPATH that are not of the present tree: what is installed there."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [path for path in given if Path(path).resolve() not in (PRESENT, PRESENT / "src")]


def git(*arguments: str | Path) -> str:
    """Return what git prints about the present tree; raise CalledProcessError if it fails."""
    command = ["git", "-C", str(PRESENT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def base_tree(commit: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and folder of a commit: a folder is itself, and a commit a worktree that is removed at the end."""
    folder = Path(commit).resolve()
    if folder.is_dir():
        if not ((folder / "src" / "hmmlm").is_dir() and (folder / "benchmarks").is_dir()):
            raise InputError(f"{commit} is a folder without src/hmmlm and benchmarks: give a commit, or its whole tree")
        yield folder.name, folder
        return
    try:
        name = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        raise InputError(f"{commit} is no commit of {PRESENT} and no folder: see `git log`") from None
    with tempfile.TemporaryDirectory(prefix="hmmlm-gate-") as parent:
        folder = Path(parent).resolve() / name[:12]
        try:
            git("worktree", "add", "--detach", folder, name)
        except subprocess.CalledProcessError as error:
            raise InputError(f"git worktree add failed: {error.stderr.strip().splitlines()[-1]}") from None
        try:
            yield name, folder
        finally:
            git("worktree", "remove", "--force", folder)


def present_name() -> str:
    """Return the commit of the present tree, with -dirty if files have changed."""
    try:
        return os.environ.get("HMMLM_COMMIT") or git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# --- measurements ---


def ask_rows(trees: Sequence[Tree], section: str) -> Result | None:
    """Ask the trees for the names of a section's rows; return what went wrong."""
    for tree in trees:
        tree.send("rows", section)
    answers = [tree.receive() for tree in trees]
    for tree, (names, _) in zip(trees, answers, strict=True):
        tree.rows[section] = names or []
    errors = [error for _, error in answers]
    return Result(f"the rows of {section}", errors=errors) if any(errors) else None


def measure(trees: Sequence[Tree], section: str, row: str, alternations: int) -> Result:
    """Measure a row in both trees."""
    result = Result(row, errors=["" if row in tree.rows[section] else "no such row" for tree in trees])
    if any(result.errors):
        return result
    for tree in trees:
        tree.send("row", section, row)
    result.errors = [tree.receive()[1] for tree in trees]
    for turn in range(alternations):
        for place in (0, 1) if turn % 2 == 0 else (1, 0):
            if not any(result.errors):
                seconds, result.errors[place] = trees[place].ask("visit", VISIT_SECONDS)
                result.seconds[place].append(seconds)
    alive = [place for place in (0, 1) if not result.errors[place]]
    for place in alive:
        trees[place].send("end")
    for place in alive:
        result.memory[place], result.errors[place] = trees[place].receive()
    return result


def run(trees: Sequence[Tree], sections: Sequence[str], wanted: Sequence[str], alternations: int) -> Iterator[Result]:
    """Measure the rows whose names contain one of `wanted`; all of them if it is empty."""
    broken = dict[str, Result | None]()

    def names(section: str) -> list[str]:
        if section not in broken:
            broken[section] = ask_rows(trees, section)
        return list(dict.fromkeys(name for tree in trees for name in tree.rows[section]))

    def unknown(sections: Sequence[str]) -> list[str]:
        known = [name for section in sections for name in names(section)]
        return [part for part in wanted if not any(part in name for name in known)]

    if unknown([section for section in sections if section != COSTLY]) and (parts := unknown(sections)):
        rows = "\n".join(f"  {name}" for section in sections for name in names(section))
        raise InputError(f"no row has {parts[0]!r} in its name: give a part of one of\n{rows}")
    for section in sections:
        chosen = [name for name in names(section) if not wanted or any(part in name for part in wanted)]
        if result := broken[section]:
            yield result
        for name in chosen:
            result = measure(trees, section, name, alternations)
            if result.faults and not any(result.errors):
                print(result, "again, for twice as long:", sep="\n", flush=True)
                result = measure(trees, section, name, 2 * alternations)
            yield result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the rows; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT")
    parser.add_argument("--rows", nargs="+", default=[], metavar="PART", help="of the names of rows; all without")
    parser.add_argument("--alternations", type=int, default=7, help="at least 5")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    given = parser.parse_args(arguments)
    try:
        if given.alternations < 5:
            raise InputError(f"--alternations {given.alternations}: use at least 5, so that the median means something")
        with ExitStack() as stack:
            return gate(given, stack)
    except InputError as error:
        print(f"benchmarks.gate: error: {error}", file=sys.stderr)
        return 2


def gate(given: argparse.Namespace, stack: ExitStack) -> int:
    """Run the gate; return the exit code."""
    base, folder = stack.enter_context(base_tree(given.commit))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    import torch

    from papers.records import machine

    began, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    about = {"base": base, "present": present_name(), "machine": machine(device == "cuda")}
    about["date"] = time.strftime("%Y-%m-%d")
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    trees = list[Tree]()
    for each in (folder, PRESENT):
        trees.append(Tree(each, device))
        stack.callback(trees[-1].close)
    for tree, each in zip(trees, (folder, PRESENT), strict=True):
        _, error = tree.receive()
        if error:
            raise InputError(f"{each}: {error} before it was ready: see above")
    results = list[Result]()
    for result in run(trees, SECTIONS[device], given.rows, given.alternations):
        results.append(result)
        print(result, flush=True)
        if given.out is not None:
            records = [each.record(**about) for each in results]
            given.out.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    faults = [f"{fault}: {result.row}" for result in results for fault in result.faults]
    print("\n".join([f"{len(results)} rows in {time.monotonic() - began:.0f} s", *faults]), flush=True)
    return 1 if faults or not results else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
