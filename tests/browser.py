"""Chromium without a head and without a network, for tests of pages, and what a page looks like."""

import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def chromium():
    """A browser that is started here; without one, or without playwright, the test is skipped."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"there is no {' or '.join(_NAMES)} on this machine")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser, path):
    """A page from a file, and what it asks for beside that file; nothing of it is answered."""
    page = browser.new_page()
    asked = []

    def answer(route):
        if route.request.url == path.as_uri():
            route.continue_()
        else:
            asked.append(route.request.url)
            route.abort()

    page.route("**/*", answer)
    page.goto(path.as_uri())
    try:
        yield page, asked
    finally:
        page.close()


@dataclass(frozen=True)
class Look:
    """How a page is at a width and in a scheme. faint: (text, contrast) below WCAG's AA.

    overflow: pixels beyond the width. hidden: the texts of boxes that are cut, or that have to be
    moved sideways without a shade that says so. least: the smallest type that is shown, pixels,
    with its text. texts: how many pieces of text were looked at, those of SVG among them (drawn).
    """

    overflow: float
    hidden: list[str]
    faint: list[tuple[str, float]]
    least: tuple[float, str]
    texts: int
    drawn: int


def look(page, width, scheme):
    """Show the page so, and measure what a reader sees."""
    page.emulate_media(media="screen", color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    # Whole, as only what is in view can be asked what lies beneath it.
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": width, "height": height})
    found = page.evaluate(_MEASURE)
    faint = [(text, ratio) for text, ratio, needed in found["ratios"] if not ratio >= needed]
    smallest = min(found["sizes"])
    least = smallest[0], smallest[1]
    hidden = found["hidden"]
    return Look(found["overflow"], hidden, faint, least, len(found["sizes"]), found["drawn"])


def printed(page):
    """Return the number of A4 pages on paper, where nothing is dark."""
    page.emulate_media(media="print")
    return len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))


def cells(page, selector):
    """Return the texts of the rows that a selector finds."""
    taken = "row => [...row.querySelectorAll('th, td')].map(cell => cell.innerText)"
    return page.evaluate(f"s => [...document.querySelectorAll(s)].map({taken})", selector)


# Every piece of text with its colour on what lies beneath it. Beneath HTML: its ancestors'
# grounds; beneath SVG's text, the shapes at its middle, then the page. Contrast is WCAG 2's.
_MEASURE = """() => {
  const parse = text => {
    const n = text.match(/[\\d.]+/g).map(Number);
    const part = text.startsWith('color(srgb') ? n.slice(0, 3).map(v => 255 * v) : n.slice(0, 3);
    return [...part, n.length > 3 ? n[3] : 1];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]);
  const light = c => {
    const curve = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = c.map(v => curve(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = (element, point) => {
    const layers = [];
    if (point) for (const e of document.elementsFromPoint(...point)) {
      const style = getComputedStyle(e);
      if (!(e instanceof SVGElement) || e.tagName == 'text' || e.tagName == 'svg') continue;
      if (style.fill == 'none') continue;
      const fill = parse(style.fill);
      layers.push([...fill.slice(0, 3), fill[3] * style.fillOpacity * style.opacity]);
    }
    for (let e = element; e; e = e.parentElement)
      layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const overflow = document.documentElement.scrollWidth - innerWidth;
  const hidden = [...document.querySelectorAll('body *')].filter(e => e.clientWidth
    && getComputedStyle(e).overflowX != 'visible' && e.scrollWidth > e.clientWidth + 1
    && getComputedStyle(e).backgroundImage == 'none' && !(e instanceof SVGElement))
    .map(e => e.innerText.slice(0, 60));
  const found = {overflow, hidden, ratios: [], sizes: [], drawn: 0};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement, text = node.data.trim();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!text || !box.width || e.tagName == 'TITLE' || e.tagName == 'STYLE') continue;
    const style = getComputedStyle(e), drawn = e instanceof SVGElement;
    const matrix = drawn ? e.getScreenCTM() : {a: 1, b: 0};
    const size = parseFloat(style.fontSize) * Math.hypot(matrix.a, matrix.b);
    const point = drawn && [box.x + box.width / 2, box.y + box.height / 2];
    const below = ground(e, point), own = over(parse(drawn ? style.fill : style.color), below);
    const pair = [light(own), light(below)].sort((a, b) => b - a);
    const large = size >= 24 || size >= 18.66 && parseInt(style.fontWeight) >= 700;
    found.ratios.push([text, (pair[0] + .05) / (pair[1] + .05), large ? 3 : 4.5]);
    found.sizes.push([size, text]);
    found.drawn += drawn;
  }
  return found;
}"""
