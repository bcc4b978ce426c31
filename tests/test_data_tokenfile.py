"""Token files: round trips, failures while writing, and files that are damaged or foreign."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmmlm.data.tokenfile import TokenFile, write_tokens
from hmmlm.errors import InputError


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=6)), st.sampled_from([100, 65_535, 65_536]))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int) -> None:
    path = tmp_path_factory.mktemp("tokens") / "my.train"
    documents = [*documents, [vocab_size - 1]]
    write_tokens(path, iter(documents), vocab_size, "abc", source="s")
    file = TokenFile.open(path, "abc")
    assert [file.tokens[a:b].tolist() for a, b in itertools.pairwise(file.documents)] == documents
    assert len(file) == sum(map(len, documents))
    assert (file.vocab_size, file.fingerprint, file.source) == (vocab_size, "abc", "s")
    width = 2 if vocab_size <= 65_535 else 4
    assert (path.parent / "my.train.bin").read_bytes() == b"".join(
        token.to_bytes(width, "little") for document in documents for token in document
    )


@pytest.mark.parametrize("bad", [100, -1])
def test_a_token_outside_the_vocabulary_is_named_and_the_old_file_survives(tmp_path: Path, bad: int) -> None:
    path = tmp_path / "train"
    write_tokens(path, [[1, 2, 3]], 100, "abc")
    message = rf"token {bad} at position 6 \(document 2, position 1 in it\) is outside the vocabulary of 100"
    with pytest.raises(InputError, match=message):
        write_tokens(path, [[1, 2], [3, 4, 5], [6, bad]], 100, "abc")
    assert TokenFile.open(path).tokens.tolist() == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["train.bin", "train.idx", "train.json"]


def test_a_failure_while_reading_the_text_keeps_the_old_file(tmp_path: Path) -> None:
    def broken() -> Iterator[list[int]]:
        yield [7] * 1000
        raise RuntimeError("the text ended badly")

    write_tokens(tmp_path / "train", [[1, 2, 3]], 100, "abc")
    with pytest.raises(RuntimeError, match="ended badly"):
        write_tokens(tmp_path / "train", broken(), 100, "abc")
    assert TokenFile.open(tmp_path / "train").tokens.tolist() == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["train.bin", "train.idx", "train.json"]


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path / "train", [[1, 2, 3]], 100, "abc")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"No space left on device; free some disk space \(existing files are kept\)"):
        write_tokens(tmp_path / "train", [[4]], 100, "abc")
    assert TokenFile.open(tmp_path / "train").tokens.tolist() == [1, 2, 3]


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    for documents in ([], [[], []]):
        with pytest.raises(InputError, match=r"nothing to write to .*train\.bin: the text has no tokens"):
            write_tokens(tmp_path / "train", documents, 100, "abc")
    assert not os.listdir(tmp_path)


def test_float_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="document 0 is not a list of integer tokens: float64"):
        write_tokens(tmp_path / "train", [np.array([1.0])], 100, "abc")


def test_a_file_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train", [[1]], 100, "abc")
    with pytest.raises(InputError, match=r"made with another tokenizer \(abc, not xyz\)"):
        TokenFile.open(tmp_path / "train", "xyz")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train"
    with pytest.raises(InputError, match=r"no token file at .*train\.bin"):
        TokenFile.open(path)
    write_tokens(path, [[1, 2], [3]], 100, "abc")
    saved = {part: (tmp_path / part).read_bytes() for part in os.listdir(tmp_path)}
    header = json.loads(saved["train.json"])

    def with_header(**changes: object) -> bytes:
        return json.dumps({**header, **changes}).encode()

    cases = [
        ("train.bin", saved["train.bin"][:-1], r"train\.bin is truncated or replaced: 5 bytes, not 6"),
        ("train.idx", b"", r"train\.idx is truncated or replaced: 0 bytes, not 24"),
        ("train.bin", b"\0" * 6, r"train\.bin is damaged, or does not belong to .*train\.json"),
        ("train.json", saved["train.json"][:20], "train.json is truncated or not JSON"),
        ("train.json", b"{}", "not the header of a token file"),
        ("train.json", with_header(version=9), "has version 9"),
        ("train.json", with_header(version=True), "has version True"),
        ("train.json", with_header(version=float(header["version"])), r"has version \d\.0"),
        ("train.json", with_header(dtype="int3"), r"dtype is 'int3', not that of 100 tokens, uint16"),
    ]
    for part, content, message in cases:
        (tmp_path / part).write_bytes(content)
        with pytest.raises(InputError, match=message):
            TokenFile.open(path)
        (tmp_path / part).write_bytes(saved[part])
    (tmp_path / "train.bin").unlink()
    with pytest.raises(InputError, match=r"train\.bin is truncated"):
        TokenFile.open(path)


def test_from_arrays_checks_tokens_and_documents() -> None:
    corpus = TokenFile.from_arrays([3, 1, 2], None, 4)
    assert corpus.documents.tolist() == [0, 3]
    with pytest.raises(InputError, match="token 4 at position 1"):
        TokenFile.from_arrays([3, 4], None, 4)
    with pytest.raises(InputError, match="no tokens"):
        TokenFile.from_arrays([], None, 4)
    for documents in ([0, 2], [1, 3], [0, 2, 1, 3]):
        with pytest.raises(InputError, match="offsets must increase from 0 to 3, the number of tokens"):
            TokenFile.from_arrays([3, 1, 2], documents, 4)


# --- files are not trusted ---


def write_large(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Write a token file whose middle is far from both ends; return its path, and the content of its parts."""
    tokens = np.random.default_rng(0).integers(0, 90, 300_000)
    write_tokens(folder / "train", np.split(tokens, range(0, len(tokens), 7)), 100, "abc")
    return folder / "train", {part: (folder / part).read_bytes() for part in os.listdir(folder)}


@pytest.mark.parametrize("part", ["train.bin", "train.idx"])
def test_damage_in_the_middle_is_noticed(tmp_path: Path, part: str) -> None:
    path, saved = write_large(tmp_path)
    content = bytearray(saved[part])
    content[len(content) // 2] ^= 1
    (tmp_path / part).write_bytes(content)
    with pytest.raises(InputError, match=rf"{part} is damaged, or does not belong to .*train\.json"):
        TokenFile.open(path)


def test_files_of_earlier_versions_load_and_are_checked_by_their_ends(tmp_path: Path) -> None:
    path, saved = write_large(tmp_path)
    edge = 1 << 16
    header = json.loads(saved["train.json"])
    for part, name in (("train.bin", "digest"), ("train.idx", "index_digest")):
        ends = saved[part][:edge] + saved[part][max(0, len(saved[part]) - edge) :]
        header[name] = hashlib.sha256(ends).hexdigest()[:16]
    (tmp_path / "train.json").write_text(json.dumps(header))
    assert TokenFile.open(path).tokens.tobytes() == saved["train.bin"]
    (tmp_path / "train.bin").write_bytes(saved["train.bin"][:-1] + b"\1")
    with pytest.raises(InputError, match=r"train\.bin is damaged"):
        TokenFile.open(path)
    (tmp_path / "train.bin").write_bytes(saved["train.bin"])
    offsets = np.frombuffer(saved["train.idx"], dtype="<i8").copy()
    offsets[len(offsets) // 2] = -5  # where the digest does not look
    (tmp_path / "train.idx").write_bytes(offsets.tobytes())
    with pytest.raises(InputError, match=r"train\.idx: document offsets must increase from 0 to 300000"):
        TokenFile.open(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 50, r"train\.bin has token 89, but .*train\.json a vocabulary of 50"),
        ("vocab_size", "100", r"train\.json: vocab_size is of type str, not int"),
        ("vocab_size", 0, "a vocabulary of 0 does not fit"),
        ("vocab_size", -1, "vocab_size is -1, not a number of at least 0"),
        ("vocab_size", True, "vocab_size is of type bool, not int"),
        ("vocab_size", 10**30, "does not fit a token file"),
        ("vocab_size", 70_000, "dtype is 'uint16', not that of 70000 tokens, uint32"),
        ("dtype", "uint32", "dtype is 'uint32', not that of 100 tokens, uint16"),
        ("dtype", ["uint16"], "dtype is of type list, not str"),
        ("count", 5, "count is 5 and bytes is 600000, which disagree"),
        ("documents", 5, "documents is 5 and index_bytes is .*, which disagree"),
        ("bytes", None, "bytes is of type NoneType, not int"),
        ("digest", 3, "digest is of type int, not str"),
        ("source", [], "source is of type list, not str"),
    ],
)
def test_wrong_headers_are_refused_by_their_entry(tmp_path: Path, field: str, value: object, message: str) -> None:
    path, saved = write_large(tmp_path)
    header = json.loads(saved["train.json"])
    (tmp_path / "train.json").write_text(json.dumps({**header, field: value}))
    with pytest.raises(InputError, match=message):
        TokenFile.open(path)
    del header[field]
    (tmp_path / "train.json").write_text(json.dumps(header))
    with pytest.raises(InputError, match=rf"train\.json has no {field}"):
        TokenFile.open(path)
    (tmp_path / "train.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"train\.json is nested too deeply"):
        TokenFile.open(path)


def test_if_a_part_cannot_be_replaced_the_old_file_stays(tmp_path: Path) -> None:
    path, saved = write_large(tmp_path)
    (tmp_path / "train.json").unlink()
    (tmp_path / "train.json").mkdir()  # the last of three files to be replaced cannot be
    with pytest.raises(InputError, match=r"cannot write .*train\.json: Is a directory"):
        write_tokens(path, [[1, 2, 3]], 100, "abc")
    assert (tmp_path / "train.bin").read_bytes() == saved["train.bin"]
    assert (tmp_path / "train.idx").read_bytes() == saved["train.idx"]
    assert sorted(os.listdir(tmp_path)) == ["train.bin", "train.idx", "train.json"]


def test_read_follows_jumps_and_repetitions(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 70_000, 1_000)
    for vocab_size in (70_000, 50_000):  # of uint32 and of uint16
        ids = tokens % vocab_size
        file = write_tokens(tmp_path / str(vocab_size), [ids], vocab_size, "x")
        places = np.array([[0, 1, 2, 3], [998, 999, 999, 999], [500, 501, 20, 21], [7, 6, 5, 4]])
        assert np.array_equal(file.read(places), ids[places])
        assert file.read(places[:0]).shape == (0, 4)


def test_read_goes_on_after_the_file_was_replaced(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "a", [np.arange(100)], 100, "x")
    write_tokens(tmp_path / "a", [np.zeros(100, int)], 100, "x")
    assert file.read(np.array([[10, 11]])).tolist() == [[10, 11]]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_read_maps_no_pages(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "a", [np.zeros(2**25, np.uint16)], 10, "x")

    def mapped() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssFile:")[2].split()[0])  # kB

    begins, before = np.random.default_rng(0).integers(0, 2**25 - 32, 500), mapped()
    file.read(begins[:, None] + np.arange(32))
    assert mapped() - before < 4096
