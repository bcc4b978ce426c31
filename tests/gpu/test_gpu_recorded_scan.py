"""Scans of a fixed model that are replayed from CUDA graphs, against eager ones."""

import gc
import math
from threading import Thread

import pytest
import torch
from helpers.dense_scan import scan
from helpers.oracle import matrices
from torch import Tensor

from hmmlm.hmm import HMM, Carry
from hmmlm.ops.scan import Evidence
from hmmlm.scan.recorded_scan import EAGER, RecordedScans

WORDS, BATCH, LENGTH = 500, 16, 8


def make_hmm(states: int, device: torch.device, spread: float = 1.0) -> HMM:
    generator = torch.Generator().manual_seed(states)
    shapes = ((states,), (states, states), (states, WORDS))
    return HMM(*((spread * torch.randn(s, generator=generator)).log_softmax(-1).to(device) for s in shapes))


def draw(number: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-1, WORDS, (BATCH, LENGTH), generator=generator).to(device)


def graphs(hmm: HMM) -> int:
    return sum(shape.graph is not None for shape in RecordedScans.of(hmm)._shapes.values())


@pytest.mark.parametrize("states", [200, 2080])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_replays_agree_with_eager_scans(
    states: int, carried: bool, products: torch.dtype, device: torch.device
) -> None:
    """Windows of a stream, with the carry of each from the one before."""
    hmm, found = make_hmm(states, device), []
    carries: list[Carry | None] = [None, None]
    for number in range(EAGER + 5):
        tokens = draw(number, device)
        restart = torch.rand(tokens.shape, device=device) < 0.2 if carried else None
        with torch.autocast("cuda", dtype=products, enabled=products != torch.float32):
            given = [carry if carried else None for carry in carries]
            got = hmm.scan(tokens, None, given[0], restart)
            carry = None if given[1] is None else given[1].log_probs
            want = scan(matrices(hmm), Evidence(tokens, None, carry, restart))
        carries = [got.carry, want.carry]
        found.append((got, want))
    torch.cuda.synchronize()
    assert graphs(hmm) == 1
    for got, want in found:
        torch.testing.assert_close(got.log_likelihood, want.log_likelihood, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(got.carry.log_probs.exp(), want.carry.log_probs.exp(), rtol=1e-5, atol=1e-7)


def test_the_public_likelihood_is_replayed_and_a_changed_model_is_recorded_again(device: torch.device) -> None:
    hmm, exact = make_hmm(64, device), make_hmm(64, torch.device("cpu")).to(torch.float64)
    for number in range(EAGER + 2):
        got = hmm.log_likelihood(draw(number, device))
        want = exact.log_likelihood(draw(number, torch.device("cpu")))
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-4)
    assert graphs(hmm) == 1
    hmm.transition.log_probs.copy_(hmm.transition.log_probs.roll(1, 1))
    exact = hmm.to("cpu", torch.float64)
    for number in range(EAGER + 2):
        got = hmm.log_likelihood(draw(number, device))
        want = exact.log_likelihood(draw(number, torch.device("cpu")))
        torch.testing.assert_close(got.double().cpu(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("log_leak", [-45.0, -math.inf])
def test_sequences_that_underflow_are_recomputed_after_a_replay(log_leak: float, device: torch.device) -> None:
    """The last batch has a sequence whose likely paths were lost; the others have none."""
    transition = torch.tensor([[0.0, log_leak], [log_leak, 0.0]])
    parameters = (torch.tensor([0.5, 0.5]).log(), transition, torch.tensor([[0.0, -30.0], [-30.0, 0.0]]))
    hmm, exact = HMM(*(p.to(device) for p in parameters)), HMM(*(p.double() for p in parameters), impl="naive")
    harmless = torch.zeros(4, 8, dtype=torch.long)
    harmful = harmless.clone()
    harmful[1, 3:] = 1
    for tokens in [harmless] * (EAGER + 2) + [harmful, harmless]:
        got = hmm.scan(tokens.to(device))
        want = exact.scan(tokens)
        torch.testing.assert_close(got.log_likelihood.double().cpu(), want.log_likelihood, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            got.carry.log_probs.exp().double().cpu(), want.carry.log_probs.exp(), rtol=1e-4, atol=1e-6
        )


def test_threads_share_a_graph(device: torch.device) -> None:
    hmm = make_hmm(300, device)
    for number in range(EAGER + 1):
        hmm.log_likelihood(draw(number, device))
    want = {n: scan(matrices(hmm), Evidence(draw(n, device))).log_likelihood for n in range(4)}
    wrong: list[int] = []

    def score(number: int) -> None:
        for _ in range(20):
            got = hmm.log_likelihood(draw(number, device))
            if not torch.allclose(got, want[number], rtol=1e-6, atol=1e-5):
                wrong.append(number)

    threads = [Thread(target=score, args=(number,)) for number in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_with_graphs_is_freed_at_once(device: torch.device) -> None:
    """Validation makes one in every round, and the garbage collector may be far behind."""
    small = make_hmm(8, device)
    for number in range(EAGER + 2):  # what libraries keep is allocated
        small.log_likelihood(draw(number, device))
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        hmm = make_hmm(512, device)
        for number in range(EAGER + 2):
            hmm.log_likelihood(draw(number, device))
        assert graphs(hmm) == 1 and torch.cuda.memory_allocated() > before
        del hmm
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
    finally:
        gc.enable()
