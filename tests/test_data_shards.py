"""Token files that several processes make in parts: the same as those of one, and kept when the work is interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import failure, write_corpus
from helpers.processes import start_server

from hmmlm.cli.main import main
from hmmlm.data import corpora, shards
from hmmlm.data.text import line_ranges, read_documents, read_range
from hmmlm.data.tokenfile import TokenFile
from hmmlm.errors import InputError
from hmmlm.runs.folders import lock_run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "PART_BYTES", 1000)
    start_server()


def same_folders(one: Path, other: Path) -> bool:
    tokenizers = [json.loads((folder / "tokenizer" / "tokenizer.json").read_text()) for folder in (one, other)]
    assert tokenizers[0] == tokenizers[1]
    for split in corpora.SPLITS:
        ours, theirs = (TokenFile.open(folder / "data" / split) for folder in (one, other))
        assert np.array_equal(ours.tokens, theirs.tokens) and np.array_equal(ours.documents, theirs.documents)
        assert (ours.text_bytes, ours.unit, ours.fingerprint) == (theirs.text_bytes, theirs.unit, theirs.fingerprint)
    return True


@pytest.mark.parametrize("options", [(), ("--tokenizer.kind", "bpe", "--tokenizer.vocab-size", "300")])
def test_parts_make_the_files_of_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text.txt", 400)
    for split in corpora.SPLITS:
        (tmp_path / "folder").mkdir(exist_ok=True)
        shutil.copy(text, tmp_path / "folder" / f"{split}.txt")
    for source in (text, tmp_path / "folder"):
        one, other = tmp_path / f"{source.stem}-1", tmp_path / f"{source.stem}-2"
        assert main(["data", str(source), "--out", str(one), "--quiet", *options]) == 0
        assert main(["data", str(source), "--out", str(other), "--workers", "2", "--quiet", *options]) == 0
        assert same_folders(one, other)
        assert sorted(path.name for path in other.iterdir()) == ["data", "tokenizer"]
        assert not any(path.name.startswith(".") for path in (other / "data").iterdir())


def test_a_text_that_cannot_be_divided(tmp_path: Path) -> None:
    text, out = write_corpus(tmp_path / "text.txt", 200), tmp_path / "out"
    options = ["--text.unit", "paragraph", "--quiet"]
    text.write_text(text.read_text().replace("\n", "\n\n"), encoding="utf-8")
    assert main(["data", str(text), "--out", str(tmp_path / "one"), *options]) == 0
    assert main(["data", str(text), "--out", str(out), "--workers", "2", *options]) == 0
    assert same_folders(tmp_path / "one", out)


def test_what_was_made_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_corpus(tmp_path / "text.txt", 400), tmp_path / "out"
    command = ["data", str(text), "--out", str(out), "--workers", "2", "--quiet"]

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "join_tokens", interrupt)
        assert main(command) == 130
    parts = out / "data" / ".train.parts"
    shutil.rmtree(out / "data" / ".valid.parts", ignore_errors=True)
    for file in parts.glob("000003.*"):
        file.unlink()
    before = {file.name: file.stat().st_mtime_ns for file in parts.iterdir()}
    assert len(before) > 9
    assert "unfinished token files of another text" in failure(capsys, *command, "--tokenizer.vocab-size", "9")
    assert "is not empty" in failure(capsys, "data", str(text), "--out", str(out))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        assert main(command) == 0
    after = {file.name: file.stat().st_mtime_ns for file in parts.iterdir()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"000003.bin", "000003.idx", "000003.json"}
    assert not (out / "unfinished.json").exists()
    assert main(["data", str(text), "--out", str(tmp_path / "one"), "--quiet"]) == 0
    assert same_folders(out, tmp_path / "one")


def test_words_that_were_counted_are_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = write_corpus(tmp_path / "text.txt", 400), tmp_path / "out"
    command = ["data", str(text), "--out", str(out), "--workers", "2", "--quiet"]
    done = 0

    def interrupt(counts: object) -> None:
        nonlocal done
        done += 1
        if done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "drop_rare", interrupt)
        assert main(command) == 130
    parts = out / ".tokenizer.parts"
    assert len(list(parts.iterdir())) >= 3
    first, second, third = sorted(parts.iterdir())[:3]
    counts = json.dumps(json.loads(first.read_bytes().partition(b"\n")[2]) | {"marker": 1_000}).encode()
    first.write_bytes(shards._checksum(counts) + b"\n" + counts)
    # Damaged ones are counted again.
    second.write_bytes(second.read_bytes()[:40])
    third.write_bytes(third.read_bytes().replace(b": 1", b": 7"))
    assert main(command) == 0
    assert main(["data", str(text), "--out", str(tmp_path / "one"), "--quiet"]) == 0
    ours, theirs = (
        json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["words"] for folder in (out, tmp_path / "one")
    )
    assert set(ours) - set(theirs) == {"marker"}
    assert sorted(path.name for path in out.iterdir()) == ["data", "tokenizer"]


def test_two_commands_cannot_write_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = write_corpus(tmp_path / "text.txt", 40), tmp_path / "out"
    with lock_run(out):
        for workers in ([], ["--workers", "2"]):
            error = failure(capsys, "data", str(text), "--out", str(out), *workers)
            assert f"{out} is in use by another process" in error
    assert not out.exists()


def test_a_corrected_text_is_not_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(b"a line\n" * 400 + b"\xff\xfe\n")
    command = ["data", str(text), "--out", str(out), "--workers", "1"]
    assert "text.txt" in failure(capsys, *command, "--text.unit", "document")
    assert not out.exists()
    write_corpus(text, 40)
    assert main([*command, "--quiet"]) == 0


def end_in_part() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"ended from outside, .* the same command again to continue"):
        list(shards._results([end_in_part] * 2, 2))


def wait_for_kill(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


def work_in_parts(folder: Path) -> None:
    list(shards._results([partial(wait_for_kill, folder / name) for name in "ab"], 2))


def test_workers_of_a_killed_command_end(tmp_path: Path) -> None:
    command = multiprocessing.get_context("spawn").Process(target=work_in_parts, args=(tmp_path,))
    command.start()
    while len(workers := [path.read_text() for path in tmp_path.iterdir()]) < 2 or not all(workers):
        time.sleep(0.05)
    command.kill()
    command.join()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranges_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\ufeffä\n\n" + "\n".join(f"line {'x' * (i % 13)}" for i in range(50)), encoding="utf-8")
    lines = list(read_documents(path))
    for size in (1, 2, 5, 40, 10_000):
        ranges = line_ranges(path, size)
        assert ranges[0][0] == 0 and ranges[-1][1] == path.stat().st_size
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert [line for begin, end in ranges for line in read_range(path, begin, end) if line] == lines
