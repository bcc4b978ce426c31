"""The gate: statistics, the worktree, and a tree that differs from its commit in speed, memory and rows."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import gate, gate_worker
from hmmlm.errors import InputError

TEXT = """
import time

import elsewhere
import hmmlm

held = []


def measurements():
    yield "model", "same", lambda: 1
    yield "model", "slower", lambda: time.sleep({pause})
    yield "model", "larger", lambda: held.append(bytearray(b"x") * {size}) if not held else None
    yield "model", "broken", lambda: {broken}
    yield "tree", hmmlm.NAME, lambda: 1
"""
PROBLEM = "OPERATIONS = ()\n"


def write_tree(folder: Path, name: str, pause: float, size: int, broken: str) -> None:
    """Write a tree whose only rows are those of its text, which takes what it takes of hmmlm from its own."""
    for package in ("src/hmmlm", "benchmarks/peers"):
        (folder / package).mkdir(parents=True, exist_ok=True)
    (folder / "src/hmmlm/__init__.py").write_text(f"NAME = {name!r}\n\n\nclass HMM: ...\n")
    (folder / "benchmarks/text.py").write_text(TEXT.format(pause=pause, size=size, broken=broken))
    (folder / "benchmarks/problem.py").write_text(PROBLEM)
    for module in ("__init__", "peers/__init__", "peers/ours"):
        (folder / f"benchmarks/{module}.py").touch()


def git(folder: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{what}": "nobody" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | who).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with a commit; it is the present tree."""
    folder = tmp_path / "repository"
    write_tree(folder, "base", pause=0.001, size=1, broken="1")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "A tree")
    monkeypatch.setattr(gate, "PRESENT", folder)
    return folder


@pytest.mark.slow
def test_a_tree_that_is_slower_larger_or_broken_fails_by_the_names_of_its_rows(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(repository, "present", pause=0.05, size=3 * 10**8, broken="1 / 0")
    monkeypatch.setattr(gate, "VISIT_SECONDS", 0.001)
    (repository / "installed").mkdir()
    (repository / "installed" / "elsewhere.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(repository / own) for own in ("", "src", "installed")))
    out = repository / "gate.json"
    assert gate.main(["HEAD", "--alternations", "5", "--rows", "model", "tree", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    faults = printed[printed.rindex(" rows in ") :].splitlines()[1:]
    assert {"too slow: model: slower", "too large: model: larger", "fails: model: broken"} <= set(faults)
    assert "fails: tree: base" in faults and "fails: tree: present" not in faults
    records = {record["row"]: record for record in json.loads(out.read_text())}
    assert records["model: broken"]["errors"] == ["", "ZeroDivisionError: division by zero"]
    assert records["tree: present"]["errors"] == ["no such row", ""]
    larger = records["model: larger"]
    assert (
        larger["memory_ratio"] > 1.5 and larger["present_memory"] > 3 * 10**8 and larger["alternations"] == 10
    )  # measured again
    assert records["model: slower"]["base_seconds"] >= 0.001 and records["model: slower"]["present_seconds"] >= 0.05
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert {(record["base"], record["present"]) for record in records.values()} == {(commit, f"{commit}-dirty")}
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_worktree_of_a_commit_is_removed(repository: Path, error: type[BaseException]) -> None:
    write_tree(repository, "present", pause=0, size=0, broken="1")
    with pytest.raises(error), gate.base_tree("HEAD") as (name, folder):
        assert name == git(repository, "rev-parse", "HEAD").strip()
        assert "base" in (folder / "src/hmmlm/__init__.py").read_text()
        (folder / "cache").touch()
        raise error
    assert not folder.exists() and not folder.parent.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_folder_with_a_tree_is_used_as_it_is(repository: Path) -> None:
    with gate.base_tree(str(repository)) as found:
        assert found == ("repository", repository)


def test_a_commit_that_does_not_exist_is_an_error_of_one_sentence(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for commit, message in {
        "nothing": "nothing is no commit",
        "--all": "--all is no commit",
        str(repository / "src"): "is a folder without src/hmmlm and benchmarks",
    }.items():
        assert gate.main([*("--",) * commit.startswith("--"), commit]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("benchmarks.gate: error: ") and message in printed.err and not printed.out
        assert printed.err.count("\n") == 1
    assert gate.main(["HEAD", "--alternations", "4"]) == 2


def test_a_row_that_does_not_exist_is_an_error_that_names_the_rows() -> None:
    class Known(gate.Tree):
        def __init__(self) -> None:
            self.rows = {}

        def send(self, *request: str) -> None:
            self.asked = request[1]

        def receive(self) -> tuple[list[str], str]:
            return [f"{self.asked} 64", f"{self.asked} 512"], ""

    with pytest.raises(InputError, match="no row has '63' in its name") as raised:
        next(gate.run([Known(), Known()], gate.SECTIONS["cpu"], ["512", "63"], 5))
    assert all(f"\n  {section} 64" in str(raised.value) for section in gate.SECTIONS["cpu"])


def result(base: list[float], present: list[float], memory: tuple[int, int] = (1000, 1000)) -> gate.Result:
    return gate.Result("row", [base, present], list(memory))


def test_a_row_is_too_slow_if_its_median_and_spread_are_below_the_limit() -> None:
    steady = [1.0] * 5
    assert result(steady, steady).faults == []
    assert result(steady, [1.04] * 5).faults == [] and result(steady, [1.06] * 5).faults == ["too slow"]
    assert result(steady, [0.5] * 5).ratio == 2
    noisy = result([0.8, 0.9, 0.93, 1.0, 1.1], steady)
    assert (noisy.ratio, noisy.spread) == (0.93, pytest.approx(0.05)) and noisy.faults == []
    assert result(steady, [100.0, 1.0, 1.0, 1.0, 0.01]).faults == []  # single alternations do not matter


def test_a_row_is_too_large_above_the_limit_of_memory() -> None:
    assert result([1.0] * 5, [1.0] * 5, (1000, 1050)).faults == []
    assert result([1.0] * 5, [2.0] * 5, (1000, 1051)).faults == ["too slow", "too large"]


def test_a_row_that_fails_counts_only_if_the_base_has_it() -> None:
    assert gate.Result("row", errors=["", "error"]).faults == ["fails"]
    assert gate.Result("row", errors=["error", ""]).faults == gate.Result("row", errors=["error"] * 2).faults == []
    assert "present: error" in str(gate.Result("row", errors=["", "error"]))


@pytest.mark.filterwarnings("ignore")  # of texts that end before their constraint is satisfied
def test_the_rows_of_this_tree_run() -> None:
    rows = {section: make("cpu") for section, make in gate_worker.SECTIONS.items() if section != gate.COSTLY}
    assert len(rows["training"]) == 8 and len(rows["steering"]) == 9 and len(rows["peers"]) == 16
    assert len(rows["queries"]) == len(gate_worker.QUERIES) * len(gate_worker.MODELS)  # no method has another name
    chosen = {
        "training": ["dense 512 AdamW", "evaluation 4096"],
        "steering": ["guide, set-up, 64 states, 3 phrase(s)", "steered, one call, 64 states, 3 phrase(s), 1 row(s)"],
        "peers": ["forward, 16 states"],
        "queries": [name for name in rows["queries"] if name.endswith("dense, 64 states")],
    }
    for section, names in chosen.items():
        for name in names:
            seconds, units = rows[section][name]()(1)
            assert seconds > 0 and units >= 1, name
