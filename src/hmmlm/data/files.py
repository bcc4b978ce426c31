"""Atomic writes of files, locks, and reads whose errors name the file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hmmlm.errors import InputError

POLL_SECONDS = 0.05
RESULTS = "results.json"
"""In the folder of a finished run: figures of its model and of baselines."""
PERPLEXITY = "perplexity.json"
"""In the folder of a finished baseline: its valid and test perplexity."""


@contextmanager
def replacing(*paths: Path) -> Iterator[list[Path]]:
    """Yield temporary paths beside `paths`; move all of them to `paths` if the block succeeds, else remove them."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        replace_all(temporary, paths)
    except OSError as error:
        names = dict(zip(map(str, temporary), paths, strict=True))  # report the user's path, not the temporary one
        where = names.get(str(error.filename), error.filename or paths[0])
        raise InputError(
            f"cannot write {where}: {error.strerror or error}; {_advice(error)} (existing files are kept)"
        ) from error
    finally:
        for source in temporary:
            with suppress(OSError):  # already moved, or the error above is being raised
                source.unlink()


def replace_all(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Move files to `targets`, in order; if one cannot be moved, all targets are what they were before."""
    # The last move needs no copy to return to: nothing can fail after it.
    copies = [target.with_name(f".{target.name}.{os.getpid()}.old.tmp") for target in targets[:-1]]
    moved: list[Path] = []
    try:
        for target, copy in zip(targets, copies, strict=False):
            if target.exists():
                link_file(target, copy)
        for source, target in zip(sources, targets, strict=True):
            os.replace(source, target)
            moved.append(target)
    except BaseException:
        for target, copy in zip(moved, copies, strict=False):
            os.replace(copy, target) if copy.exists() else target.unlink()
        raise
    finally:
        for copy in copies:
            copy.unlink(missing_ok=True)


def _advice(error: OSError) -> str:
    """Return what the user can do about an error of writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None):  # none: numpy has written a part
        return "free some disk space"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a file is in the place of a folder: choose another folder"
    return "choose a writable folder, or change the permissions of this one"


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as (temporary,), temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_new(path: Path, content: bytes) -> bool:
    """Write a new file atomically; return False if it exists. If several processes try, exactly one writes it."""
    own = path.with_name(f".{path.name}.{os.getpid()}.new")
    write_bytes(own, content)
    try:
        os.link(own, path)  # unlike a rename, a link never replaces a file
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if path.exists():
            return False
        os.rename(own, path)
    finally:
        own.unlink(missing_ok=True)
    return True


def read_bytes(path: Path) -> bytes:
    """Read a file; raise an InputError that names the file if it cannot be read."""
    _check_regular(path)
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _check_regular(path: Path) -> None:
    """Raise an InputError for a device or a pipe: the one may have no end, the other no writer."""
    if path.exists() and not path.is_file():
        raise InputError(f"cannot read {path}: it is not a regular file")


def parse_json(path: Path) -> Any:
    """Read a file of JSON; raise an InputError that names the file if it is missing or damaged."""
    content = read_bytes(path)
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise InputError(f"{path} is nested too deeply: it is damaged, or belongs to another program") from None
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} is truncated or not JSON ({reason}): save or copy it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise an InputError that names the file if it is missing or damaged."""
    content = parse_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object: it may belong to another program")
    return content


def is_integer(value: object, expected: int) -> bool:
    """Return whether a value of a JSON file is this integer; true and 1.0, which equal 1, are not."""
    return type(value) is int and value == expected


def require_like(path: Path, values: Any, like: Any, name: str = "") -> None:
    """Raise an InputError that names the first entry of the JSON file `path` that is missing or of another type.

    `values` must have the types of `like`, in an object all of its entries, and in a list the type of the first one;
    numbers are finite and not negative.
    """
    kind = type(like)
    accepted = isinstance(values, (int, float) if kind is float else kind)
    if not accepted or isinstance(values, bool) != (kind is bool):
        raise InputError(f"{path}: {name} is of type {type(values).__name__}, not {kind.__name__}: the file is damaged")
    if kind in (int, float) and not 0 <= values < float("inf"):
        raise InputError(f"{path}: {name} is {values}, not a number of at least 0: the file is damaged")
    if kind is dict:
        for key, example in like.items():
            where = f"{name}.{key}" if name else key
            if key not in values:
                raise InputError(f"{path} has no {where}: it is damaged, or of another version")
            require_like(path, values[key], example, where)
    if kind is list and like:
        for i, value in enumerate(values):
            require_like(path, value, like[0], f"{name}[{i}]")


def link_or_copy(source: Path, target: Path) -> None:
    """Put the files of folder `source` into folder `target`: as hard links on the same disk, else as copies."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        with replacing(target / file.name) as (temporary,):
            link_file(file, temporary)


def link_file(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where there are no hard links."""
    target.unlink(missing_ok=True)  # left over by a killed process
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time run the block, by a lock on `path`; `on_wait` is called while another one runs it.

    The lock ends with the process, however it ends. `on_wait` may raise an exception instead of waiting.
    """
    try:
        import fcntl
    except ImportError:  # on Windows nothing is locked
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                time.sleep(POLL_SECONDS)
                continue
            except OSError:  # a file system without locks
                pass
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else removed by its owner
                yield
                return
