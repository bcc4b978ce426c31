"""Write the tables of modules in architecture.md, a table per folder: `python docs/modules.py`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
MARK = "<!-- made by docs/modules.py from the first line of each module -->\n"


def make_tables() -> Iterator[str]:
    """Yield a table of modules and their subjects for each folder of the package."""
    package = ROOT / "src" / "hmmlm"
    for folder in [package, *sorted(path for path in package.rglob("*") if path.is_dir())]:
        modules = sorted(path for path in folder.glob("*.py") if path.stem not in ("__init__", "__main__"))
        if modules:
            name = f"{folder.relative_to(package)}/" if folder != package else "hmmlm/"
            yield f"\n### {name}\n\n| module | subject |\n|---|---|\n" + "".join(map(_row, modules))


def _row(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    subject = docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|").replace("*", "\\*")
    return f"| `{module.name}` | {subject} |\n"


def written(page: str) -> str:
    """Return the page with the tables as they should be."""
    return page[: page.index(MARK) + len(MARK)] + "".join(make_tables())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
