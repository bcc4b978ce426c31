"""Folders of runs: a new one belongs to one process, and nothing that exists is overwritten or mixed with.

Nothing here brings torch along, so that mistakes are answered at once.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from hmmlm.data.files import read_json, write_bytes, write_new
from hmmlm.errors import InputError
from hmmlm.learning.config import RunConfig, config_from_dict

CONFIG = "config.json"
PREPARED = (CONFIG, "tokenizer", "data", "clusters.json")
"""What a run has before it begins to learn."""


def saved_config(out: Path) -> RunConfig:
    """The configuration of the run in `out`."""
    return config_from_dict(read_json(config_file(out)), str(Path(out) / CONFIG))


def config_file(out: Path) -> Path:
    """Where the settings of the run in `out` are; an error if there is none."""
    path = Path(out) / CONFIG
    if not path.exists():
        raise InputError(f"no run to resume in {out}: {path} does not exist")
    return path


def refuse_used(out: Path) -> None:
    """An InputError unless something new can be made in `out`: it is not there yet, or an empty folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give the name of a new folder")
    if not out.is_dir():
        return
    if _is_run(out):
        raise InputError(f"{out} already holds a run: continue it with --resume {out}, or choose another folder")
    there = sorted(path.name for path in out.iterdir() if not _is_left_over(path.name))
    if there:
        more = ", …" if len(there) > 1 else ""
        raise InputError(f"{out} is not empty ({there[0]}{more}): give the name of a new folder, to mix nothing up")


def refuse_shorter(out: Path, epoch: int, tokens: int, total: int, batch: int) -> None:
    """An InputError if a run that is resumed has gone further than the `total` tokens it is to have now; the last
    `batch` may have been longer than was left."""
    if tokens - total >= batch:
        raise InputError(
            f"the run in {out} has gone further already ({tokens:,} tokens, epoch {epoch}) than the {total:,} of "
            "these settings: leave out train.epochs and train.max_tokens, give more, or start a run in another folder"
        )


def _is_run(out: Path) -> bool:
    try:
        return {"data", "tokenizer", "train"} <= read_json(out / CONFIG).keys()
    except InputError:  # none, or of another program
        return False


def _is_left_over(name: str) -> bool:
    """A temporary file of `hmmlm.data.files`, of a process that was killed."""
    return name.startswith(".") and name.endswith((".tmp", ".new"))


@contextmanager
def new_folder(given: Path | None, parent: str, name: str) -> Iterator[Path]:
    """The folder `given` for a new run, if it can be; or one made here: parent/name-TIME, with -2, -3, … after it if
    that is there. What was made here is removed again if it stays empty."""
    if given is not None:
        refuse_used(given)
        yield given
        return
    out = base = Path(parent) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    made = [] if base.parent.exists() else [base.parent]
    for number in count(2):
        try:
            out.mkdir(parents=True)  # of processes that start in the same second, one makes each
            break
        except FileExistsError:
            out = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise InputError(f"cannot make {out}: {error.strerror or error}; give --out a folder elsewhere") from None
    try:
        yield out
    finally:
        for folder in (out, *made):
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def new_run(out: Path, settings: bytes, begun: bool = False) -> Iterator[None]:
    """`out`, new or empty, as the folder of a run with these settings, to be prepared by the block; or one in which the
    run has `begun` before, without coming to a checkpoint."""
    if begun:
        write_bytes(out / CONFIG, settings)
        yield
        return
    refuse_used(out)
    made = not out.exists()
    if not write_new(out / CONFIG, settings):
        raise InputError(f"{out} was taken by another run just now: choose another folder")
    with removed_on_failure(out, PREPARED, made):
        yield


@contextmanager
def removed_on_failure(out: Path, names: Sequence[str], made: bool) -> Iterator[None]:
    """If the block fails, remove what it made in `out`, and `out` itself if that was `made` for it: an attempt that
    came to nothing does not stand in the way of the next."""
    try:
        yield
    except BaseException:
        for path in (out / name for name in names):
            with suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path)
        if made:
            with suppress(OSError):
                out.rmdir()
        raise
