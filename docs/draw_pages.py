"""Draw the figures of guides whose blocks of Python draw one: `python docs/draw_pages.py`."""

import os
import re
import tempfile
from contextlib import chdir
from pathlib import Path

GUIDES = Path(__file__).parent / "guide"
PAGES = ("coming-from-hmmlearn", "symbols")


def blocks(page: Path) -> str:
    """Return the blocks of Python of a page as one program, without those that need another library."""
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return "\n".join(block for block in found if "to_hmmlearn" not in block)


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in PAGES:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            exec(compile(blocks(GUIDES / f"{name}.md"), name, "exec"), {})
            for picture in Path().glob("*.png"):
                (GUIDES.parent / "figures" / picture.name).write_bytes(picture.read_bytes())
