"""`hmmlm explore`: a page on this machine that shows what a model has learned."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import CliPositionalArg

from hmmlm.cli.models import ModelArguments
from hmmlm.cli.parse import parse
from hmmlm.errors import InputError
from hmmlm.runs.folders import find_run
from hmmlm.terminal import printable

DESCRIPTION = """Open a page in the browser that shows what a model has learned: the surprisal and the states of a
sentence that you type, and what could stand in the place of each word; a map of the states, and a
page for each; samples under constraints; the same sentence under a second model (by default a
5-gram of the same text); and the run. The page is served on 127.0.0.1, to this machine only, and
loads nothing from elsewhere. Ctrl-C stops the server.

examples:
  hmmlm explore runs/mine
  hmmlm explore runs/mine runs/other
  hmmlm explore runs/mine --export page.html"""


def _find_other(path: Path | None) -> Path | None:
    return None if path is None else find_run(path)


class ExploreArguments(ModelArguments):
    other: Annotated[
        CliPositionalArg[Path | None],
        Field(description="A second model to compare with; null: a 5-gram of the text of the run."),
        AfterValidator(_find_other),
    ] = None
    port: Annotated[int, Field(ge=0, le=65535)] = 8765
    """Port; a free one is chosen if it is taken, or 0."""
    browser: bool = True
    """Whether to open the page; --no-browser prints its address only."""
    export: Path | None = None
    """Write the parts that need no server into this file, and serve nothing."""
    text: Annotated[str, Field(max_length=10_000)] | None = None
    """The sentence to start with; None: a line of the test text."""


def run(argv: list[str]) -> int:
    arguments = parse(ExploreArguments, argv, "explore", DESCRIPTION)

    if arguments.export is not None and arguments.export.is_dir():
        raise InputError(f"--export: {arguments.export} is a folder: give the name of a file, such as page.html")

    from rich.console import Console

    from hmmlm.explorer.explorer import Explorer
    from hmmlm.explorer.page import export
    from hmmlm.explorer.server import Server
    from hmmlm.lm.lm import load

    with Console(stderr=True).status("loading the model"):
        lm = load(arguments.model, arguments.device)
        other = None if arguments.other is None else load(arguments.other, arguments.device)
        explorer = Explorer(lm, arguments.model, other)
    if arguments.text is not None:
        explorer.sentence = arguments.text
    if arguments.export is not None:
        with Console(stderr=True).status("laying out the states"):
            export(explorer, arguments.export)
        print(printable(str(arguments.export)))
        return 0
    server = Server(explorer, arguments.port)
    print(f"{printable(explorer.name)} is at {server.url} (Ctrl-C stops)", flush=True)
    if arguments.browser and _has_display():
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        server.server_close()
        explorer.close()
    return 0


def _has_display() -> bool:
    """Return whether a browser has a window to open in; without one, Python would start one in the terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
