"""Opening a teacher: what is refused before transformers is imported, and the hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hmmlm.errors import InputError
from hmmlm.teachers.huggingface import _hub_arguments
from hmmlm.teachers.teacher import open_teacher


def test_folders_that_are_no_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, match: str, **arguments: str) -> None:
        with pytest.raises(InputError, match=match) as error:
            open_teacher(str(path), **arguments)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)

    refused(tmp_path / "none", r"no teacher at .*none")
    refused(tmp_path, "has no config.json: it should hold")
    refused(tmp_path, "no file a.gguf in the teacher folder", gguf_file="a.gguf")
    (tmp_path / "a.gguf").touch()
    refused(tmp_path, r"has no config.json: give the file, .*a\.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    refused(tmp_path, "has no weights")
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, "has no tokenizer")
    (tmp_path / "tokenizer.json").touch()
    refused(tmp_path, "unknown device 'tpu'", device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(tmp_path, "no CUDA device", device="cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(tmp_path, r"needs transformers, which the extra hmmlm\[teacher\] installs: pip install 'hmmlm\[teacher\]'")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "transformers" else None)
    refused(tmp_path / "a.gguf", r"needs gguf and accelerate, which the extra hmmlm\[teacher\] installs")


def test_runs_that_are_no_teachers(tmp_path: Path) -> None:
    run = '{"data": "", "tokenizer": {}, "train": {}, "model": {"kind": "lstm"}}'
    (tmp_path / "config.json").write_text(run)
    with pytest.raises(InputError, match=r"is a run of `hmmlm baseline`: give a language model of Hugging Face"):
        open_teacher(str(tmp_path), device="cpu")


def test_the_hub_is_queried_once_and_the_cache_used_if_it_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    queried: list[str] = []

    def unreachable(name: str, timeout: float) -> None:
        queried.append(name)
        assert timeout == 10
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    with pytest.raises(InputError, match=r"no teacher x/y: .* hub cannot be reached \(Name or service not known\)"):
        _hub_arguments("x/y", "config.json")
    assert queried == ["x/y"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    assert _hub_arguments("x/y", "config.json") == {"local_files_only": True}
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name, timeout: None)
    assert _hub_arguments("x/y", "config.json") == {}
