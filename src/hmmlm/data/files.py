"""Atomic writes of files, and reads whose errors name the file."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hmmlm.errors import InputError


@contextmanager
def replacing(*paths: Path) -> Iterator[list[Path]]:
    """Yield temporary paths beside `paths`; move them to `paths`, in order, if the block succeeds, else remove them."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for source, target in zip(temporary, paths, strict=True):
            os.replace(source, target)
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


def _advice(error: OSError) -> str:
    """Return what the user can do about an error of writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
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
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _check_regular(path: Path) -> None:
    """Raise an InputError for a device or a pipe: the one may have no end, the other no writer."""
    if path.exists() and not path.is_file():
        raise InputError(f"cannot read {path}: it is not a regular file")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise an InputError that names the file if it is missing or damaged."""
    _check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is truncated or not JSON ({error}): save or copy it again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object: it may belong to another program")
    return content


def link_or_copy(source: Path, target: Path) -> None:
    """Put the files of folder `source` into folder `target`: as hard links on the same disk, else as copies."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        with replacing(target / file.name) as (temporary,):
            try:
                os.link(file, temporary)
            except OSError:
                shutil.copyfile(file, temporary)
