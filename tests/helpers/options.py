"""Write the options of the commands whose parsers import torch, as `hmmlm` checks them first: `make options`."""

import json
from pathlib import Path

from helpers.commands import options_of

FILE = Path(__file__).parents[2] / "src" / "hmmlm" / "cli" / "options.json"
COMMANDS = ("train", "teacher", "baseline")


def options_text() -> str:
    """Return what the file must contain."""
    return json.dumps({command: sorted(options_of(command)) for command in COMMANDS}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(options_text())
