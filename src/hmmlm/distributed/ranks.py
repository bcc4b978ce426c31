"""The processes of a run, its ranks: how many there are, and what they exchange over torch.distributed.

`torchrun` starts them and sets their environment. Numbers are global, over all machines, except `local`, the number
of a process on its machine, which chooses its GPU. A process that was not started by torchrun is the only rank.

Gradients and counts are summed by NCCL between GPUs, by Gloo otherwise. Everything else (objects, decisions, waiting)
goes over Gloo, on the CPU: a Gloo collective fails at once if a process of the group ends, where NCCL would wait. One
that hangs fails it after COLLECTIVE_WAIT.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hmmlm.errors import InputError

Result = TypeVar("Result")
CONNECTION_WAIT = timedelta(minutes=10)
COLLECTIVE_WAIT = timedelta(minutes=1)
"""How long ranks wait for each other in a step."""
LONGEST_WAIT = timedelta(days=7)
"""How long ranks wait for the first one, which may be clustering a large text, and for long work that they divide."""


class FirstRankError(InputError):
    """An error that rank 0 raises and reports, in the other ranks."""


class LostRankError(InputError):
    """Another rank has ended, or cannot be reached."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run; the default is the only one."""

    rank: int = 0
    count: int = 1
    local: int = 0
    """Number of this process on its machine."""
    data_group: Any = None
    """The group that sums tensors on the device; None: that of everything else, over Gloo."""
    waiting_group: Any = None
    """The group in which ranks wait up to LONGEST_WAIT, over Gloo."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and shows progress."""
        return self.rank == 0

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors on the device by their sums over all ranks, the same bits in each."""
        if self.count > 1:
            with _lost_rank_errors():
                pending = [dist.all_reduce(t, group=self.data_group, async_op=True) for t in tensors]
                for work in pending:
                    work.wait()

    def keep_in_first(self, tensors: Iterable[Tensor]) -> None:
        """Set tensors to zero in all ranks but rank 0, which has the sums of all."""
        if not self.first:
            for tensor in tensors:
                tensor.zero_()

    def own_rows(self, count: int) -> slice:
        """Return the rows of this process, of `count` that are divided among all of them in order."""
        return slice(count * self.rank // self.count, count * (self.rank + 1) // self.count)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks."""
        if self.count == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64)
        with _lost_rank_errors():
            dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in some rank."""
        return self.sum_numbers([float(flag)])[0] > 0 if self.count > 1 else flag

    def gather(self, value: Result) -> list[Result]:
        """Wait for all ranks and return their values, in order, in each of them; tensors must be on the CPU."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with _lost_rank_errors():
            dist.all_gather_object(values, value, group=self.waiting_group)
        return values

    def on_first(self, function: Callable[[], Result]) -> Result:
        """Run a function in rank 0 while the others wait, and return its result in each; an error ends all of them."""
        if self.count == 1:
            return function()
        message: list[Any] = [None]
        failure: BaseException | None = None
        if self.first:
            try:
                message = [("done", function())]
            except BaseException as error:
                failure, message = error, [("failed", str(error))]
        with _lost_rank_errors():
            dist.broadcast_object_list(message, src=0, group=self.waiting_group)
        if failure is not None:
            raise failure
        outcome, value = message[0]
        if outcome == "failed":
            raise FirstRankError(value)
        return value

    def share_generator(self, device: torch.device) -> None:
        """Give all ranks the random generators of rank 0, on the CPU and on the device."""
        torch.set_rng_state(self.on_first(torch.get_rng_state))
        if device.type == "cuda" and self.count > 1:
            torch.cuda.set_rng_state(self.on_first(lambda: torch.cuda.get_rng_state(device)), device)

    def first_before_others(self, function: Callable[[], Result]) -> Result:
        """Run a function in rank 0, then in the others, and return the result of each; an error of rank 0 ends all."""
        results: list[Result] = []
        self.on_first(lambda: results.append(function()))
        return results[0] if results else function()


_current = Ranks()


def world() -> Ranks:
    """Return this process among the ranks that `connected` has connected."""
    return _current


def started_by_torchrun() -> bool:
    """Return whether this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def connected(on_gpu: bool = False, connection_wait: timedelta = CONNECTION_WAIT) -> Iterator[Ranks]:
    """Connect the processes that torchrun started, until the outermost block ends.

    Args:
        on_gpu: whether ranks compute on GPUs.
        connection_wait: how long ranks wait for each other at the start.
    """
    global _current
    if _current.count > 1 or not started_by_torchrun():
        yield _current
        return
    _current = ranks = _connect(on_gpu, connection_wait)
    try:
        yield ranks
        ranks.gather(None)  # nobody leaves before the last one is done
    finally:
        _current = Ranks()
        if ranks.data_group is None or sys.exc_info()[0] is None:  # NCCL would wait for a lost rank
            dist.destroy_process_group()


def _connect(on_gpu: bool, connection_wait: timedelta) -> Ranks:
    rank, count, local, here = (_variable(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    try:
        dist.init_process_group("gloo", timeout=connection_wait)
        assert dist.group.WORLD is not None
        waiting = dist.new_group(timeout=connection_wait)
        waiting.set_timeout(LONGEST_WAIT)
        dist.group.WORLD.set_timeout(COLLECTIVE_WAIT)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise InputError(
            f"rank {rank} of {count} waited in vain for the others at {where} ({str(error).splitlines()[0]}): start "
            "every machine with the same --nnodes and --rdzv-endpoint"
        ) from None
    if not on_gpu:
        return Ranks(rank, count, local, waiting_group=waiting)
    torch.cuda.set_device(local % torch.cuda.device_count())
    nccl = torch.cuda.device_count() >= here  # ranks that share a GPU cannot use it
    return Ranks(rank, count, local, dist.new_group(backend="nccl") if nccl else None, waiting)


def _variable(name: str) -> int:
    """Return a number that torchrun sets."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise InputError(
            f"WORLD_SIZE is set, but {name} is not: start the command with torchrun, or unset WORLD_SIZE"
        ) from None


@contextmanager
def _lost_rank_errors() -> Iterator[None]:
    """Raise a LostRankError if a collective fails."""
    try:
        yield
    except RuntimeError as error:
        # Without the place in Gloo's source, and its advice.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).partition(". ")[0]
        raise LostRankError(
            f"rank {_current.rank} of {_current.count} has lost another one, which has ended or does not answer "
            f"({reason})"
        ) from None
