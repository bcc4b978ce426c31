"""Folders of runs and their settings: nothing is overwritten, nothing useless is left behind, mistakes come first."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import failure
from learning_runs import tiny_config, write_text

from hmmlm.cli.main import COMMANDS, main
from hmmlm.data import files
from hmmlm.data.files import write_bytes, write_new
from hmmlm.errors import InputError
from hmmlm.learning.config import RunConfig, config_from_dict
from hmmlm.learning.config_checks import USED, unused
from hmmlm.learning.folders import new_folder, new_run, refuse_used
from hmmlm.learning.progress import LineProgress, perplexity_text
from hmmlm.learning.trainer import train

SMALL = ["--model.states", "4", "--batches.batch-size", "4", "--batches.length", "8", "--train.no-tensorboard"]


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_disk_that_cannot_be_written_is_named_by_the_file_and_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    (tmp_path / "config.json").write_bytes(b"old")
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # the removal of what was not written fails as well
    with pytest.raises(InputError, match=r"/config\.json: Read-only file system; choose a folder that can be written"):
        write_bytes(tmp_path / "config.json", b"new")
    monkeypatch.undo()
    assert (tmp_path / "config.json").read_bytes() == b"old"
    with pytest.raises(InputError, match="a file where a folder should be"):
        write_bytes(tmp_path / "config.json" / "x", b"")


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_is_written_once(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(files.os, "link", unknown)
    assert [write_new(tmp_path / "x", content) for content in (b"first", b"second")] == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"first"


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path / "text"), tmp_path / "mine"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "llama"}')  # of another program
    (out / "tokenizer").mkdir()
    (out / "tokenizer" / "precious").write_text("")
    for command in (["train", "--data", str(text), *SMALL], ["teacher", "--data", str(text)], ["data", str(text)]):
        assert f"{out} is not empty (config.json, …)" in failure(capsys, *command, "--out", str(out))
        assert f"{text} is a file: give the name of a new folder" in failure(capsys, *command, "--out", str(text))
    with pytest.raises(InputError, match="is not empty"):
        train(tiny_config(text), out)
    assert sorted(path.name for path in out.rglob("*")) == ["config.json", "precious", "tokenizer"]


def test_what_a_killed_process_left_does_not_count(tmp_path: Path) -> None:
    (tmp_path / ".config.json.123.tmp").write_text("")
    refuse_used(tmp_path)


def test_a_folder_is_of_one_run_from_the_moment_it_has_settings(tmp_path: Path) -> None:
    settings = RunConfig().model_dump_json().encode()
    with new_run(tmp_path / "run", settings):
        with pytest.raises(InputError, match="already holds a run: continue it with --resume"), new_run(
            tmp_path / "run", settings
        ):
            pass
        assert (tmp_path / "run" / "config.json").read_bytes() == settings


def test_an_attempt_that_fails_before_learning_leaves_nothing(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    for out, made in ((tmp_path / "new", False), (tmp_path / "empty", True)):
        if made:
            out.mkdir()
        with pytest.raises(InputError, match="blocks"):  # more clusters than words: known once the text was read
            train(tiny_config(text, model={"states": 64, "structure": "brown", "blocks": 64}), out)
        assert out.exists() == made
        assert not made or not any(out.iterdir())
        assert train(tiny_config(text, train={"epochs": 1}), out).finished


def test_folders_of_the_same_second_are_apart_and_go_if_they_stay_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hmmlm.learning.folders.time.strftime", lambda _: "T")
    with new_folder(None, "runs", "x") as first, new_folder(None, "runs", "x") as second:
        assert (str(first), str(second)) == ("runs/x-T", "runs/x-T-2")
        (first / "config.json").write_text("{}")
    assert list(Path("runs").iterdir()) == [first]
    with new_folder(None, "teachers", "x"):
        pass
    assert not Path("teachers").exists()


# --- before any work ------------------------------------------------------------------------------------------------


def test_mistakes_are_known_before_torch_is_imported_and_leave_no_folder(tmp_path: Path) -> None:
    """In a process, because this one has torch already."""
    program = (
        "import sys; from hmmlm.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; "
        "sys.exit(code)"
    )
    text = write_text(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    for argv, message in {
        ("train", "--data", "none.txt"): "no corpus 'none.txt'",
        ("train", "--data", str(text), "--tokenizer.kind", "file", "--tokenizer.file", "none.json"): "none.json",
        ("train", "--data", str(text), "--model.structure", "brown", "--model.clusters", "none"): "no file none",
        ("train", "--resume", "none"): "no run to resume in none",
        ("teacher", "--data", "none.txt"): "no corpus 'none.txt'",
        ("data", "none.txt", "--out", "new"): "no corpus 'none.txt'",
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", program, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_device_that_is_not_there_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = write_text(tmp_path)
    for command in ("train", "teacher"):
        out = tmp_path / command
        error = failure(capsys, command, "--data", str(text), "--out", str(out), "--train.device", "cuda")
        assert "no CUDA device here" in error
        assert not out.exists()


def test_a_run_is_not_resumed_for_less_than_it_had(tmp_path: Path) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    config = tiny_config(text, train={"epochs": 2, "max_tokens": 700})  # ends within a batch, so beyond 700
    assert train(config, out).finished
    assert train(config, out, resume=True).finished
    saved = (out / "config.json").read_bytes()
    with pytest.raises(InputError, match=r"gone further already \(7\d\d tokens, .* than the 300 .* leave out train"):
        train(tiny_config(text, train={"epochs": 2, "max_tokens": 300}), out, resume=True)
    assert (out / "config.json").read_bytes() == saved


# --- settings that are not used -------------------------------------------------------------------------------------


def test_options_without_a_use_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model.blocks", "7", "--model.no-factored", "--optimizer.baum-welch.step=0.5", "--model.init", "unit"]
    out = tmp_path / "run"
    text = str(write_text(tmp_path))
    assert main(["train", "--data", text, "--out", str(out), *SMALL, *given, "--train.epochs", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "not used" in line]
    assert [line.split()[2] for line in lines] == ["model.blocks", "model.factored", "optimizer.baum_welch.step"]
    assert lines[0].endswith("it is for model.structure 'brown', and model.structure is 'none'")


def test_options_with_a_use_are_not() -> None:
    names = [name for names, _ in USED for name in names]
    neural = config_from_dict({
        "model": {"structure": "brown", "parameterization": "neural", "states": 256}, "schedule": {"kind": "plateau"},
    })  # fmt: skip
    lines = [line.split()[0] for line in unused(neural, names)]
    found = set(lines)
    assert len(lines) == len(found)  # each is said once
    assert found == {
        "model.states_per_word", "model.layers", "optimizer.baum_welch", "schedule.final_fraction", "initialization",
        "initialization.alike",
    }  # fmt: skip
    for name in names:  # all of them are settings
        config: object = neural
        for part in name.split("."):
            config = getattr(config, part)


# --- what is shown --------------------------------------------------------------------------------------------------


def test_perplexities_as_text() -> None:
    values = (12.34, 1234.56, 9_999_999.0, 1e7, 1.26e54, float("inf"), float("nan"))
    shown = ["12.3", "1,234.6", "9,999,999.0", "1.0e7", "1.3e54", "inf", "nan"]
    assert [perplexity_text(value) for value in values] == shown
    assert perplexity_text(2.345, 2) == "2.35" and perplexity_text(1234.5, 0) == "1,234"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_nothing_that_is_for_programs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert not re.search(r"noqa|fmt:|type: ignore|pydantic", capsys.readouterr().out)


def test_a_phase_in_which_nothing_is_counted_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress()
    with progress.phase("tokenizer", unit="lines"):
        pass
    with progress.phase("encoding", unit="documents") as phase:
        phase.advance(3)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["encoding: 3 documents"]
