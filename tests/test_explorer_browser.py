"""The explorer in a real browser: headless Chromium of the system, driven by Playwright."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import BROWSER
from helpers.explorer_models import HOSTILE, blocked_model, serving, train_run

import hmmlm
from hmmlm.cli.main import main
from hmmlm.explorer.explorer import Explorer
from hmmlm.explorer.server import Server

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make env installs it")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")]
expect = playwright.expect
expect.set_options(timeout=30_000)
Page = Any
PANELS = ("sentence", "states", "generate", "compare", "run")
CONTRAST = """() => {
  const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color, under) => {  // any CSS color over a background, by drawing it
    canvas.fillStyle = `rgb(${under})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; })
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    const above = node.parentElement ? ground(node.parentElement) : [255, 255, 255];
    return rgb(getComputedStyle(node).backgroundColor, above);
  };
  const low = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("svg, .given, .busy")) continue;
    const back = ground(node);
    const [a, b] = [light(rgb(getComputedStyle(node).color, back)), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([node.className || node.tagName, node.textContent.slice(0, 20), ratio]);
  }
  return low;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    """Return a page that fails the test if a script fails, or if it asks for anything beyond 127.0.0.1."""
    context = chromium.new_context(viewport={"width": 1200, "height": 800})
    page, problems = context.new_page(), list[str]()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
    page.on("dialog", lambda dialog: (problems.append("dialog"), dialog.dismiss()))
    page.on(
        "request", lambda r: re.match(r"(http://127\.0\.0\.1:|file:|about:|data:)", r.url) or problems.append(r.url)
    )
    yield page
    context.close()
    assert not problems


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with serving(Explorer(hmmlm.load(run), run)) as server:
        yield server


@pytest.fixture(scope="module")
def blocked() -> Iterator[Server]:
    other = blocked_model(256)
    with serving(Explorer(blocked_model(), None, other)) as server:
        yield server


def chips(page: Page) -> list[str]:
    return page.locator("#chips .chip bdi").all_inner_texts()


def no_sideways_scroll(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_typing_selecting_and_replacing(page: Page, server: Server) -> None:
    page.goto(server.url)
    page.fill("#text", "the zebra sees the dog .")
    expect(page.locator("#chips .chip")).to_have_count(7)
    expect(page.locator("#chips .chip.unknown")).to_have_text(re.compile("zebra"))
    assert chips(page)[:3] == ["the", "zebra", "sees"]
    expect(page.locator("#sentence-figures")).to_contain_text("perplexity")
    page.locator("#chips .chip").nth(4).hover()
    expect(page.locator("#tip")).to_contain_text("dog")
    page.locator("#chips .chip").nth(4).click()
    expect(page.locator("#token h2")).to_have_text("dog")
    choice = page.locator("#token button.row[aria-label^='Replace by']").filter(has_not_text="dog").first
    word = choice.locator("bdi").inner_text()
    choice.click()
    expect(page.locator("#text")).to_have_value(f"the zebra sees the {word} .")
    expect(page.locator("#chips .chip[aria-pressed=true]")).to_have_text(re.compile(re.escape(word)))
    assert page.locator("#path .ring").count() == 7


def test_keyboard(page: Page, server: Server) -> None:
    page.goto(f"{server.url}#sentence?text=the+cat+sees")
    page.locator("#chips .chip").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#token h2")).to_have_text("sees")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("#token h2")).to_have_text("the")
    page.locator("nav a", has_text="States").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#map circle")).to_have_count(12)
    page.locator("#map svg").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    page.keyboard.press("Enter")
    expect(page.locator("#state h2")).to_have_text(re.compile(r"State \d+"))


def test_states(page: Page, server: Server) -> None:
    page.goto(f"{server.url}#states")
    expect(page.locator("#map circle")).to_have_count(12)
    page.fill("#word", "cat")
    expect(page.locator("#state h2")).to_contain_text("cat")
    expect(page.locator("#map circle.hit").first).to_be_attached()
    page.locator("#state button.row").first.click()
    expect(page.locator("#state h2")).to_have_text(re.compile(r"State \d+"))
    expect(page.locator("#state .passages li").first).to_be_visible()
    first = page.locator("#state h2").inner_text()
    page.locator("#state .pair button.row").last.click()
    expect(page.locator("#state h2")).not_to_have_text(first)
    page.go_back()
    expect(page.locator("#state h2")).to_have_text(first)
    page.locator("#map svg").click(position={"x": 5, "y": 5})  # nothing there
    page.mouse.wheel(0, -300)
    page.get_by_label("Show all").click()
    page.fill("#word", "do")
    expect(page.locator(".suggestions button")).to_have_text("dog")


def test_generation(page: Page, server: Server) -> None:
    page.goto(f"{server.url}#generate")
    expect(page.locator(".sample")).to_have_count(3)
    page.fill("#prompt", "the")
    page.fill("#constraint-must", "fish, cat|bird")
    page.fill("#constraint-never", "dog")
    page.fill("#num", "2")
    page.fill("#seed", "4")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".sample")).to_have_count(2)
    expect(page.locator("#samples-note")).to_contain_text("p(constraint)")
    expect(page.locator(".sample svg.chart .first")).to_have_count(2)
    for sample in page.locator(".sample .chips").all():
        words = sample.locator("bdi").all_inner_texts()
        assert "fish" in words and {"cat", "bird"} & set(words) and "dog" not in words
    page.fill("#constraint-must", "unheard")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#samples-note")).to_contain_text("outside the vocabulary")
    page.fill("#blanks", "the ___ sees the ___ .")
    page.get_by_role("button", name="Fill", exact=True).click()
    expect(page.locator("#filled h3")).to_have_text(["Blank 1", "Blank 2"])
    page.locator("#filled button.row").first.click()
    expect(page.locator("#filled h3")).to_have_text(["The blank"])
    assert re.fullmatch(r"the \S+ sees the ___ \.", page.input_value("#blanks"))


def test_two_models_and_the_run(page: Page, server: Server, blocked: Server) -> None:
    page.goto(f"{server.url}#compare?text=the+cat+sees+the+dog+.")
    expect(page.locator(".versus:not(.header)")).to_have_count(7)
    expect(page.locator("#compare-figures")).to_contain_text("Kneser-Ney 5-gram")
    page.fill("#text-2", "the cat")
    expect(page.locator(".versus:not(.header)")).to_have_count(3)
    page.locator("nav a", has_text="Run").click()
    expect(page.locator("#run .chart")).to_have_count(2)
    expect(page.locator("#run")).to_contain_text("model.num_states")
    expect(page.locator("#run")).to_contain_text("history.jsonl")
    page.goto(f"{blocked.url}#compare?text=the+cat+word3")
    expect(page.locator(".versus:not(.header)")).to_have_count(4)
    expect(page.locator("#compare-figures")).to_contain_text("second model")


def test_every_panel_of_a_large_blocked_model(page: Page, blocked: Server) -> None:
    page.goto(f"{blocked.url}#sentence?text=the+cat+word3+word9+cat&at=2")
    expect(page.locator("#facts")).to_have_text("4,096 states · 200 words · factored × blocked")
    expect(page.locator("#token button.row[aria-label^='Replace by']")).to_have_count(12)
    page.locator("nav a", has_text="States").click()
    blocked.explorer.layout.result(timeout=120)
    expect(page.locator("#map circle")).to_have_count(1500)
    expect(page.locator("#map-note")).to_contain_text("1,500 of 4,096 states")
    page.goto(f"{blocked.url}#states/4095")
    expect(page.locator("#state .pair button.row")).to_have_count(16)
    expect(page.locator("#state")).to_contain_text("training text is not here")
    page.goto(f"{blocked.url}#generate?max=5&num=1")
    expect(page.locator(".sample")).to_have_count(1)
    page.locator("nav a", has_text="Run").click()
    expect(page.locator("#run")).to_contain_text("a model without its run")


def test_hostile_text_stays_text(page: Page, server: Server) -> None:
    page.goto(server.url)
    page.fill("#text", HOSTILE)
    expect(page.locator("#chips .chip bdi", has_text="onerror")).to_have_count(1)
    assert "<script>" in "".join(chips(page)) and "שלום" in chips(page) and any("😀" in text for text in chips(page))
    page.locator("#chips .chip").nth(1).click()
    for panel in PANELS:
        page.locator(f"nav a[data-panel={panel}]").click()
        expect(page.locator(f"#panel-{panel}")).to_be_visible()
    assert page.title() == "run · hmmlm explorer" and page.locator("main script, main img").count() == 0
    page.goto(f"{server.url}#states/12345?find=<script>alert(1)</script>")
    expect(page.locator("#state")).to_contain_text("there is no state 12345")
    page.goto(f"{server.url}#sentence?text=%D7%A9%D7%9C%D7%95%D7%9D+%D7%A2%D7%95%D7%9C%D7%9D")
    expect(page.locator("#chips .chip").first).to_have_text(re.compile("שלום"))
    assert page.evaluate("getComputedStyle(document.querySelector('#chips .chips')).direction") == "rtl"


def test_a_very_long_text(page: Page, server: Server) -> None:
    page.goto(server.url)
    page.fill("#text", "the cat sees 😀 " * 700)  # 10,500 characters: the end is cut off
    expect(page.locator("#sentence-figures")).to_contain_text("without the last")
    expect(page.locator("#chips .chip")).to_have_count(2000)
    assert len(page.input_value("#text").encode("utf-16-le")) // 2 <= 10_500 and no_sideways_scroll(page)
    page.fill("#text", "x" * 9_000)  # one word
    expect(page.locator("#chips .chip")).to_have_count(2)
    assert no_sideways_scroll(page)


def test_the_page_survives_the_server(page: Page, run: Path) -> None:
    explorer = Explorer(hmmlm.load(run), run)
    with serving(explorer) as server:
        port = server.server_address[1]
        page.goto(f"{server.url}#sentence?text=the+cat")
        expect(page.locator("#chips .chip")).to_have_count(3)
    page.fill("#text", "the cat sees")
    expect(page.locator("#notice")).to_contain_text("server has stopped")
    assert chips(page)[:2] == ["the", "cat"] and page.input_value("#text") == "the cat sees"
    again = Server(explorer, port).start()
    try:
        assert again.server_address[1] == port
        expect(page.locator("#notice")).to_be_hidden()
        expect(page.locator("#chips .chip")).to_have_count(4)
    finally:
        again.shutdown()
        again.server_close()


def test_permalinks(page: Page, server: Server) -> None:
    page.goto(server.url)
    page.fill("#text", "the dog & the cat? #1")
    expect(page.locator("#chips .chip")).to_have_count(9)
    page.locator("#chips .chip").nth(1).click()
    expect(page.locator("#token h2")).to_have_text("dog")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    expect(page.locator("#token h2")).to_have_text("dog")
    assert page.input_value("#text") == "the dog & the cat? #1"
    page.goto(f"{server.url}#generate?prompt=the&constraint-must=cat&seed=3&unknown=1")
    expect(page.locator("#samples-note")).to_contain_text("seed 3 · p(constraint)")


def test_an_exported_page_needs_no_server(page: Page, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["explore", str(run), "--export", str(file), "--text", f"the cat {HOSTILE}"]) == 0
    page.goto(file.as_uri())
    expect(page.locator("#notice")).to_contain_text("Exported")
    page.locator("#chips .chip").nth(1).click()
    expect(page.locator("#token .row").first).to_be_visible()
    page.locator("nav a", has_text="States").click()
    expect(page.locator("#map circle")).to_have_count(12)
    page.locator("#state button.row").first.click()
    expect(page.locator("#state .passages li").first).to_be_visible()
    page.locator("nav a", has_text="Generate").click()
    expect(page.locator(".sample")).to_have_count(3)
    page.locator("nav a", has_text="Compare").click()
    expect(page.locator(".versus").nth(3)).to_be_visible()
    page.locator("nav a", has_text="Run").click()
    expect(page.locator("#run .chart")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_contrast_and_width(chromium: Any, server: Server, scheme: str, width: int) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    for link in ("sentence?at=1", "states", "states/3", "generate?constraint-must=cat", "compare", "run"):
        page.goto("about:blank")
        page.goto(f"{server.url}#{link}")
        page.wait_for_load_state("networkidle")
        expect(page.locator(".busy")).to_have_count(0)
        low = page.evaluate(CONTRAST)
        assert not low, (link, json.dumps(low[:5]))
        assert no_sideways_scroll(page), link
    context.close()
