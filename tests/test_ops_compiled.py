"""What the compiler makes of kernels with matrix products: compiled for a Hopper GPU, which need not be there.

There a product with an operand in registers runs on while the program does, and reading those registers is not ordered
with writing them again: in a loop somebody has to wait for all products in every turn. Triton's pipelining does not
(triton-lang/triton#9433): results were wrong, now and then NaN, when the GPU was busy. Where Triton is not installed
this is not covered.
"""

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreter import STARTS
from torch import Tensor

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8",
    torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")
H = 256


class Recorder:
    """In the place of a kernel: keeps what it was to be launched with, and leaves all results unwritten."""

    def __init__(self, kernel: Any, launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def record(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list:
    """Every launch of a kernel of `module` from now on."""
    from triton.runtime import JITFunction

    launches: list = []
    for name, value in vars(module).copy().items():
        if isinstance(value, JITFunction) and name.endswith("_kernel"):
            monkeypatch.setattr(module, name, Recorder(value, launches))
    return launches


def ptx(kernel: Any, args: tuple, kwargs: dict) -> str:
    """The launch as it is compiled for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in OPTIONS}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name], aligned = TYPES[value.dtype], True
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name], aligned, constants[(i,)] = "constexpr", False, value
        else:
            signature[parameter.name], aligned = "fp32" if isinstance(value, float) else "i32", value % 16 == 0
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def loops_that_do_not_wait(code: str) -> int:
    """Innermost loops with a product that has an operand in registers, and no wait for all products."""
    lines = code.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L__BB")}
    found = 0
    for at, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)", line)
        if not target or labels[target[1]] > at:
            continue
        body = "\n".join(lines[labels[target[1]] : at])
        if re.search(r"wgmma\.mma_async\S* \{[^}]*\}, *\{", body) and "wgmma.wait_group.sync.aligned 0" not in body:
            found += 1
    return found


def check(launches: list, *names: str) -> None:
    """Those kernels were launched, have products, and none of them is left running."""
    chosen = [launch for launch in launches if launch[0].__name__ in names]
    assert {kernel.__name__ for kernel, _, _ in chosen} == set(names)
    for kernel, args, kwargs in chosen:
        code = ptx(kernel, args, kwargs)
        assert "mma" in code
        assert not loops_that_do_not_wait(code), kernel.__name__


def test_pipelined_products_are_found_out() -> None:
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1}, {%r2}, %rd1;"
    loop = f"$L__BB0_2:\n {product}\n{{wait}}\n @%p1 bra $L__BB0_2;"
    assert loops_that_do_not_wait(loop.replace("{wait}", "wgmma.wait_group.sync.aligned 3;")) == 1
    assert loops_that_do_not_wait(loop.replace("{wait}", "wgmma.wait_group.sync.aligned 0;")) == 0
    in_memory = loop.replace("{%r2}", "%rd2").replace("{wait}", "wgmma.wait_group.sync.aligned 1;")
    assert loops_that_do_not_wait(in_memory) == 0


if STARTS:

    @pytest.mark.parametrize("kept", [128, 256])
    def test_blocked_scan(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
        from hmmlm.ops.blocked_scan import triton as kernels
        from hmmlm.ops.blocked_scan.problem import State, lay_out

        blocks, batch, time = 2, 2, 3
        tokens = torch.tensor([[0, 1, 0], [1, 1, 0]])
        states = blocks * kept
        problem = lay_out(
            tokens, torch.arange(blocks), torch.zeros(states, H), torch.zeros(states, H), torch.zeros(states),
            torch.zeros(states), torch.zeros(blocks, kept), None, None, None, torch.bfloat16,
        )  # fmt: skip
        state = State(
            torch.zeros(batch), torch.zeros(batch, time + 1, kept), torch.zeros(batch, time, kept),
            torch.zeros(batch, dtype=torch.bool),
        )  # fmt: skip
        launches = record(monkeypatch, kernels)
        kernels.backward(problem, state, torch.ones(batch))
        check(launches, "tiles_kernel", "factor_kernel")

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

    def test_linear_logsumexp(monkeypatch: pytest.MonkeyPatch) -> None:
        from hmmlm.ops.linear_logsumexp import triton as kernels

        u = torch.zeros(256, H, dtype=torch.bfloat16)
        launches = record(monkeypatch, kernels)
        out = kernels.forward(u, u, None)
        kernels.backward(torch.zeros(256), u, u, None, out)
        check(launches, "_forward_kernel", "_gradient_kernel")
