"""The builder of the corpus of Lee & Berg-Kirkpatrick 2025: shards and folders, how they are split, checksums."""

import gzip
import hashlib
import json
import lzma
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.teachers import write_sentencepiece

from hmmlm.data.text import held_out
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizers import find_tokenizer
from papers import corpus
from papers.runner import perform
from papers.study import StudyRow, StudyRun

WORDS = ("the", "cat", "sat", "on", "the", "mat", ".")
SETS = ("RedPajamaCommonCrawl", "RedPajamaBook")


def texts(count: int, begin: int = 0) -> list[str]:
    """Return different documents of two lines."""
    return [f"{WORDS[i % 7]} {i} cat\n\n  the mat {i} ." for i in range(begin, begin + count)]


def shard(documents: list[str]) -> bytes:
    """Return documents as a shard of SlimPajama has them."""
    entries = [
        {"text": text, "meta": {"redpajama_set_name": SETS[number % 2]}} for number, text in enumerate(documents)
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sentencepiece(tmp_path / "tokenizer.model")


def decoded(out: Path, split: str, model: Path) -> list[str]:
    """Return the documents of a split as text; a line ends with <eos>."""
    file, tokenizer = TokenFile.open(out / "data" / split), find_tokenizer(model)
    bounds = file.documents
    return [tokenizer.decode(file.tokens[a:b].tolist()).strip() for a, b in pairwise(bounds)]


def plain(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_the_folders_of_a_divided_source_are_its_splits(tmp_path: Path, model: Path) -> None:
    source, out = tmp_path / "slimpajama", tmp_path / "tokens"
    write(source / "train/chunk1/a.jsonl", shard(texts(20)))
    write(source / "train/chunk2/b.jsonl.gz", gzip.compress(shard(texts(20, 20))))
    write(source / "validation/chunk1/a.jsonl.xz", lzma.compress(shard(texts(4, 40))))
    write(source / "test/chunk1/a.jsonl", shard(texts(4, 44)) + b"\n")
    write(source / "README.md", b"not a text")
    facts = corpus.build(source, model, out, 10**9, 10**9)
    assert facts == json.loads((out / "corpus.json").read_text()) and facts["split"] == corpus.BY_FOLDER
    assert decoded(out, "train", model) == [plain(text) for text in texts(40)]
    assert decoded(out, "valid", model) + decoded(out, "test", model) == [plain(text) for text in texts(8, 40)]
    train = facts["splits"]["train"]
    assert train["documents"] == 40 and list(train["bytes_of_files"]) == [
        "train/chunk1/a.jsonl",
        "train/chunk2/b.jsonl.gz",
    ]
    assert set(train["tokens_of_parts"]) == set(SETS) and sum(train["tokens_of_parts"].values()) == train["tokens"]
    file = TokenFile.open(out / "data" / "train")
    assert len(file) == train["tokens"] and file.text_bytes == sum(len(plain(text)) + 1 for text in texts(40))
    for name, digest in facts["sha256"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert {"data/train.bin", "data/test.idx", "tokenizer/tokenizer.model"} <= set(facts["sha256"])


def test_other_sources_are_split_by_the_hash_of_a_document(tmp_path: Path, model: Path) -> None:
    source, whole, part = tmp_path / "source", tmp_path / "whole", tmp_path / "part"
    documents = [plain(text) for text in texts(300)]
    write(source / "a.txt", "\n\n".join(documents[:200]).encode())
    write(source / "b" / "c.txt.xz", lzma.compress("\n\n\n".join(documents[200:]).encode()))
    facts = corpus.build(source, model, whole, 10**9, 10**9)
    assert facts["split"] == corpus.BY_HASH
    for split in ("train", "valid", "test"):
        assert decoded(whole, split, model) == [text for text in documents if held_out(text) == split]
    fewer = corpus.build(source, model, part, 100, 30)
    for split, most in (("train", 100), ("valid", 30), ("test", 30)):
        begun, every = (TokenFile.open(folder / "data" / split) for folder in (part, whole))
        assert most <= len(begun) < most + 30  # the document that reaches the number is whole
        assert np.array_equal(begun.tokens, every.tokens[: len(begun)])
    assert list(fewer["splits"]["train"]["bytes_of_files"]) == ["a.txt"]
    assert facts["split_sha256"] != fewer["split_sha256"]
    again = corpus.build(source, model, tmp_path / "again", 100, 30)
    assert again == fewer


def test_shards_that_zstd_compressed_are_read(tmp_path: Path, model: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    one, two = (zstandard.compress(shard(texts(300, begin))) for begin in (0, 300))
    write(tmp_path / "source" / "a.jsonl.zst", one + two)  # two frames
    write(tmp_path / "same" / "a.jsonl", shard(texts(600)))
    packed, loose = (
        corpus.build(tmp_path / name, model, tmp_path / f"of-{name}", 10**9, 10**9) for name in ("source", "same")
    )
    assert packed["sha256"] == loose["sha256"] and packed["split_sha256"] == loose["split_sha256"]
    write(tmp_path / "damaged" / "a.jsonl.zst", one[:40] + b"damage" + one[46:])
    with pytest.raises(corpus.InputError, match=r"a\.jsonl\.zst.*damaged"):
        corpus.build(tmp_path / "damaged", model, tmp_path / "of-damaged", 10**9, 10**9)
    assert not (tmp_path / "of-damaged").exists()


def test_what_is_wrong_is_named(tmp_path: Path, model: Path, monkeypatch: Any, capsys: Any) -> None:
    def error(content: bytes, name: str = "a.jsonl") -> str:
        source = tmp_path / f"source-{hashlib.sha256(content + name.encode()).hexdigest()[:6]}"
        write(source / name, content)
        code = corpus.main([str(source), "--tokenizer", str(model), "--out", str(tmp_path / "out")])
        assert code == 2 and not (tmp_path / "out").exists()
        return str(capsys.readouterr().err)

    assert "a.jsonl, line 2: not JSON" in error(b'{"text": "a"}\n{"text": ')
    assert 'a.jsonl, line 1: no text: each line is an object such as {"text"' in error(b'{"content": "a"}')
    assert "has no document for valid" in error(b'{"text": "a"}')
    assert "no text in" in error(b"a", "a.md")
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as where it is not installed
    assert "needs the package zstandard: pip install zstandard, or decompress" in error(b"a", "a.jsonl.zst")
    write(tmp_path / "used" / "file", b"")
    assert corpus.main([str(tmp_path), "--tokenizer", str(model), "--out", str(tmp_path / "used")]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_a_record_names_the_checksums_of_its_text(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "source" / "a.jsonl", shard(texts(400)))
    facts = corpus.build(tmp_path / "source", model, tmp_path / "tokens", 10**9, 10**9)
    settings = {
        "model.num_states": 4,
        "data": str(tmp_path / "tokens"),
        "batches.batch_size": 4,
        "batches.length": 8,
        "train.max_tokens": 200,
        "train.device": "cpu",
        "train.precision": "32-true",
        "schedule.warmup": 0,
    }
    row = StudyRow(name="tiny", recipe="lee-base", settings=settings, seeds=(0,))
    record = perform(StudyRun(row, 0), tmp_path / "work")
    bins = {split: facts["sha256"][f"data/{split}.bin"] for split in ("train", "valid", "test")}
    assert record["settings"]["data_sha256"] == {**bins, "split": facts["split_sha256"]}
    (tmp_path / "tokens" / "corpus.json").unlink()  # as in a folder of `hmmlm data`
    assert corpus.text_checksums(tmp_path / "tokens") == bins
    assert corpus.text_checksums(tmp_path / "source") == {}  # not token files
