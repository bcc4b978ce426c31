"""The files of the page, and the page as one self-contained file with recorded answers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from hmmlm.data.files import write_bytes
from hmmlm.errors import InputError
from hmmlm.explorer.endpoints import answer
from hmmlm.explorer.explorer import Explorer

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json; charset=utf-8",
}
FILES: dict[str, bytes] = {
    file.name: file.read_bytes() for file in files("hmmlm.explorer").joinpath("static").iterdir() if "." in file.name
}
INDEX = "index.html"
EXPORTED_STATES = 150  # state pages in an exported file
EXPORTED_PASSAGES = 60
EXPORTED_TOKENS = 40  # tokens of the sentence whose alternatives are in it


def index_page() -> bytes:
    return FILES[INDEX]


def export(explorer: Explorer, path: Path) -> None:
    """Write the page with the answers that need no server: the sentence, the map, the largest states, the run."""
    for computed in (explorer.layout, explorer.second):
        computed.exception()  # waits; an error is reported by the panel
    recorded = []
    for name, fields in _questions(explorer):
        with suppress(InputError):  # the page then says that it has no answer
            recorded.append({"name": name, "fields": fields, "answer": answer(explorer, name, fields)})
    write_bytes(path, _self_contained(recorded).encode())


def _questions(explorer: Explorer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests whose answers an exported page has."""
    text = explorer.sentence
    yield "model", {}
    yield "run", {}
    yield "map", {}
    yield "sentence", {"text": text}
    for position in range(min(EXPORTED_TOKENS, len(explorer.lm.encode(text)))):
        yield "blank", {"text": text, "position": position}
    yield "compare", {"text": text}
    yield "generate", {"seed": 0}
    for rank, state in enumerate(explorer.index.order[:EXPORTED_STATES].tolist()):
        yield "state", {"state": state}
        if rank < EXPORTED_PASSAGES:
            yield "passages", {"state": state}


def _self_contained(recorded: list[dict[str, Any]]) -> str:
    """Return the page with its styles, scripts and answers inside; its policy allows exactly these scripts."""
    page = FILES[INDEX].decode()
    style, hashes = FILES["style.css"].decode(), []
    page = re.sub(r'<link rel="icon"[^>]*>\n?', "", page)
    page = re.sub(r'<link rel="stylesheet"[^>]*>', lambda _: f"<style>{style}</style>", page)
    for name in re.findall(r'<script src="([\w.]+)" defer></script>', page):
        script = FILES[name].decode()
        hashes.append(_hash(script))
        page = page.replace(f'<script src="{name}" defer></script>', "")
        page = page.replace("</body>", f"<script>{script}</script>\n</body>")
    content = json.dumps(recorded, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    data = f'<script type="application/json" id="recorded">{content}</script>\n'
    policy = f"default-src 'none'; script-src {' '.join(hashes)}; style-src {_hash(style)}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    first = page.index("<script>")
    return page[:first].replace("<title>", f"{head}<title>") + data + page[first:]


def _hash(content: str) -> str:
    """Return a source of a content security policy: the digest of an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
