"""Time every system on every operation and size: `python -m benchmarks.run`.

All systems solve the same problems, and their answers are checked before anything is timed. Repeats are interleaved,
one visit per system in turn, so that other load on the machine affects all of them equally.
"""

import argparse
import csv
import datetime
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from benchmarks import plot, problem, tables
from benchmarks.peers import SYSTEMS
from benchmarks.worker import Failed, TooSlow, Worker, share_cores

ROUNDS, VISIT_SECONDS = 7, 0.05  # each visit repeats the operation for at least this long
CELL_SECONDS = 2.0  # a cell gets no further visits after this total time; a longer first run is the measurement


@dataclass
class Cell:
    """One line of the CSV: one system, one operation, one size."""

    operation: str
    system: str
    states: int
    status: str = "ok"  # or the reason why there is no time
    repeats: int = 0
    median_s: float | None = None
    min_s: float | None = None
    error: float | None = None  # relative error of the answer against the reference
    dtype: str = ""
    version: str = ""
    times: list[float] = field(default_factory=list, repr=False)


def machine() -> dict[str, str | float]:
    """Return the columns of the CSV that describe the machine and the problem."""
    cpu = platform.processor() or platform.machine()
    info, memory = Path("/proc/cpuinfo"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if info.exists():
        facts = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        facts = {key.strip(): value.strip() for key, value in facts.items()}
        cpu = facts.get("model name", cpu)
        numbers = [facts.get(key, "?") for key in ("cpu family", "model", "stepping")]
        cpu += f" (family {numbers[0]}, model {numbers[1]}, stepping {numbers[2]})"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "memory_gib": round(memory),
        "system_load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "sequences": problem.SEQUENCES,
        "length": problem.LENGTH,
        "vocabulary": problem.VOCABULARY,
    }


def begin(cell: Cell, worker: Worker, answers: problem.Answers, question: problem.Problem, cap: float) -> None:
    """Load, prepare and run the operation once and check its answer; set the cell's status if any of this fails."""
    try:
        offered = worker.load(cell.states)
        cell.version, cell.dtype = worker.about
        if cell.operation not in offered:
            cell.status = "not offered"
            return
        worker.ask("prepare", cell.operation)
        seconds, result = worker.ask("first", limit=cap)
    except TooSlow:
        cell.status = f"over {cap:g} s"
        return
    except Failed as failure:
        cell.status = str(failure)
        return
    if result is not None:
        cell.error = problem.disagreement(question, answers, cell.operation, result)
        if not cell.error <= problem.TOLERANCE:
            cell.status = "wrong answer"
            return
    if seconds > CELL_SECONDS:
        cell.times = [seconds]


def repeat(cells: list[Cell], workers: dict[str, Worker], cap: float) -> None:
    """Visit the cells in rounds; the order rotates, so that no system always follows the same one."""
    for turn in range(ROUNDS):
        for cell in cells[turn % len(cells) :] + cells[: turn % len(cells)]:
            if cell.status != "ok" or sum(cell.times) > CELL_SECONDS:
                continue
            try:
                cell.times += workers[cell.system].ask("visit", VISIT_SECONDS, limit=cap + VISIT_SECONDS)
            except (TooSlow, Failed) as failure:
                cell.status = str(failure) or f"over {cap:g} s"


def hopeless(smaller: Cell, states: int, cap: float) -> str | None:
    """Return why a size is not worth trying, given the next smaller one; time grows at least linearly in states."""
    if smaller.status.startswith("not tried") or smaller.status == "not offered":
        return smaller.status
    if smaller.status != "ok":
        return f"not tried: {smaller.status} at {smaller.states} states"
    if smaller.min_s is not None and smaller.min_s * states / smaller.states > cap:
        return f"not tried: {smaller.min_s:.3g} s at {smaller.states} states"
    return None


def measure(
    operation: str,
    question: problem.Problem,
    answers: problem.Answers,
    workers: dict[str, Worker],
    earlier: list[Cell],
    cap: float,
) -> list[Cell]:
    """Check and time one operation of every system at one size."""
    states = question.start.shape[0]
    cells = [Cell(operation, system, states) for system in workers]
    for cell in cells:
        smaller = [old for old in earlier if (old.operation, old.system) == (operation, cell.system)]
        reason = hopeless(smaller[-1], states, cap) if smaller else None
        if reason:
            cell.status, cell.version, cell.dtype = reason, smaller[-1].version, smaller[-1].dtype
        else:
            begin(cell, workers[cell.system], answers, question, cap)
    repeat(cells, workers, cap)
    for cell in cells:
        if cell.status == "ok":
            cell.repeats, cell.median_s, cell.min_s = len(cell.times), statistics.median(cell.times), min(cell.times)
        shown = f"{cell.median_s * 1e3:12.3f} ms" if cell.median_s is not None else f"  {cell.status}"
        print(f"{operation:9} Z={states:<5} {cell.system:20}{shown}", flush=True)
    return cells


def write(path: Path, cells: list[Cell], about: dict[str, str | float]) -> None:
    """Write the cells to a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [f.name for f in fields(Cell) if f.name != "times"] + list(about)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for cell in cells:
            numbers = {name: f"{value:.4g}" for name, value in asdict(cell).items() if isinstance(value, float)}
            writer.writerow(asdict(cell) | numbers | about)


def main() -> None:
    """Measure all cells, writing the CSV after each operation, then draw the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024], help="numbers of states")
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(SYSTEMS),
        choices=list(SYSTEMS),
        metavar="SYSTEM",
        help="systems to measure: " + "; ".join(SYSTEMS),
    )
    parser.add_argument("--operations", nargs="+", default=list(problem.OPERATIONS), choices=problem.OPERATIONS)
    parser.add_argument(
        "--out",
        type=Path,
        default=tables.OFFICIAL,
        help="CSV file; the plot is written next to it, and the default file also updates docs/benchmarks.md",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cap", type=float, default=20.0, help="time limit of one run in seconds")
    parser.add_argument("--memory", type=float, default=12.0, help="memory limit of each system in GiB")
    arguments = parser.parse_args()

    share_cores(arguments.threads)
    about = machine() | {"threads": arguments.threads, "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "")}
    if about["system_load"] > 0.5:
        print(f"The machine is busy (load {about['system_load']}): systems that use OpenMP will appear far too slow.")
    workers = {system: Worker(system, int(arguments.memory * 2**30)) for system in arguments.only}
    cells: list[Cell] = []
    began = time.monotonic()
    try:
        for states in sorted(arguments.sizes):
            question = problem.make(states)
            answers = problem.solve(question)
            for operation in arguments.operations:
                cells += measure(operation, question, answers, workers, cells, arguments.cap)
                write(arguments.out, cells, about)
    finally:
        for worker in workers.values():
            worker.stop()
    print(plot.report(arguments.out))
    print(f"{time.monotonic() - began:.0f} s; {arguments.out} and {arguments.out.with_suffix('.png')}")


if __name__ == "__main__":
    main()
