"""What goes wrong in one of several processes stops all of them, with one sentence, and can be resumed."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import DEADLINE, end_ranks, run_ranks, start_ranks
from helpers.runs import tiny_config, write_text
from test_ranks_training import MINI_BATCH, assert_close, train_in_float64

from hmmlm.config.run import RunConfig
from hmmlm.config.training import read_config
from hmmlm.distributed.ranks import FirstRankError, LostRankError, connected, world
from hmmlm.errors import InputError
from hmmlm.learning.fit import Fit
from hmmlm.runs.checkpoint import read_checkpoint
from hmmlm.training.train import train

pytestmark = pytest.mark.slow
LOST = re.compile(
    r"rank 0 of 2 has lost another one, which has ended or does not answer \([^()]+\); the last checkpoint, \S+, is "
    r"intact: continue with --resume \S+"
)


def train_until(step: int, rank: int, what: str, config: dict[str, Any], out: Path, resume: bool = False) -> None:
    """Train in float64; at a step, one rank is killed or asked to stop, or raises an error."""
    original = Fit.step

    def step_or_fail(fit: Fit, batch: Any) -> None:
        original(fit, batch)
        if fit.position.step == step and world().rank == rank:
            if what == "error":
                raise InputError("the disk of this machine is full")
            os.kill(os.getpid(), signal.Signals[what])

    Fit.step = step_or_fail  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        finished = train(read_config(RunConfig, config), out, resume).finished
        assert what == "SIGTERM" and not finished
    except LostRankError as error:
        assert world().rank != rank and LOST.fullmatch(str(error)), error
        raise


@pytest.fixture(scope="module", params=["adamw", "full batch"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return a configuration and its run in one process."""
    folder = tmp_path_factory.mktemp("straight")
    optimizer = {} if request.param == "adamw" else {**MINI_BATCH, "full_batch": True}
    config = tiny_config(
        write_text(folder), batches={"batch_size": 4}, optimizer=optimizer, train={"checks_per_epoch": 1}
    ).dump()
    train_in_float64(config, folder / "run")
    return config, folder / "run"


def test_a_killed_rank_ends_the_others_and_the_run_resumes(
    straight: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    config, run = straight
    codes = end_ranks(start_ranks(2, train_until, 13, 1, "SIGKILL", config, tmp_path / "run"))
    assert codes == [2, -signal.SIGKILL]
    assert read_checkpoint(tmp_path / "run" / "last")[1]["position"]["step"] == 10
    run_ranks(3, train_in_float64, config, tmp_path / "run", True)
    assert_close(tmp_path / "run", run)


def test_an_error_of_one_rank_ends_the_others(straight: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    config, _ = straight
    assert end_ranks(start_ranks(2, train_until, 3, 1, "error", config, tmp_path / "run")) == [2, 2]


def hang(rank: int) -> None:
    """Let one rank stop answering in a step."""
    if world().rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        world().sum_numbers([1.0])
    except LostRankError as error:
        assert re.match(r"rank 0 of 2 has lost another one, .* \(Timed out waiting 1000ms for ", str(error)), error
        raise


def test_a_rank_that_hangs_is_not_waited_for_forever() -> None:
    first, stopped = start_ranks(2, hang, 1, wait=1.0)
    first.join(DEADLINE)
    stopped.kill()
    assert end_ranks([first, stopped]) == [2, -signal.SIGKILL]


def wait_for_first() -> None:
    """Wait for rank 0 and for a share of work, both longer than in a step."""
    assert world().on_first(lambda: time.sleep(2.0)) is None
    if world().rank == 1:
        time.sleep(2.0)
    assert world().gather(world().rank) == [0, 1]


def test_long_work_of_one_rank_is_waited_for() -> None:
    assert end_ranks(start_ranks(2, wait_for_first, wait=0.5)) == [0, 0]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(straight: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    config, run = straight
    run_ranks(2, train_until, 7, 1, "SIGTERM", config, tmp_path / "run")
    assert read_checkpoint(tmp_path / "run" / "last")[1]["position"]["step"] == 7
    train_in_float64(config, tmp_path / "run", resume=True)
    assert_close(tmp_path / "run", run)


def test_checkpoints_of_one_process_continue_in_several(straight: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    config, run = straight
    run_ranks(1, train_until, 7, 0, "SIGTERM", config, tmp_path / "run")
    run_ranks(2, train_in_float64, config, tmp_path / "run", True)
    assert_close(tmp_path / "run", run)


def start_in_used_folder(config: dict[str, Any], out: Path) -> None:
    """Start a run where one is being written; rank 0 says so, the others only end."""
    with pytest.raises(InputError) as caught:
        train(read_config(RunConfig, config), out, resume=True)
    assert "is in use by another process" in str(caught.value)
    assert isinstance(caught.value, FirstRankError) is (world().rank > 0)


def test_two_runs_cannot_write_into_one_folder(straight: tuple[dict[str, Any], Path]) -> None:
    from hmmlm.runs.folders import lock_run

    config, run = straight
    with lock_run(run):
        run_ranks(2, start_in_used_folder, config, run)


def start_with_small_batches(config: dict[str, Any], out: Path) -> None:
    with pytest.raises(InputError, match=r"batch_size is 1, fewer than the 2 processes .* set --batches.batch-size"):
        train(read_config(RunConfig, config), out)
    assert not out.exists()


def test_a_batch_with_fewer_sequences_than_processes(tmp_path: Path) -> None:
    config = tiny_config(write_text(tmp_path), batches={"batch_size": 1}).dump()
    run_ranks(2, start_with_small_batches, config, tmp_path / "run")


def test_several_devices_from_python(tmp_path: Path) -> None:
    config = tiny_config(write_text(tmp_path), train={"devices": 2})
    with pytest.raises(InputError, match=r"train.devices is 2, but this is one process: use the command `hmmlm train`"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_rank_that_never_starts_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with (
        pytest.raises(InputError, match="rank 0 of 2 waited in vain for the others"),
        connected(connection_wait=timedelta(seconds=1)),
    ):
        pass
