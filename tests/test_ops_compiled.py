"""Kernels compiled for a Hopper GPU: loops must wait for their products (tests/helpers/compiled.py)."""

import pytest
import torch
from helpers.compiled import check, loops_that_do_not_wait, ptx, record
from helpers.interpreter import needs_triton

H = 256


def test_loops_that_do_not_wait_are_found() -> None:
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1}, {%r2}, %rd1;"
    loop = f"$L__BB0_2:\n {product}\n{{wait}}\n @%p1 bra $L__BB0_2;"
    assert loops_that_do_not_wait(loop.replace("{wait}", "wgmma.wait_group.sync.aligned 3;")) == 1
    assert loops_that_do_not_wait(loop.replace("{wait}", "wgmma.wait_group.sync.aligned 0;")) == 0
    in_memory = loop.replace("{%r2}", "%rd2").replace("{wait}", "wgmma.wait_group.sync.aligned 1;")
    assert loops_that_do_not_wait(in_memory) == 0


@needs_triton
@pytest.mark.parametrize("kept", [128, 256])
def test_blocked_scan(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    from hmmlm.ops.blocked_scan import Factors
    from hmmlm.ops.blocked_scan import triton as kernels
    from hmmlm.ops.blocked_scan.problem import BlockedForward, lay_out

    blocks, batch, time = 2, 2, 3
    states = blocks * kept
    factors = Factors(
        torch.arange(blocks),
        torch.zeros(states, H),
        torch.zeros(states, H),
        torch.zeros(states),
        torch.zeros(states),
        torch.zeros(blocks, kept),
    )
    tokens = torch.tensor([[0, 1, 0], [1, 1, 0]])
    problem = lay_out(factors, tokens, None, None, None, torch.bfloat16)
    forward = BlockedForward(
        torch.zeros(batch),
        torch.zeros(batch, time + 1, kept),
        torch.zeros(batch, time, kept),
        torch.zeros(batch, dtype=torch.bool),
    )
    launches = record(monkeypatch, kernels)
    kernels.backward(problem, forward, torch.ones(batch))
    check(launches, "tiles_kernel", "factor_kernel")
    launches.clear()
    kernels.forward(problem)
    assert [kernel.__name__ for kernel, _, _ in launches] == ["tiles_kernel", "forward_kernel", "stray_kernel"]
    for launch in launches[1:]:
        assert "ld.global" in ptx(*launch)


@needs_triton
def test_blocked_emission(monkeypatch: pytest.MonkeyPatch) -> None:
    from hmmlm.ops.blocked_emission import make_tiles
    from hmmlm.ops.blocked_emission import triton as kernels

    blocks, kept, words = 2, 128, 100
    tiles = make_tiles(torch.arange(words) % blocks, blocks)
    hidden, vectors = (torch.zeros(*n, H, dtype=torch.bfloat16) for n in ((blocks, kept), (words,)))
    launches = record(monkeypatch, kernels)
    out = kernels.forward(hidden, vectors, None, tiles)
    kernels.backward(torch.zeros_like(out), hidden, vectors, out, tiles)
    check(launches, "_forward_kernel", "_hidden_kernel", "_words_kernel")


@needs_triton
def test_linear_logsumexp(monkeypatch: pytest.MonkeyPatch) -> None:
    from hmmlm.ops.linear_logsumexp import triton as kernels

    u = torch.zeros(256, H, dtype=torch.bfloat16)
    launches = record(monkeypatch, kernels)
    out = kernels.forward(u, u, None)
    kernels.backward(torch.zeros(256), u, u, None, out)
    check(launches, "_forward_kernel", "_gradient_kernel")
