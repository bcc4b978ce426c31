"""Memory of the process: freed tensors are kept for the next step of a training on a CPU."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from hmmlm.device import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if {keep}:
    keep_freed_memory()
tensor = torch.ones(2**26)
del tensor
print(resident() > 2**28)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_kept(keep: bool) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(keep)
