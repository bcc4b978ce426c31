"""A text larger than memory: repeat and permute the lines of a small one, make its token files, train, and read them.

    python -m benchmarks.large_text FOLDER TEXT... --bytes 20000000000

Makes FOLDER/text from the lines of the files TEXT, then runs `hmmlm data FOLDER/text --workers 2`, which is killed when
half of the parts are encoded and started again, and `hmmlm train`, as a user would. Prints seconds, and the largest
resident memory of all processes together. Then does in this process what training does with a text, one by one. FOLDER
is kept; what is there is not made again.
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from hmmlm.data.batches import Batches, ChunkBatches, StreamBatches
from hmmlm.data.corpora import PART_BYTES
from hmmlm.data.text import line_ranges, read_documents
from hmmlm.device import peak_memory
from hmmlm.structure.bigrams import count_bigrams
from hmmlm.training.prepare import reopen

BATCH, LENGTH, STEPS = 256, 32, 2_000
TRAINED_STEPS = 300
HELD_OUT = 10_000
"""Lines of valid and test each."""


def write_text(folder: Path, files: list[Path], size: int) -> None:
    """Write train.txt of `size` bytes, copies of the lines of files in other orders, and valid.txt and test.txt."""
    folder.mkdir(parents=True)
    lines = [f"{line}\n".encode() for file in files for line in read_documents(file)]
    np.random.default_rng(0).shuffle(held_out := lines[: 2 * HELD_OUT])
    for split, first in (("valid", 0), ("test", HELD_OUT)):
        (folder / f"{split}.txt").write_bytes(b"".join(held_out[first : first + HELD_OUT]))
    lines, written = lines[2 * HELD_OUT :], 0
    with (folder / "train.txt").open("wb") as file:
        for copy in itertools.count():
            order = np.random.default_rng(copy).permutation(len(lines))
            for piece in np.array_split(order, 100):
                written += file.write(b"".join(lines[i] for i in piece))
                if written >= size:
                    return


def resident(session: int) -> int:
    """Return the resident memory of the processes of a session, in bytes; pages that they share count once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                shared = re.search(r"^Pss: +(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
                total += 1024 * int(shared[1]) if shared else 0
        except OSError:  # it has ended
            continue
    return total


def run(what: str, *arguments: str, until: Callable[[], bool] = lambda: False) -> None:
    """Run a command of hmmlm, or kill it once `until` is true; print its seconds and the memory of its processes."""
    began, most = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "hmmlm", *arguments], start_new_session=True)
    killed = False
    while process.poll() is None:
        most = max(most, resident(process.pid))
        if until():
            process.send_signal(signal.SIGKILL)
            killed = True
        time.sleep(0.5)
    if not killed and process.returncode:
        raise SystemExit(f"hmmlm {' '.join(arguments)} failed")
    seconds = time.perf_counter() - began
    print(f"{what}: {seconds:,.0f} s; at most {most / 1e9:.2f} GB resident in all processes", flush=True)
    while killed and resident(process.pid):  # its workers notice that it has ended
        time.sleep(0.5)


def make_tokens(text: Path, out: Path) -> None:
    """Run `hmmlm data`, kill it when half of the parts of train are encoded, and run it again."""
    parts, count = out / "data" / ".train.parts", len(line_ranges(text / "train.txt", PART_BYTES))
    command = ("data", str(text), "--out", str(out), "--workers", "2")

    def made() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in parts.glob("0*.json")} if parts.exists() else {}

    run(f"data, killed after {count // 2} of {count} parts", *command, until=lambda: len(made()) >= count // 2)
    before = made()

    def changed() -> bool:
        now = made()
        assert not now or now.items() >= before.items(), "parts were made again"
        return False

    run("data, continued", *command, until=changed)


@contextmanager
def measured(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds, memory = time.perf_counter() - began, peak_memory(torch.device("cpu"))
    print(f"{what}: {seconds:,.1f} s; at most {memory / 1e9:.2f} GB resident so far", flush=True)


def read(batches: Batches, epoch: int) -> None:
    for _ in itertools.islice(batches.epoch(epoch), STEPS):
        pass


def read_tokens(folder: Path) -> None:
    """Do what training does with a text, one by one."""
    with measured("open and verify"):
        data = reopen(folder)
        train = data.tokens["train"]
    size = (train.text_bytes or 0) / 1e9
    print(f"{len(train):,} tokens in {len(train.documents) - 1:,} documents, {size:.1f} GB of text")
    with measured("count words"):
        train.word_counts()
    eos = data.tokenizer.eos_id
    stream = StreamBatches(train, BATCH, LENGTH, shuffle=True, reset_at_eos=True, eos_id=eos, seed=0)
    with measured(f"{STEPS:,} shuffled batches of {BATCH} streams"):
        read(stream, 0)
    chunks = ChunkBatches(train, BATCH, LENGTH, shuffle=True, seed=0)
    with measured(f"{STEPS:,} shuffled batches of {BATCH} chunks"):
        read(chunks, 0)
    with measured("cuts for evaluation"):
        StreamBatches(train, BATCH, LENGTH, shuffle=False, reset_at_eos=True, eos_id=eos, seed=0, whole=True)
    with measured("count bigrams"):
        count_bigrams(train.tokens, train.vocab_size, train.documents[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+", metavar="TEXT")
    parser.add_argument("--bytes", type=int, default=20_000_000_000)
    arguments = parser.parse_args()
    text, tokens = arguments.folder / "text", arguments.folder / "tokens"
    if not text.exists():
        write_text(text, arguments.files, arguments.bytes)
    if not tokens.exists():
        make_tokens(text, tokens)
    limit = str(TRAINED_STEPS * 64 * LENGTH)
    batches = ("--batches.batch-size", "64", "--batches.length", str(LENGTH), "--train.max-tokens", limit)
    command = ("train", "--data", str(tokens), "--out", str(arguments.folder / "run"), "--model.num-states", "64")
    run(f"train {TRAINED_STEPS} steps", *command, *batches)
    read_tokens(tokens)


if __name__ == "__main__":
    main()
