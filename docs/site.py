"""Pages of the documentation site that are not Markdown in docs/: files of the repository elsewhere, and notebooks.

See `hooks` in mkdocs.yml.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
WIDE = "---\nhide: [toc]\n---\n\n"
"""Front matter of the start page: its commands have comments beside them, and need the room of the contents."""
IMAGES = ("results/cpu-benchmark.png",)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and images."""
    for source, page in PAGES.items():
        text = (WIDE if page == "index.md" else "") + relink((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for image in IMAGES:
        files.append(File.generated(config, image, abs_src_path=str(ROOT / image)))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        text = "\n\n".join(notebook_parts(notebook))
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
    return files


def notebook_parts(path: Path) -> Iterator[str]:
    """Yield the cells of a notebook, with their outputs, as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    yield cells[0]["source"].pop(0)  # the title
    yield f"[Download the notebook]({path.name}) to run it in Jupyter."
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source.replace(".ipynb)", ".md)")
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in data:
                yield f"![figure](data:image/png;base64,{data['image/png'].strip()})"
            else:
                yield f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link the images where the site has them."""
    return markdown.replace("](../results/", "](results/")


def relink(markdown: str) -> str:
    """Return a page of the repository's root with the links of the site; links to other files become their text."""

    def link(match: re.Match[str]) -> str:
        text, target, title = match.groups()
        path, _, anchor = target.partition("#")
        if path.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/').replace('.ipynb', '.md')}{title})"
        if path in PAGES:
            return f"[{text}]({PAGES[path]}{'#' + anchor if anchor else ''})"
        return match[0] if "://" in target else text

    return re.sub(r'\[([^\]]*)\]\(([^)\s]+)((?: "[^"]*")?)\)', link, markdown)
