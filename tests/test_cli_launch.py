"""`--train.devices`: processes on this machine, started by the command itself."""

from __future__ import annotations

from pathlib import Path

from helpers.commands import run_python, write_corpus

START = "import sys; from hmmlm.cli.main import main; sys.exit(main(sys.argv[1:]))"
SMALL = ("--model.kind", "scalar", "--model.states", "4", "--train.epochs", "1", "--train.device", "cpu")


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
