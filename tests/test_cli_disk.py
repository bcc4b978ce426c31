"""A full disk: every command that writes ends in one sentence, and what was there stays as it was."""

from __future__ import annotations

import re
import resource
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.causal import save_causal
from helpers.commands import write_corpus

import hmmlm
from hmmlm.cli.main import main
from hmmlm.errors import InputError

TINY = "--batches.batch-size 4 --batches.length 8 --train.epochs 1 --no-train.tensorboard --quiet"
COMMANDS = {
    "train": f"train --data animals.txt --model.num-states 4 --out new {TINY}",
    "resume": "train --resume run --train.epochs 2 --quiet",
    "baseline": f"baseline --data run --model.hidden 8 --out new {TINY}",
    "teacher": f"teacher --data run --model.hidden 8 --model.layers 1 --model.heads 1 --out new {TINY}",
    "data": "data animals.txt --out new --quiet",
    "data in parts": "data animals.txt --out new --quiet --workers 1",
    "clusters": "data animals.txt --out new --quiet --clusters 3",
    "eval": "eval run --data animals.txt",
    "ngram": "ngram run --order 2 --out there.arpa",
    "mix": "mix run --ngram 2 --out new",
    "join": "join run run --out new",
    "explore": "explore run --export there.html",
    "distill": "distill causal --tokens 3000 --length 20 --num-states 4 --epochs 1 --device cpu --out new --quiet",
}
LIMITS = (0, 300, 3_000, 12_000)
"""Bytes of a file at most: none, and as many as let a command get further each time."""

FULL = r"(File too large|requested and \d+ written)"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text, a run, files to overwrite, and a causal language model."""
    folder = tmp_path_factory.mktemp("full")
    write_corpus(folder / "animals.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(shlex.split(COMMANDS["train"].replace("new", "run"))) == 0
    for name in ("there.arpa", "there.html"):
        (folder / name).write_text("what was there\n")
    if find_spec("transformers"):
        save_causal(folder / "causal")
    return folder


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files of a folder, without locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_ends_every_command_in_one_sentence(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "distill" and find_spec("transformers") is None:
        pytest.skip("the extra `teacher` is not installed")
    monkeypatch.chdir(home)
    before, failed = contents(home), 0
    for limit in LIMITS[:3] if name == "resume" else LIMITS:  # with more room, it trains on before its report fails
        out = str(tmp_path / f"new{limit}")
        capsys.readouterr()
        with files_of_at_most(limit):
            code = main([out if argument == "new" else argument for argument in shlex.split(COMMANDS[name])])
        error = capsys.readouterr().err
        if code == 0:  # all fits
            break
        failed += 1
        assert code == 2 and re.search(rf"^hmmlm: error: [^\n]*{FULL}[^\n]*\n\Z", error, re.MULTILINE), error
        found = contents(home)
        assert found.keys() == before.keys()  # no parts of files
        changed = {path.name for path in before if found[path] != before[path]}
        assert changed <= ({"config.json", "history.jsonl"} if name == "resume" else set())  # whose checkpoint stays
        assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob(".saving*"))
    assert failed


@pytest.mark.slow
def test_a_full_disk_leaves_models_that_are_saved_again(home: Path, tmp_path: Path) -> None:
    lm = hmmlm.load(home / "run")
    for name, save in (
        ("model", lm.save),
        ("hub", lm.save_pretrained),
        ("ctrlg", lambda path: hmmlm.save_ctrlg(lm.hmm, path, lm.tokenizer.eos_id)),
    ):
        save(tmp_path / name)
        before = contents(tmp_path / name)
        for limit in (0, 300):
            with files_of_at_most(limit), pytest.raises(InputError, match="File too large"):
                save(tmp_path / name)
            assert contents(tmp_path / name) == before
