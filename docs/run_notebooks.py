"""Execute the notebooks of the documentation, and keep their outputs: python docs/run_notebooks.py [NOTEBOOK…].

Plain Python, without a kernel: a notebook here has no magics. As in Jupyter, what a cell prints, its last value and its
figures are its outputs.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from pprint import pformat
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def execute(notebook: dict[str, Any], name: str) -> None:
    """Run the code cells in order, in the present folder, and set their outputs; an error names its cell and line."""
    os.environ.setdefault("MPLBACKEND", "agg")
    values: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for _ in _figures():  # of what ran before in this process
        pass
    for number, cell in enumerate(cells, 1):
        body = ast.parse("".join(cell["source"])).body
        last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
        where, printed = f"{name}, code cell {number}", StringIO()
        with redirect_stdout(printed):
            exec(compile(ast.Module(body, []), where, "exec"), values)
            value = eval(compile(last, where, "eval"), values) if last else None
        cell["execution_count"] = number
        cell["outputs"] = list(_outputs(printed.getvalue(), value, number))


def _outputs(printed: str, value: object, number: int) -> Iterator[dict[str, Any]]:
    if printed:
        yield {"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}
    if value is not None:
        text = repr(value) if "\n" in repr(value) else pformat(value, width=100)
        data = {"text/plain": text.splitlines(keepends=True)}
        yield {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
    for image in _figures():
        data = {"image/png": base64.b64encode(image).decode() + "\n", "text/plain": ["<Figure>"]}
        yield {"output_type": "display_data", "metadata": {}, "data": data}


def _figures() -> Iterator[bytes]:
    """Yield the open figures as PNG, and close them."""
    if "matplotlib.pyplot" not in sys.modules:
        return
    from matplotlib import pyplot

    for figure in map(pyplot.figure, pyplot.get_fignums()):
        file = BytesIO()
        figure.savefig(file, dpi=80, bbox_inches="tight", metadata={"Software": None})
        yield file.getvalue()
    pyplot.close("all")


def main(paths: list[Path]) -> None:
    for path in map(Path.resolve, paths):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            execute(notebook, path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(list(map(Path, sys.argv[1:])) or NOTEBOOKS)
