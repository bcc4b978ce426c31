"""Folders of runs: nothing is overwritten, failures leave nothing behind, and mistakes are found before any work."""

import errno
import os
import shlex
from pathlib import Path

import pytest
from helpers.commands import failure
from helpers.runs import tiny_config, write_text

from hmmlm.config.run import RunConfig
from hmmlm.data import files
from hmmlm.data.files import write_bytes, write_new
from hmmlm.errors import InputError
from hmmlm.runs.folders import new_folder, new_run, refuse_used
from hmmlm.training.train import train

SMALL = shlex.split("--model.num-states 4 --batches.batch-size 4 --batches.length 8 --no-train.tensorboard")


# --- files ---


def test_a_read_only_disk_is_an_error_with_the_file_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    (tmp_path / "config.json").write_bytes(b"old")
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # removing the temporary file fails as well
    with pytest.raises(InputError, match=r"/config\.json: Read-only file system; choose a writable folder"):
        write_bytes(tmp_path / "config.json", b"new")
    monkeypatch.undo()
    assert (tmp_path / "config.json").read_bytes() == b"old"
    with pytest.raises(InputError, match="a file is in the place of a folder"):
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


@pytest.mark.parametrize("links", [True, False])
def test_several_files_are_replaced_all_or_none(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(files.os, "link", unknown)
    new, old, folder, last = (tmp_path / name for name in ("new", "old", "folder", "last"))
    old.write_bytes(b"before")
    for targets in ((new, old, folder, last), (new, old, folder)):  # what is in the way of a file: a folder
        folder.mkdir()
        with pytest.raises(InputError, match=r"cannot write .*folder: "), files.replacing(*targets) as temporary:
            for path in temporary:
                path.write_bytes(b"after")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "old"]
        assert old.read_bytes() == b"before"
        folder.rmdir()
    with files.replacing(new, old) as temporary:
        for path in temporary:
            path.write_bytes(b"after")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"new": b"after", "old": b"after"}


# --- folders ---


def test_a_folder_that_is_not_empty_is_refused_and_not_changed(
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


def test_leftovers_of_a_killed_process_are_ignored(tmp_path: Path) -> None:
    (tmp_path / ".config.json.123.tmp").write_text("")
    refuse_used(tmp_path)


def test_a_folder_belongs_to_one_run_once_it_has_settings(tmp_path: Path) -> None:
    settings = RunConfig().model_dump_json().encode()
    with new_run(tmp_path / "run", settings):
        with (
            pytest.raises(InputError, match="already contains a run: continue it with --resume"),
            new_run(tmp_path / "run", settings),
        ):
            pass
        assert (tmp_path / "run" / "config.json").read_bytes() == settings


def test_a_failure_before_training_leaves_nothing(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    for out, made in ((tmp_path / "new", False), (tmp_path / "empty", True)):
        if made:
            out.mkdir()
        with pytest.raises(InputError, match="blocks"):  # more clusters than words: known when the text has been read
            train(tiny_config(text, model={"kind": "neural", "num_states": 65536, "blocks": 65536, "hidden": 2}), out)
        assert out.exists() == made
        assert not made or not any(out.iterdir())
        assert train(tiny_config(text, train={"epochs": 1}), out).finished


def test_folders_of_the_same_second_are_different_and_removed_if_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hmmlm.runs.folders.time.strftime", lambda _: "T")
    with new_folder(None, "runs", "x") as first, new_folder(None, "runs", "x") as second:
        assert (str(first), str(second)) == ("runs/x-T", "runs/x-T-2")
        (first / "config.json").write_text("{}")
    assert list(Path("runs").iterdir()) == [first]
    with new_folder(None, "teachers", "x"):
        pass
    assert not Path("teachers").exists()


# --- before any work ---


def test_mistakes_are_found_before_any_work_and_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    for argv, message in {
        ("train", "--data", "none.txt"): "no corpus 'none.txt'",
        ("train", "--data", str(text), "--tokenizer.kind", "file", "--tokenizer.file", "none.json"): "none.json",
        ("train", "--data", str(text), "--model.blocks", "4", "--model.clusters", "none"): "no file none",
        ("train", "--resume", "none"): "no run to resume in none",
        ("teacher", "--data", "none.txt"): "no corpus 'none.txt'",
        ("baseline", "--data", "none.txt"): "no corpus 'none.txt'",
        ("data", "none.txt", "--out", "new"): "no corpus 'none.txt'",
    }.items():
        assert message in failure(capsys, *argv)
        assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_missing_device_is_an_error_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = write_text(tmp_path)
    for command in ("train", "teacher", "baseline"):
        out = tmp_path / command
        error = failure(capsys, command, "--data", str(text), "--out", str(out), "--train.device", "cuda")
        assert "no CUDA device here" in error
        assert not out.exists()


def test_a_run_cannot_be_resumed_to_end_earlier(tmp_path: Path) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    config = tiny_config(text, train={"epochs": 2, "max_tokens": 700})  # ends within a batch, so beyond 700
    assert train(config, out).finished
    assert train(config, out, resume=True).finished
    saved = (out / "config.json").read_bytes()
    message = r"already has 7\d\d tokens \(epoch 1\), more than the 300 of these settings: leave out train\.epochs"
    with pytest.raises(InputError, match=message):
        train(tiny_config(text, train={"epochs": 2, "max_tokens": 300}), out, resume=True)
    assert (out / "config.json").read_bytes() == saved
