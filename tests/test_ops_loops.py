"""Compiled loops: products in tiles, threads, and agreement with `scaled` however the sequences are divided."""

import multiprocessing
import threading

import numpy as np
import pytest
import torch
from helpers.dense_scan import log_parameters, scan
from helpers.oracle import random_hmm

from hmmlm import HMM
from hmmlm.ops.common import installed
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.ops.threads import run_parts

pytestmark = pytest.mark.skipif(not installed("numba"), reason="numba is not installed")

SIZES = (1, 3, 16, 17, 33, 64, 70)  # around the width of a vector and of two


# --- products ---


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("states", SIZES)
def test_products_of_tiles_are_those_of_matrices(states: int, dtype: str) -> None:
    from hmmlm.ops import tiles

    rng, kind = np.random.default_rng(states), np.dtype(dtype)
    width, tolerance = tiles.padded_width(states, kind), 1e-5 if dtype == "float32" else 1e-12
    matrix, values = np.zeros((states, width), kind), np.zeros((16, width + 16), kind)
    matrix[:, :states], values[:, :states] = rng.random((states, states)), rng.random((16, states))
    strips, out = np.empty(tiles.packed_shape(states, kind), kind), np.empty((16, width), kind)
    for transposed, wanted in ((False, matrix[:, :states]), (True, matrix[:, :states].T)):
        tiles.pack(matrix, transposed, strips)
        out[:] = -1
        tiles.multiply(values, 11, strips, out)
        np.testing.assert_allclose(out[:11, :states], values[:11, :states] @ wanted, rtol=tolerance)
        assert not out[:11, states:].any()
    matrix[:, states:] = values[:, states:] = -np.inf
    tiles.pack(matrix, False, strips)
    tiles.multiply_max(values, 16, strips, out)
    sums = values[:, :states, None] + matrix[:, :states]
    np.testing.assert_allclose(out[:, :states], sums.max(1), rtol=tolerance)
    assert (out[:, states:] == -np.inf).all()


@pytest.mark.parametrize("rows", [1, 4, 6])
@pytest.mark.parametrize("states", SIZES)
def test_outer_products_are_added_over_steps_and_rows(states: int, rows: int) -> None:
    from hmmlm.ops import tiles

    rng, kind = np.random.default_rng(states), np.dtype("float32")
    width, stride, first, steps = tiles.padded_width(states, kind), 9, 2, 3
    before = rng.random((first + steps * stride, width + 16)).astype(kind)
    after = rng.random((4, 8, width + 16)).astype(kind)
    out = np.ones((-(-states // 8) * 8, width), kind)
    tiles.add_outer_products(before, first, stride, after, steps, rows, out)
    wanted = np.ones((states, width))
    for t in range(steps):
        here = before[first + t * stride :][:rows, :states]
        wanted += here.T.astype(float) @ after[t, :rows, :width]
    np.testing.assert_allclose(out[:states], wanted, rtol=1e-5)


# --- threads ---


def test_parts_run_at_the_same_time_and_in_order() -> None:
    barrier = threading.Barrier(3, timeout=30)  # of the three parts: broken if one waits for another

    def run(part: int) -> int:
        barrier.wait()
        return part * 10

    assert run_parts(run, 3) == [0, 10, 20]
    assert run_parts(lambda part: part, 1) == [0]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_a_part_is_raised_when_all_have_ended(failing: int) -> None:
    ended = threading.Event()

    def run(part: int) -> None:
        if part == failing:
            raise ValueError(f"part {part}")
        threading.Event().wait(0.05)
        ended.set()

    with pytest.raises(ValueError, match=f"part {failing}"):
        run_parts(run, 2)
    assert ended.is_set()


def _answer(queue: "multiprocessing.Queue[list[int]]") -> None:
    queue.put(run_parts(lambda part: part, 2))


def test_threads_start_anew_in_a_forked_process() -> None:
    run_parts(lambda part: part, 2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_answer, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) == [0, 1]
    finally:
        child.kill()
        child.join()


# --- recursions ---


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let small problems be divided among so many threads."""
    from hmmlm.ops.scan import compiled

    monkeypatch.setattr(compiled, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


def test_groups_hold_every_sequence_once(threads: int) -> None:
    from hmmlm.ops.scan.compiled import _groups

    for batch in (1, 7, 8, 9, 33, 64, 100, 300):
        for lengths in (np.full(batch, 5), np.arange(batch, 0, -1).clip(max=5)):
            groups = _groups(lengths, 5, 40)
            assert min(threads, batch // 16) <= len(groups) <= threads
            rows = sorted(row for part in groups for first, last in part for row in range(first, last))
            assert rows == list(range(batch))
            assert all(last - first <= 64 and part for part in groups for first, last in part)
            for part in groups:  # no thread has more than its share, but for groups being multiples of 8
                assert sum(last - first for first, last in part) < batch / threads + 8 * len(part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("states", "batch", "steps"), [(3, 1, 1), (4, 21, 7), (5, 9, 6), (17, 9, 6), (70, 150, 11)])
def test_any_division_gives_the_results_of_tensor_operations(
    threads: int, states: int, batch: int, steps: int, dtype: torch.dtype
) -> None:
    rng, tolerance = torch.Generator().manual_seed(states), 2e-5 if dtype == torch.float32 else 1e-9
    hmm = log_parameters(random_hmm(states, 23, seed=states, zeros=0.2), dtype)
    tokens = torch.randint(-1, 23, (batch, steps), generator=rng)
    lengths = torch.randint(1, steps + 1, (batch,), generator=rng)
    restart = torch.rand(batch, steps, generator=rng) < 0.2
    carry = torch.rand(batch, states, generator=rng, dtype=torch.float64).log_softmax(1)
    weight = torch.rand(batch, generator=rng, dtype=dtype)
    for evidence in (
        Evidence(tokens),
        Evidence(tokens, lengths),
        Evidence(tokens, None, carry, restart),
        Evidence(tokens, lengths, carry, restart),
    ):
        found = []
        for impl in ("compiled", "scaled"):
            leaves = [part.detach().clone().requires_grad_() for part in hmm]
            result = scan(Parameters(*leaves), evidence, impl)  # type: ignore[arg-type]
            gradients = torch.autograd.grad(result.log_likelihood, leaves, weight)
            found.append([result.log_likelihood.detach(), result.carry.log_probs.exp(), *gradients])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)


def test_any_division_finds_the_same_paths(threads: int) -> None:
    rng = torch.Generator().manual_seed(1)
    start, transition, emission = random_hmm(37, 19, seed=3)
    tokens = torch.randint(-1, 19, (70, 40), generator=rng)
    lengths = torch.randint(1, 41, (70,), generator=rng)
    ours, theirs = (HMM.from_probs(start, transition, emission, impl=impl) for impl in ("compiled", "scaled"))
    for given in (None, lengths):
        for got, wanted in zip(ours.viterbi(tokens, given), theirs.viterbi(tokens, given), strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.usefixtures("threads")
def test_many_threads_add_counts_in_the_same_order() -> None:
    model = HMM.from_probs(*random_hmm(30, 50, seed=5), impl="compiled")
    tokens = torch.randint(0, 50, (64, 20), generator=torch.Generator().manual_seed(2))
    first = model.expected_counts(tokens)
    for _ in range(5):
        for ours, again in zip(first, model.expected_counts(tokens), strict=True):
            assert torch.equal(ours, again)
