"""Checkpoints on disk: replaced atomically, kept when saving fails, refused when truncated or foreign."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from hmmlm.errors import InputError
from hmmlm.runs import checkpoint
from hmmlm.runs.checkpoint import (
    PREVIOUS,
    load_tensors,
    read_checkpoint,
    save_folder,
    verify_checkpoint,
    write_checkpoint,
)


def save(run: Path, value: float, name: str | None = None) -> None:
    def write(folder: Path) -> None:
        write_checkpoint(folder, {"x": torch.tensor([value])}, {"value": value})

    save_folder(run, "last", name or f"step-{value}", write, verify_checkpoint, PREVIOUS)


def value_of(run: Path) -> float:
    tensors, state = read_checkpoint(run / "last")
    assert tensors["x"].item() == state["value"]
    return float(state["value"])


def test_a_new_checkpoint_replaces_the_old_one_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    save(tmp_path, 2.0)
    assert value_of(tmp_path) == 2.0
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1.0", "step-2.0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "last", "previous"]


def test_other_links_keep_their_folders_and_a_run_can_be_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_folder(run, "best", "best-1", lambda folder: (folder / "model").write_text("m") and None)
    save(run, 1.0)
    save(run, 2.0)
    run.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "best" / "model").read_text() == "m"
    assert value_of(tmp_path / "moved") == 2.0


def test_saving_the_same_step_again_never_touches_what_the_link_points_to(tmp_path: Path) -> None:
    save(tmp_path, 1.0, "same")
    save(tmp_path, 2.0, "same")
    assert value_of(tmp_path) == 2.0
    save(tmp_path, 3.0, "same")
    assert value_of(tmp_path) == 3.0
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_copy_in_which_links_became_folders_can_be_saved_to(tmp_path: Path) -> None:
    save(tmp_path / "run", 1.0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)
    assert not (tmp_path / "copy" / "last").is_symlink()
    assert value_of(tmp_path / "copy") == 1.0
    save(tmp_path / "copy", 2.0)
    assert value_of(tmp_path / "copy") == 2.0


@pytest.mark.parametrize("function", ["write_tensors", "_fsync", "os.rename", "os.replace", "Path.symlink_to"])
def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    save(tmp_path, 1.0)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, _, name = function.rpartition(".")
    holder = {"": checkpoint, "os": checkpoint.os, "Path": Path}[owner]
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, full)
        with pytest.raises(
            InputError, match=r"No space left on device; the previous checkpoint, .*last, is intact: .*--resume"
        ):
            save(tmp_path, 2.0)
    assert value_of(tmp_path) == 1.0
    save(tmp_path, 3.0)
    assert value_of(tmp_path) == 3.0
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1.0", "step-3.0"]


def test_what_was_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1.0)
    fsync = checkpoint._fsync

    def damage_and_fsync(path: Path) -> None:
        if path.name == "state.safetensors":
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        fsync(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_fsync", damage_and_fsync)
        with pytest.raises(
            InputError, match=r"state.safetensors is damaged: .*the previous checkpoint, .*last, is intact"
        ):
            save(tmp_path, 2.0)
    assert value_of(tmp_path) == 1.0
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-1.0"]


def test_the_checkpoint_before_the_last_is_kept(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        save(tmp_path, value)
    assert read_checkpoint(tmp_path / "previous")[1]["value"] == 2.0
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-2.0", "step-3.0"]


@pytest.mark.parametrize("file", ["state.json", "state.safetensors"])
def test_truncated_foreign_and_missing_files_are_named(tmp_path: Path, file: str) -> None:
    save(tmp_path, 1.0)
    path = tmp_path / "last" / file
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"PK\x03\x04 something else", b"[1, 2]"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=file.replace(".", r"\.")) as caught:
            read_checkpoint(tmp_path / "last")
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(InputError, match=file.replace(".", r"\.")):
        read_checkpoint(tmp_path / "last")


def test_json_of_another_program_or_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    path = tmp_path / "last" / "state.json"
    whole = path.read_text()
    path.write_text('{"a": 1}')
    with pytest.raises(InputError, match="not a checkpoint of a training run"):
        read_checkpoint(tmp_path / "last")
    for version in (1, 99, True, 2.0):
        path.write_text(whole.replace('"version": 2', f'"version": {json.dumps(version)}'))
        with pytest.raises(InputError, match=rf"version {version}, this hmmlm resumes version 2: .*start a new run"):
            read_checkpoint(tmp_path / "last")


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    given = {"parameters.a": torch.ones(2), "parameters.b": torch.ones(3)}
    into = {"a": torch.zeros(2), "b": torch.zeros(3)}
    load_tensors(tmp_path, given, "parameters.", into)
    assert into["b"].tolist() == [1.0] * 3
    with pytest.raises(InputError, match=r"parameters\.b is torch\.float32 \[3\], this run needs torch\.float32 \[4\]"):
        load_tensors(tmp_path, given, "parameters.", {"b": torch.zeros(4)})
    with pytest.raises(InputError, match=r"has no parameters\.c"):
        load_tensors(tmp_path, given, "parameters.", {"c": torch.zeros(4)})
