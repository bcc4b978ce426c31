"""Pages of the documentation site that are files of the repository elsewhere; see `hooks` in mkdocs.yml."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
IMAGES = ("results/cpu-benchmark.png",)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and images."""
    for source, page in PAGES.items():
        text = relink((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for image in IMAGES:
        files.append(File.generated(config, image, abs_src_path=str(ROOT / image)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link the images where the site has them."""
    return markdown.replace("](../results/", "](results/")


def relink(markdown: str) -> str:
    """Return a page of the repository's root with the links of the site; links to other files become their text."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if path.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')})"
        if path in PAGES:
            return f"[{text}]({PAGES[path]}{'#' + anchor if anchor else ''})"
        return match[0] if "://" in target else text

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, markdown)
