"""Recorded scans without a GPU: the kernels in Triton's interpreter, and a graph that calls them again."""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.dense_scan import scan
from helpers.interpreter import (
    INTERPRETING,
    in_interpreter,
    outside_interpreter,
    run_in_interpreter,
    starts_interpreter,
)
from helpers.oracle import random_hmm

from hmmlm.hmm import HMM
from hmmlm.ops import pieces
from hmmlm.ops.scan import Evidence, Parameters
from hmmlm.scan import recorded_scan
from hmmlm.scan.recorded_scan import EAGER, RecordedScans

STATES, WORDS, BATCH, LENGTH = 12, 9, 3, 5


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the CUDA graph; return the numbers of replays of all recordings."""
    counts: list[int] = []

    def record(launch: Callable[[], Any], mode: str) -> tuple[Any, Any]:
        result, number = launch(), len(counts)
        counts.append(0)
        for kept in result:
            kept.zero_()  # a graph that is captured has not run

        def replay() -> None:
            counts[number] += 1
            for kept, new in zip(result, launch(), strict=True):
                kept.copy_(new)

        return SimpleNamespace(replay=replay), result

    monkeypatch.setattr(recorded_scan, "record", record)
    return counts


def make_parameters(sharpness: float = 1.0) -> Parameters:
    return Parameters(*(p.log().float() for p in random_hmm(STATES, WORDS, 3, sharpness)))


def draw(number: int, carried: bool = False, restarts: bool = False) -> Evidence:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(-1, WORDS, (BATCH, LENGTH), generator=generator)
    carry = torch.rand(BATCH, STATES, generator=generator).double().log_softmax(1) if carried else None
    restart = torch.rand(BATCH, LENGTH, generator=generator) < 0.3 if restarts else None
    return Evidence(tokens, None, carry, restart)


@in_interpreter
@pytest.mark.parametrize(("carried", "restarts"), [(False, False), (True, False), (True, True)])
@pytest.mark.usefixtures("products")
def test_triton_replays_agree_with_the_scan(carried: bool, restarts: bool, replays: list[int]) -> None:
    scans, parameters, found = RecordedScans(), make_parameters(), []
    for number in range(EAGER + 3):
        evidence = draw(number, carried, restarts)
        result = scans.run(parameters, evidence, "triton")
        assert (result is None) == (number < EAGER)
        if result is not None:
            found.append((result, scan(parameters, evidence, "naive")))
    assert replays == [3]
    for got, want in found:  # compared at last: a replay must not overwrite earlier results
        torch.testing.assert_close(got.log_likelihood, want.log_likelihood)
        torch.testing.assert_close(got.carry.log_probs, want.carry.log_probs, rtol=1e-5, atol=1e-5)


@in_interpreter
def test_triton_scans_that_underflow_are_left_to_the_scan(replays: list[int]) -> None:
    """State 1 hardly emits what was seen first, and alone emits the rest."""
    parameters = Parameters(
        torch.tensor([0.5, 0.5]).log(),
        torch.tensor([[0.0, -45.0], [-45.0, 0.0]]),
        torch.tensor([[0.0, -30.0], [-30.0, 0.0]]),
    )
    harmless, harmful = torch.tensor([[0] * 8]), torch.tensor([[0] * 4 + [1] * 4])
    scans = RecordedScans()
    for _ in range(EAGER):
        assert scans.run(parameters, Evidence(harmless), "triton") is None
    assert scans.run(parameters, Evidence(harmless), "triton") is not None
    assert scans.run(parameters, Evidence(harmful), "triton") is None
    assert scans.run(parameters, Evidence(harmless), "triton") is not None
    for _ in range(20):
        assert scans.run(parameters, Evidence(harmful), "triton") is None
    assert 5 < replays[0] < 15  # it gives up


@in_interpreter
@pytest.mark.parametrize("log_leak", [-80.0, -math.inf])
def test_triton_scans_of_peaked_transitions_are_not_recorded(log_leak: float, replays: list[int]) -> None:
    """Nothing could be proved for them."""
    transition = torch.tensor([[0.0, log_leak], [log_leak, 0.0]])
    parameters = Parameters(torch.tensor([0.5, 0.5]).log(), transition, torch.full((2, 3), 1 / 3).log())
    scans = RecordedScans()
    for _ in range(EAGER + 3):
        assert scans.run(parameters, Evidence(torch.zeros(2, 4, dtype=torch.long)), "triton") is None
    assert not replays


@in_interpreter
def test_triton_graphs_of_a_model_that_changed_are_discarded(replays: list[int]) -> None:
    scans, parameters, other = RecordedScans(), make_parameters(), make_parameters(3.0)
    for number in range(EAGER + 1):
        scans.run(parameters, draw(number), "triton")
    for own, new in zip(parameters, other, strict=True):
        own.copy_(new)
    for number in range(EAGER + 1):
        result = scans.run(parameters, draw(number), "triton")
    assert result is not None and replays == [1, 1]
    torch.testing.assert_close(result.log_likelihood, scan(other, draw(EAGER), "naive").log_likelihood)


@in_interpreter
def test_triton_graphs_are_kept_for_few_shapes(replays: list[int]) -> None:
    scans, parameters = RecordedScans(), make_parameters()
    for _ in range(2):
        for batch in range(1, recorded_scan._SHAPES + 2):
            for _ in range(EAGER + 1):
                scans.run(parameters, Evidence(torch.zeros(batch, 4, dtype=torch.long)), "triton")
    assert replays == [1] * 2 * (recorded_scan._SHAPES + 1)


@in_interpreter
def test_triton_graphs_of_all_shapes_share_one_copy_of_the_emissions(
    replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inner = [], recorded_scan.prepare
    monkeypatch.setattr(recorded_scan, "prepare", lambda *given: made.append(inner(*given)) or made[-1])
    scans, parameters = RecordedScans(), make_parameters()
    for batch in range(1, 4):
        for _ in range(EAGER + 1):
            scans.run(parameters, Evidence(torch.zeros(batch, 4, dtype=torch.long)), "triton")
    assert replays == [1, 1, 1] and len(made) == 1


@in_interpreter
@pytest.mark.parametrize("cause", ["large", "no memory"])
def test_triton_scans_without_room_for_a_copy_of_the_emissions(
    cause: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise torch.OutOfMemoryError

    if cause == "no memory":
        monkeypatch.setattr(recorded_scan, "prepare", fail)
    scans, parameters, evidence = RecordedScans(), make_parameters(), Evidence(torch.zeros(1, 4, dtype=torch.long))
    with pieces.limit(STATES * WORDS - (cause == "large")):
        for _ in range(EAGER + 3):
            assert scans.run(parameters, evidence, "triton") is None
    assert not replays


@in_interpreter
def test_triton_scans_that_a_graph_cannot_replace(replays: list[int]) -> None:
    scans, parameters = RecordedScans(), make_parameters()
    learned = Parameters(*(p.clone().requires_grad_() for p in parameters))
    with torch.inference_mode():
        untracked = make_parameters()
    for number in range(EAGER + 2):
        assert scans.run(learned, draw(number), "triton") is None
        assert scans.run(untracked, draw(number), "triton") is None
        assert scans.run(parameters, draw(number), "naive") is None
        assert scans.run(parameters, draw(number), "auto") is None  # the tensors are on the CPU
    assert not replays
    with torch.no_grad():
        for number in range(EAGER + 1):
            result = scans.run(learned, draw(number), "triton")
    assert result is not None and not result.log_likelihood.requires_grad


@in_interpreter
@pytest.mark.parametrize("first", [False, True])
def test_triton_graphs_are_replayed_in_and_outside_inference_mode(first: bool, replays: list[int]) -> None:
    scans, parameters = RecordedScans(), make_parameters()
    for number in range(EAGER + 4):
        with torch.inference_mode(first == (number % 2 == EAGER % 2)):
            result = scans.run(parameters, draw(number), "triton")
        if result is not None:
            want = scan(parameters, draw(number), "naive").log_likelihood
            torch.testing.assert_close(result.log_likelihood.clone(), want)
    assert replays == [4]


@outside_interpreter
def test_a_model_with_recorded_scans_is_copied_without_them() -> None:
    hmm = HMM(*make_parameters())
    kept = RecordedScans.of(hmm)
    other = copy.deepcopy(hmm)
    assert RecordedScans.of(other) is not kept is RecordedScans.of(hmm)
    assert torch.equal(other.log_start, hmm.log_start)


@starts_interpreter
def test_triton_kernels_in_the_interpreter() -> None:
    assert not INTERPRETING
    run_in_interpreter(__file__)
