"""Kernels with matrix products as the compiler makes them for a Hopper GPU, which need not be there.

On that GPU a product with an operand in registers continues while the program does, and reading those registers is not
ordered with writing them again: a loop has to wait for all products in every iteration. Triton's pipelining does not
(triton-lang/triton#9433): results were wrong, sometimes NaN, when the GPU was busy.
"""

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


class Recorder:
    """Takes the place of a kernel: records the arguments of a launch, and leaves all results unwritten."""

    def __init__(self, kernel: Any, launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def record(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list:
    """Return a list that every later launch of a kernel by one of the modules is added to."""
    from triton.runtime import JITFunction

    launches: list = []
    for module in modules:
        for name, value in vars(module).copy().items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorder(value, launches))
    return launches


def ptx(kernel: Any, args: tuple, kwargs: dict) -> str:
    """Return the code of a launch, compiled for compute capability 9.0."""
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
    """Count innermost loops with a product that has an operand in registers, and no wait for all products."""
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
    """Assert that these kernels were launched, have products, and wait for them in every loop."""
    chosen = [launch for launch in launches if launch[0].__name__ in names]
    assert {kernel.__name__ for kernel, _, _ in chosen} == set(names)
    for kernel, args, kwargs in chosen:
        code = ptx(kernel, args, kwargs)
        assert "mma" in code
        assert not loops_that_do_not_wait(code), kernel.__name__
