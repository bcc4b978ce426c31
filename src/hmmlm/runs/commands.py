"""Commands as a user can type them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Return `hmmlm`, or its path, as it was started, where it is not on the PATH (as after `make demo`)."""
    started = Path(sys.argv[0])
    if started.name == "hmmlm" and shutil.which("hmmlm") is None:
        return shlex.quote(os.path.relpath(started))
    return "hmmlm"
