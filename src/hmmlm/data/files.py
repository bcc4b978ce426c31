"""Files that are replaced whole or not at all."""

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
    """Temporary paths beside `paths`, moved over them, in order, when the block ends well; removed when it does not."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for source, target in zip(temporary, paths, strict=True):
            os.replace(source, target)
    except OSError as error:
        names = dict(zip(map(str, temporary), paths, strict=True))  # no user knows the temporary ones
        where = names.get(str(error.filename), error.filename or paths[0])
        raise InputError(
            f"cannot write {where}: {error.strerror or error}; {_advice(error)} (what was there before is kept)"
        ) from error
    finally:
        for source in temporary:
            with suppress(OSError):  # what was wrong above is wrong here, and said already
                source.unlink()


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "there is a file where a folder should be: choose another place"
    return "choose a folder that can be written to, or make this one so"


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as (temporary,), temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_new(path: Path, content: bytes) -> bool:
    """Write a file that is not there, whole or not at all; False if it is: of several processes, one writes it."""
    own = path.with_name(f".{path.name}.{os.getpid()}.new")
    write_bytes(own, content)
    try:
        os.link(own, path)  # unlike a rename, never over another file
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links
        if path.exists():
            return False
        os.rename(own, path)
    finally:
        own.unlink(missing_ok=True)
    return True


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an InputError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is truncated or not JSON ({error}): save or copy it again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object: it may be of another program")
    return content


def link_or_copy(source: Path, target: Path) -> None:
    """The files of a folder in another one: the same ones on one disk, copies elsewhere."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        with replacing(target / file.name) as (temporary,):
            try:
                os.link(file, temporary)
            except OSError:
                shutil.copyfile(file, temporary)
