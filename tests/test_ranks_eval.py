"""`hmmlm eval` in several processes: the figures of one, printed once."""

from __future__ import annotations

import json
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import run_python
from helpers.ranks import run_ranks
from helpers.runs import tiny_config, write_text
from test_cli_launch import START

from hmmlm.cli.main import main
from hmmlm.distributed.ranks import world
from hmmlm.training.train import train

pytestmark = pytest.mark.slow
BATCHES: dict[str, dict[str, Any]] = {
    "lines": {"reset_at_eos": True, "eval_reset_at_eos": True},
    "stream": {},
    "chunks": {"kind": "chunks"},
}


def evaluate(folder: Path, argv: list[str], code: int) -> None:
    """Run `hmmlm eval` with its output in two files per rank."""
    name = f"{world().count}-{world().rank}"
    files = (folder / f"{name}.{kind}" for kind in ("out", "err"))
    with ExitStack() as stack:
        out, errors = (stack.enter_context(file.open("w")) for file in files)
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(errors))
        assert main(["eval", *argv]) == code


def printed(folder: Path, count: int, kind: str = "out") -> list[str]:
    return [(folder / f"{count}-{rank}.{kind}").read_text() for rank in range(count)]


@pytest.mark.parametrize("kind", BATCHES)
def test_the_same_figures_whatever_the_number_of_processes(kind: str, tmp_path: Path) -> None:
    text = write_text(tmp_path, 80)
    assert train(tiny_config(text, batches=BATCHES[kind]), tmp_path / "run").finished
    for number, data in enumerate(([], ["--data", str(text)])):
        folder = tmp_path / str(number)
        folder.mkdir()
        argv = [str(tmp_path / "run"), *data, "--json", "--device", "cpu"]
        for count in (1, 2, 3):
            run_ranks(count, evaluate, folder, argv, 0)
        (alone,) = (json.loads(output)["results"] for output in printed(folder, 1))
        for count in (2, 3):
            first, *others = printed(folder, count)
            assert not any(others)
            for name, figures in json.loads(first)["results"].items():
                assert figures == pytest.approx(alone[name], rel=1e-9)


def test_an_error_is_printed_by_one_process(tmp_path: Path) -> None:
    run_ranks(2, evaluate, tmp_path, [str(tmp_path / "nothing"), "--device", "cpu"], 2)
    first, second = printed(tmp_path, 2, "err")
    assert "nothing" in first and not second


def test_devices_read_a_pipe_once(tmp_path: Path) -> None:
    text = write_text(tmp_path, 40)
    assert train(tiny_config(text), tmp_path / "run").finished
    given = ("eval", str(tmp_path / "run"), "--data", "/dev/stdin", "--json", "--device", "cpu")
    outputs = [run_python(START, *given, "--devices", n, timeout=240, input=text.read_text()) for n in ("1", "2")]
    assert [ended.returncode for ended in outputs] == [0, 0], outputs[1].stderr
    alone, both = (json.loads(ended.stdout)["results"]["stdin"] for ended in outputs)
    assert both == pytest.approx(alone, rel=1e-9)
