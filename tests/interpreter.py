"""Triton kernels without a GPU: in Triton's interpreter, in a process of their own.

The interpreter has to be chosen before Triton is first imported, so a test file runs itself again with it: there only
the tests whose name or parameters say triton are run. Where Triton is not installed its kernels are not covered, and
the run says so at its end (conftest.py).
"""

import os
import subprocess
import sys
from importlib.util import find_spec

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process is the one with the interpreter."""
IMPLEMENTATIONS = ["triton"] if INTERPRETING else ["torch"]
STARTS = not INTERPRETING and find_spec("triton") is not None
"""Whether this process starts the other."""


def run_in_the_interpreter(file: str) -> None:
    """Every test of a file that is named after triton, or has it as a parameter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
