"""The explorer in a notebook: a frame with the page of a server in this process."""

from __future__ import annotations

import atexit
import weakref
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.page import export
from hmmlm.explorer.server import Server

if TYPE_CHECKING:
    from hmmlm.lm.lm import LanguageModel


class Display:
    """The page of a model. A notebook shows it as a frame; the server stops with the process, or by `close`."""

    def __init__(self, lm: LanguageModel, other: LanguageModel | None, height: int) -> None:
        self._explorer, self._height = Explorer(lm, lm.folder, other), height
        self._server = Server(self._explorer, port=0, framed=True).start()
        self.url = self._server.url
        # A process that ends while the map is computed would crash. The explorer is not kept until then.
        atexit.register(_close, weakref.ref(self._explorer))

    def __repr__(self) -> str:
        return f"Display({self.url})"

    def _repr_html_(self) -> str:
        url, style = escape(self.url), "border: 1px solid #8884; border-radius: 6px"
        note = f'<a href="{url}">{url}</a>, on the machine of the kernel: elsewhere, forward this port'
        return f'<iframe src="{url}" width="100%" height="{int(self._height)}" style="{style}"></iframe><p>{note}</p>'

    def export(self, path: str | Path) -> None:
        """Write the parts of the page that need no server into one file."""
        export(self._explorer, Path(path))

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._explorer.close()


def _close(explorer: weakref.ref[Explorer]) -> None:
    if (found := explorer()) is not None:
        found.close()
