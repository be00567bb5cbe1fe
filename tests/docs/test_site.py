"""The built site in a real browser: links, console, requests, search, copied code, screenshots.

`make docs-test` builds the site and runs this; it needs Debian's Chromium. The screenshots are build/screenshots/*.png.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="make docs-test sets up what this needs")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "docs"
SHOTS = ROOT / "build" / "screenshots"
PAGES = sorted(str(f.relative_to(SITE)) for f in SITE.rglob("*.html") if "_static" not in f.parts)
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update"]
LOOKED_AT = [
    "index",
    "start",
    "how",
    "guides/loop",
    "guides/cpu",
    "which",
    "coming-from",
    "results",
    "cli",
    "api",
    "faq",
]
LOOKED_AT += ["auto_gallery/index", "auto_gallery/plot_first_masks", "methods", "project/architecture"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / "index.html").exists():
        pytest.fail("build/docs/index.html must exist: make docs")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("chromium must be installed: apt-get install -y chromium")
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


class Watched:
    """A page that notes console errors, failed requests, and requests to anywhere but the site."""

    def __init__(self, browser: playwright.Browser, address: str, **settings: object) -> None:
        self.context = browser.new_context(**settings)
        self.page, self.address, self.faults = self.context.new_page(), address, []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.faults.append(f"console: {m.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.on("response", lambda r: r.status >= 400 and self.faults.append(f"{r.status}: {r.url}"))
        self.context.route("**/*", self.handle)

    def handle(self, route: playwright.Route) -> None:
        url = route.request.url
        if url.startswith((self.address, "data:", "blob:")):
            route.continue_()
        else:
            self.faults.append(f"outside: {url}")
            route.abort()

    def open(self, path: str) -> playwright.Page:
        self.page.goto(self.address + path, wait_until="load")
        return self.page


@pytest.fixture
def watched(browser: playwright.Browser, address: str) -> Iterator[Watched]:
    watched = Watched(browser, address)
    yield watched
    watched.context.close()


def test_every_link_and_anchor_resolves_and_nothing_is_loaded_from_outside(watched):
    links, anchors = [], {}
    for path in PAGES:
        page = watched.open(path)
        anchors[path] = set(page.evaluate("[...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name)"))
        found = page.evaluate("[...document.querySelectorAll('a[href], img[src]')].map(e => e.href || e.src)")
        links += [(path, link) for link in found if link.startswith(watched.address)]
    broken = []
    for path, link in links:
        url, anchor = urldefrag(urljoin(watched.address + path, link))
        target = unquote(urlparse(url).path).lstrip("/") or "index.html"
        missing_anchor = anchor and target in anchors and unquote(anchor) not in anchors[target] | {"", "top"}
        if not (SITE / target).is_file() or missing_anchor:
            broken.append(f"{path} -> {target}#{anchor}")
    assert broken == []
    assert watched.faults == []
    assert len(PAGES) > 30 and len(links) > 1000


@pytest.mark.parametrize(("words", "page"), [("2:4", "nm.html"), ("FSDP", "gpus.html"), ("finalize", "api.html")])
def test_search_finds(watched, words, page):
    opened = watched.open("index.html")
    opened.fill("input[name=q]", words)
    opened.press("input[name=q]", "Enter")
    opened.wait_for_selector("ul.search li a")
    opened.wait_for_function("document.querySelector('#search-results p')?.innerText.includes('found')")
    found = opened.evaluate("[...document.querySelectorAll('ul.search li > a')].map(e => e.href)")
    assert any(page in link for link in found[:10]), found[:10]
    assert watched.faults == []


def test_code_copied_from_the_start_page_runs_as_it_is(watched, tmp_path):
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=watched.address.rstrip("/"))
    page = watched.open("start.html")
    copied = []
    for block in page.query_selector_all("div.highlight-python"):
        block.hover()
        block.query_selector("button.copybtn").click()
        copied.append(page.evaluate("navigator.clipboard.readText()"))
    assert len(copied) >= 4
    script = tmp_path / "copied.py"
    script.write_text("\n\n".join(copied))
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "sparsity 0.900" in run.stdout
    assert watched.faults == []


LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}


@pytest.mark.parametrize("look", LOOKS)
def test_screenshots(browser, address, look):
    watched = Watched(browser, address, **LOOKS[look])
    SHOTS.mkdir(parents=True, exist_ok=True)
    wide = []
    for path in PAGES if look == "phone" else [f"{path}.html" for path in LOOKED_AT]:
        page = watched.open(path)
        if path.removesuffix(".html") in LOOKED_AT:
            page.screenshot(path=SHOTS / f"{look}-{path.removesuffix('.html').replace('/', '-')}.png")
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > LOOKS[look]["viewport"]["width"]:
            wide.append(f"{path}: {width}")
    watched.context.close()
    assert wide == []
    assert watched.faults == []
