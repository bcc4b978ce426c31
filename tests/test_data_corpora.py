"""Text files, the embedded corpus, named corpora, and token files made from them."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import lzma
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hmmlm.data import public
from hmmlm.data.corpora import encode_documents, file_documents, load_text
from hmmlm.data.embedded import _paragraphs, embedded_corpus
from hmmlm.data.public import PublicCorpus, download, fetch, locate
from hmmlm.data.text import held_out, read_documents, read_lines
from hmmlm.data.tokenfile import TokenFile
from hmmlm.data.tokenizers import WordTokenizer
from hmmlm.errors import InputError

OPENERS: dict[str, Callable] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with OPENERS[path.suffix if path.suffix in OPENERS else ""](path, "wb") as file:
        file.write(content)
    return path


def encode(
    name: str, out: Path, folder: Path | None = None, **options: Any
) -> tuple[WordTokenizer, dict[str, TokenFile]]:
    """Return a word vocabulary of a corpus, trained with these options, and the token files of its splits."""
    splits = load_text(name, folder=folder)
    tokenizer = WordTokenizer.train((line for document in splits["train"] for line in document), **options)
    return tokenizer, {
        split: encode_documents(documents, tokenizer, out / split) for split, documents in splits.items()
    }


@pytest.mark.parametrize("suffix", OPENERS)
def test_text_is_read_by_line(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"my.txt{suffix}", "\ufeffun café \r\n\n  the\u2028end".encode())
    assert list(read_lines(path)) == ["un café", "", "the\u2028end"]
    assert list(read_documents(path)) == ["un café", "the\u2028end"]


@pytest.mark.parametrize("suffix", OPENERS)
def test_bad_text_is_named_with_the_place(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"my.txt{suffix}"
    for content, message in [
        (b"", r"my\.txt.* is empty"),
        (b"\n \n", r"my\.txt.* has only blank lines"),
        (b"fine\nab\0c\n", r"my\.txt.* is not text, or is in UTF-16: it has a NUL at byte 7"),
        (b"fine\nab\xffc\n", r"my\.txt.* is not UTF-8 text: 0xff at byte 7"),
    ]:
        with pytest.raises(InputError, match=message):
            list(read_documents(write(path, content)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file .*none\.txt"):
        list(read_documents(tmp_path / "none.txt"))
    with pytest.raises(InputError, match="is a folder"):
        list(read_documents(tmp_path))
    for suffix in (".gz", ".xz"):
        whole = write(tmp_path / f"a{suffix}", os.urandom(50_000).hex().encode()).read_bytes()
        for content in (whole[: len(whole) // 2], b"not compressed"):
            (tmp_path / f"b{suffix}").write_bytes(content)
            with pytest.raises(InputError, match=rf"b\{suffix} is damaged"):
                list(read_documents(tmp_path / f"b{suffix}"))


def test_prose_is_kept_and_code_is_not() -> None:
    text = """Summary of what :class:`Thing` does, with ``care``.

    Heading
    -------
    The *first* paragraph goes on
    over two lines of "plain" text.
      * Each bullet is a paragraph by itself.
      * A second one follows it here.

    >>> thing = Thing(1, 2)
    3
    x = compute(a, b) + [i for i in range(10)]

       target ::= identifier | "(" [target_list] ")"

    Too short.
    """
    assert list(_paragraphs(text)) == [
        "Summary of what Thing does, with care.",
        "The first paragraph goes on over two lines of plain text.",
        "Each bullet is a paragraph by itself.",
        "A second one follows it here.",
    ]


@pytest.mark.slow
def test_the_embedded_corpus_is_english_and_its_split_is_fixed() -> None:
    splits = embedded_corpus()
    assert list(splits) == ["train", "valid", "test"]
    everything = [paragraph.lower() for paragraphs in splits.values() for paragraph in paragraphs]
    assert len(set(everything)) == len(everything) > 3000
    for split, paragraphs in splits.items():
        assert all(held_out(paragraph.lower()) == split for paragraph in paragraphs)
        assert all("\n" not in paragraph and ">>>" not in paragraph for paragraph in paragraphs)
    for split in ("valid", "test"):
        assert 0.03 < len(splits[split]) / len(everything) < 0.07
    tokenizer = WordTokenizer.train(splits["train"], split="words", lowercase=True)
    assert {"the", "."} < set(tokenizer.words[2:6])
    assert sum(len(tokenizer.encode(paragraph)) for paragraph in splits["train"]) > 100_000


@pytest.mark.slow
def test_the_embedded_corpus_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import hashlib; from hmmlm.data.embedded import embedded_corpus as e; "
        "print(hashlib.sha256(repr(e()).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == hashlib.sha256(repr(embedded_corpus()).encode()).hexdigest()


WIKI_LINES = [
    "",
    "= First article =",
    "",
    "Some text with <unk> .",
    "= not a title : no blank line before =",
    "",
    "= = A section = =",
    "",
    "= not a title : no blank line after =",
    "More text .",
    "",
    "= Second article =",
    "",
    "Its text .",
    "",
]
WIKI = "".join(f" {line} \n" if line else " \n" for line in WIKI_LINES)


def named_corpus(folder: Path, corpus: PublicCorpus, content: str) -> PublicCorpus:
    """Files of a corpus, with content of our own, and the description that fits it."""
    for file in corpus.files.values():
        write(folder / corpus.name / file, content.encode())
    return replace(corpus, sha256=dict.fromkeys(corpus.files, hashlib.sha256(content.encode()).hexdigest()))


def test_wikitext_documents_are_articles_and_no_line_is_lost(tmp_path: Path) -> None:
    named_corpus(tmp_path, public.WIKITEXT_2, WIKI)
    train = load_text("wikitext-2", folder=tmp_path)["train"]
    articles = list(train)
    assert [article[0:2] for article in articles] == [["", "= First article ="], ["= Second article =", ""]]
    assert [line for article in articles for line in article] == WIKI_LINES
    assert list(train) == articles, "a split can be read again"


def test_ptb_has_one_document_per_line_and_every_line_ends_with_eos(tmp_path: Path) -> None:
    named_corpus(tmp_path, public.PTB, " a <unk> b \n b \n")
    assert [list(split) for split in load_text("ptb", folder=tmp_path).values()] == [[["a <unk> b"], ["b"]]] * 3
    tokenizer, files = encode("ptb", tmp_path / "out", tmp_path)
    train = files["train"]
    assert tokenizer.words == ["<unk>", "<eos>", "b", "a"]
    assert train.tokens.tolist() == [3, 0, 2, 1, 2, 1]
    assert train.documents.tolist() == [0, 4, 6]


def test_blank_lines_of_an_article_are_eos(tmp_path: Path) -> None:
    named_corpus(tmp_path, public.WIKITEXT_2, WIKI)
    tokenizer, files = encode("wikitext-2", tmp_path / "out", tmp_path)
    train = files["train"]
    assert len(train) == len(WIKI.split()) + WIKI.count("\n")
    assert train.tokens[0] == tokenizer.eos_id


def test_a_local_file_with_another_checksum_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = named_corpus(tmp_path, public.PTB, "a\n")
    monkeypatch.setenv("HMMLM_DATA", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert list(load_text("ptb")["test"]) == [["a"]]
        assert "ptb.train.txt does not have the checksum of the train split of ptb" in caplog.text
        caplog.clear()
        locate(usual, None, download=False)
        assert not caplog.records


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no ptb in .*ptb\.train\.txt.*give its folder with --data-folder"):
        load_text("ptb", folder=tmp_path)
    with pytest.raises(InputError, match=r"no corpus 'pbt'.* one of embedded, ptb, wikitext-2"):
        load_text("pbt")


@pytest.fixture
def remote(tmp_path: Path) -> PublicCorpus:
    """PTB, of our own content, at an address that answers."""
    corpus = named_corpus(tmp_path / "remote", public.PTB, "a b\n")
    return replace(corpus, addresses=(f"{(tmp_path / 'remote' / 'ptb').as_uri()}/{{file}}",))


def test_download(tmp_path: Path, remote: PublicCorpus) -> None:
    dead = (tmp_path / "nothing").as_uri() + "/{file}"
    locate(replace(remote, addresses=(dead, *remote.addresses)), tmp_path / "data", download=True)
    assert list(load_text("ptb", folder=tmp_path / "data", download=True)["valid"]) == [["a b"]]
    assert sorted(os.listdir(tmp_path / "data" / "ptb")) == sorted(remote.files.values())


def test_download_of_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        for file in public.WIKITEXT_2.files.values():
            archive.writestr(f"wikitext-2/{file}", WIKI)
    checksum = hashlib.sha256(WIKI.encode()).hexdigest()
    corpus = replace(
        public.WIKITEXT_2,
        addresses=((tmp_path / "w.zip").as_uri(),),
        sha256=dict.fromkeys(public.WIKITEXT_2.files, checksum),
    )
    paths = fetch(corpus, tmp_path / "data")
    assert [path.read_text() for path in paths.values()] == [WIKI] * 3
    (tmp_path / "w.zip").write_bytes(b"<html>moved</html>")
    with pytest.raises(InputError, match="is not the expected zip"):
        fetch(corpus, tmp_path / "other")
    assert not os.listdir(tmp_path / "other")


def test_a_download_with_another_checksum_leaves_nothing(tmp_path: Path, remote: PublicCorpus) -> None:
    wrong = replace(remote, sha256={**remote.sha256, "test": "0" * 64})
    with pytest.raises(InputError, match=r"cannot download ptb: ptb\.test\.txt from .* has an unexpected checksum"):
        fetch(wrong, tmp_path / "data")
    assert not os.listdir(tmp_path / "data")
    with pytest.raises(InputError, match=r"cannot download ptb: file:.* does not respond"):
        fetch(replace(remote, addresses=((tmp_path / "nothing").as_uri(),)), tmp_path / "data")
    assert not os.listdir(tmp_path / "data")


@pytest.mark.parametrize(
    ("length", "message"), [("abc", "has an unexpected checksum"), ("9" * 30, "checksum|respond"), (None, "checksum")]
)
def test_a_server_that_lies_about_the_size(
    tmp_path: Path, remote: PublicCorpus, length: str | None, message: str
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if length is not None:
                self.send_header("Content-Length", length)
            self.end_headers()
            with suppress(ConnectionError):
                for _ in range(mebibytes):
                    self.wfile.write(bytes(1 << 20))

        def log_message(self, *args: object) -> None:
            pass

    mebibytes = 1
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        corpus = replace(remote, addresses=(f"http://127.0.0.1:{server.server_port}/{{file}}",))
        with pytest.raises(InputError, match=f"cannot download ptb: .*({message}).*--data-folder"):
            fetch(corpus, tmp_path / "data")
        mebibytes = 65
        with pytest.raises(InputError, match="sends more than 64 MiB"):
            fetch(corpus, tmp_path / "data")
    finally:
        server.shutdown()
        server.server_close()
    assert not os.listdir(tmp_path / "data")


@pytest.mark.parametrize(("part", "message"), [("headers", "no answer in 1 s"), ("body", "is too slow")])
def test_servers_that_send_a_byte_at_a_time(part: str, message: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if part == "body":
                self.end_headers()
            with suppress(OSError):
                while not ended.wait(0.05):
                    self.wfile.write(b"a")
                    self.wfile.flush()

        def log_message(self, *args: object) -> None:
            pass

    ended = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(InputError, match=message):
            download(f"http://127.0.0.1:{server.server_port}", io.BytesIO(), timeout_s=0.3)
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def test_a_zip_with_a_huge_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("wikitext-2/wiki.train.tokens", bytes(public.MAX_DOWNLOAD + 1))
    with pytest.raises(InputError, match=r"is not the expected zip .a file of more than 64 MiB"):
        fetch(replace(public.WIKITEXT_2, addresses=((tmp_path / "w.zip").as_uri(),)), tmp_path / "data")


def test_a_text_file_is_split_by_line(tmp_path: Path) -> None:
    lines = [f"this is line number {i}" for i in range(2000)]
    path = write(tmp_path / "my.txt", "\n".join(lines + lines[:100]).encode())
    splits = {split: [line for [line] in documents] for split, documents in load_text(str(path)).items()}
    assert sorted(line for split in splits.values() for line in split) == sorted(lines + lines[:100])
    assert all(set(splits["train"]).isdisjoint(splits[split]) for split in ("valid", "test"))
    assert set(splits["valid"]).isdisjoint(splits["test"])
    for split in ("valid", "test"):
        assert 60 < len(splits[split]) < 145


@pytest.mark.parametrize(("count", "sizes"), [(3, [1, 1, 1]), (10, [8, 1, 1]), (200, [180, 10, 10])])
def test_a_text_of_equal_lines_is_split_by_position(tmp_path: Path, count: int, sizes: list[int]) -> None:
    path = write(tmp_path / "my.txt", b"the same line\n" * count)
    assert [len(list(documents)) for documents in load_text(str(path)).values()] == sizes


def test_a_text_of_two_lines_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"my\.txt has 2 lines, too few"):
        load_text(str(write(tmp_path / "my.txt", b"a\nb\n")))


def test_a_folder_of_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.txt.xz", b"a\nb\n")
    write(tmp_path / "valid.txt", b"c\n")
    with pytest.raises(InputError, match=r"no test\.txt"):
        load_text(str(tmp_path))
    write(tmp_path / "test.txt.gz", b"d\n")
    assert [list(documents) for documents in load_text(str(tmp_path)).values()] == [[["a"], ["b"]], [["c"]], [["d"]]]


def test_token_files_are_reused_only_for_the_same_text_and_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "my.txt", b"a b\n")
    first, second = WordTokenizer.train(["a b"]), WordTokenizer.train(["b b a"])

    def made(tokenizer: WordTokenizer) -> tuple[list[int], int]:
        file = encode_documents(file_documents(path), tokenizer, tmp_path / "out" / "my")
        return file.tokens.tolist(), os.stat(tmp_path / "out" / "my.bin").st_ino

    tokens, inode = made(first)
    assert tokens == [2, 3, 1]
    assert made(first) == ([2, 3, 1], inode)
    assert made(second)[0] == [3, 2, 1]
    assert made(first)[0] == [2, 3, 1]
    path.write_bytes(b"b a\n")
    os.utime(path, ns=(1, 1))
    assert made(first)[0] == [3, 2, 1]
    (tmp_path / "out" / "my.bin").write_bytes(b"")
    assert made(first)[0] == [3, 2, 1]


@pytest.mark.slow
def test_the_embedded_corpus_is_encoded_with_an_eos_after_every_paragraph(tmp_path: Path) -> None:
    tokenizer, files = encode("embedded", tmp_path, max_size=1000, split="words", lowercase=True)
    assert [file.documents.size - 1 for file in files.values()] == [len(split) for split in embedded_corpus().values()]
    for file in files.values():
        assert (file.tokens[file.documents[1:] - 1] == tokenizer.eos_id).all()
        assert (file.tokens == tokenizer.eos_id).sum() == file.documents.size - 1
