"""Triton kernels without a GPU: in Triton's interpreter, in a process of their own.

The interpreter has to be chosen before Triton is first imported, so a test file runs itself again with it. That process
runs only the tests that have triton in their name or among their parameters; tests/gpu has the same kernels on a GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process is the one with the interpreter."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
"""For tests that compile kernels."""
in_interpreter = pytest.mark.skipif(not INTERPRETING, reason="run in the interpreter's process by run_in_interpreter")
"""For tests of the kernels alone."""
outside_interpreter = pytest.mark.skipif(INTERPRETING, reason="does not test the kernels")
"""For tests of the portable implementation alone, in files that run in the interpreter too."""


def starts_interpreter(test: Callable[[], None]) -> Callable[[], None]:
    """Mark the test that calls `run_in_interpreter`."""
    reason = "triton is not installed, or this is its interpreter's process"
    return pytest.mark.slow(pytest.mark.skipif(INTERPRETING or find_spec("triton") is None, reason=reason)(test))


def implementations(portable: str) -> list[str]:
    """Return the implementations that this process tests: the kernels in the interpreter, else the portable one."""
    return ["triton"] if INTERPRETING else [portable]


def run_in_interpreter(file: str) -> None:
    """Run every test of a file that has triton in its name or among its parameters, in Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def hurry_interpreter() -> None:
    """Let the interpreter patch `triton.language` once, not at every call, and not look for overflows of integers.

    Sizes here are far from 2³¹. This takes half of the time.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[int]()

    def patch_once(function: Callable[..., Any]) -> SimpleNamespace:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


if INTERPRETING:
    hurry_interpreter()


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter multiply bfloat16 numbers: it stores them as integers, and multiplies those."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    inner = InterpreterBuilder.create_dot

    def number(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return inner(self, number(a), number(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
