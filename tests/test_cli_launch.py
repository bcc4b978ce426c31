"""`--train.devices`: processes on this machine, started by the command itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import python_environment, run_python, write_corpus

from hmmlm.runs.history import HISTORY

pytestmark = pytest.mark.slow
START = "import sys; from hmmlm.cli.main import main; sys.exit(main(sys.argv[1:]))"
SMALL = ("--model.kind", "scalar", "--model.num-states", "4", "--train.epochs", "1", "--train.device", "cpu")


def test_two_processes_train_and_one_reports(tmp_path: Path) -> None:
    command = ("train", "--data", str(write_corpus(tmp_path / "text.txt")), "--out", str(tmp_path / "run"), *SMALL)
    ended = run_python(START, *command, "--train.devices", "2", timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("finished after") == ended.stdout.count("report: ") == 1
    assert (tmp_path / "run" / "best").exists() and (tmp_path / "run" / "report.html").exists()


def test_an_error_is_printed_once(tmp_path: Path) -> None:
    command = ("train", "--data", str(write_corpus(tmp_path / "text.txt")), "--out", str(tmp_path / "run"), *SMALL)
    ended = run_python(START, *command, "--train.devices", "2", "--batches.batch-size", "1", timeout=240)
    assert ended.returncode == 2
    assert ended.stderr.count("hmmlm: error: batches.batch_size is 1, fewer than the 2 processes") == 1
    assert "Traceback" not in ended.stderr and not (tmp_path / "run").exists()


def is_running(process: str) -> bool:
    """Return whether a process has not ended; it may not have been waited for."""
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the children of a process in /proc")
def test_the_processes_of_a_killed_command_save_and_end(tmp_path: Path) -> None:
    text, run = write_corpus(tmp_path / "text.txt"), tmp_path / "run"
    options = ("--train.devices", "2", "--train.epochs", "100000", "--train.log-every", "1")
    command = ("train", "--data", str(text), "--out", str(run), *SMALL, *options)
    with subprocess.Popen([sys.executable, "-c", START, *command], env=python_environment()) as launcher:
        while not (run / HISTORY).exists() or '"train"' not in (run / HISTORY).read_text():  # it trains
            assert launcher.poll() is None
            time.sleep(0.1)
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        launcher.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(ranks) >= 2 and (run / "last").exists()
