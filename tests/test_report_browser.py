"""The report in a real browser: colors, folded settings, and no sideways scrolling on a phone."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from helpers.browser import BROWSER
from helpers.commands import write_corpus
from test_cli_main import SMALL

from hmmlm.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")]
MEASURE = """<script>addEventListener("load", () => { document.title = JSON.stringify({
  background: getComputedStyle(document.body).backgroundColor,
  text: getComputedStyle(document.body).color,
  images: [...document.images].map((image) => image.complete && image.naturalWidth > 0),
  inverted: getComputedStyle(document.images[0]).filter,
  folded: !document.querySelector("details").open,
  wide: document.documentElement.scrollWidth > innerWidth,
}) })</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a run, with a script that measures it and writes the result into its title."""
    folder = tmp_path_factory.mktemp("report")
    corpus = write_corpus(folder / "animals.txt")
    argv = ["train", "--data", str(corpus), *SMALL, "--train.epochs", "1", "--quiet", "--out", str(folder / "run")]
    assert main(argv) == 0
    path = folder / "measured.html"
    path.write_text((folder / "run" / "report.html").read_text().replace("</head>", f"{MEASURE}</head>"))
    return path


@pytest.mark.parametrize(("scheme", "width"), [("light", 1000), ("dark", 1000), ("light", 500)])
def test_the_report_in_a_browser(page: Path, tmp_path: Path, scheme: str, width: int) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},800"]
    options += [f"--user-data-dir={tmp_path}", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"]
    command = [str(BROWSER), *options, "--dump-dom", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(.*?)</title>", result.stdout)
    assert found, result.stderr
    measured = json.loads(found[1])
    background, text = (sum(map(int, re.findall(r"\d+", measured[name])[:3])) for name in ("background", "text"))
    assert (background > text) == (scheme == "light")
    assert (measured["inverted"] == "none") == (scheme == "light")
    assert measured["images"] == [True] * 4
    assert measured["folded"] and not measured["wide"]
