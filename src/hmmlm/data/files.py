"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        where = error.filename or paths[0]
        raise InputError(f"cannot write {where}: {error.strerror or error}; what was there before is kept") from error
    finally:
        for source in temporary:
            source.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as (temporary,), temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def link_or_copy(source: Path, target: Path) -> None:
    """The files of a folder in another one: the same ones on one disk, copies elsewhere."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        with replacing(target / file.name) as (temporary,):
            try:
                os.link(file, temporary)
            except OSError:
                shutil.copyfile(file, temporary)
