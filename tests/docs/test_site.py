"""The site of the documentation builds, its links lead somewhere, it fetches nothing, and it is accessible."""

from __future__ import annotations

import http.server
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import axe
import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="needs zensical: pip install --group docs"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Any warning fails the build, such as a link without a target or a page outside the navigation."""
    directory = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, str(ROOT / "scripts/make_site.py"), "--output", str(directory)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


class Page(HTMLParser):
    """What a page has and what it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects ids, links, and what the browser loads by itself."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values.get("href", ""))
        elif "src" in values:
            self.loads.append(values["src"])


@cache
def parsed(file: Path) -> Page:
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


def pages(site: Path) -> list[Path]:
    # The page of an unknown address has links from the root of the server.
    return [file for file in sorted(site.rglob("*.html")) if file.name != "404.html"]


def test_every_page_of_the_repository_is_on_the_site(site: Path) -> None:
    built = {p.relative_to(site).as_posix() for p in pages(site)}
    docs = {f"{p.relative_to(ROOT / 'docs').with_suffix('')}.html" for p in (ROOT / "docs").rglob("*.md")}
    plugins = {f"plugins/{p.parent.name}.html" for p in ROOT.glob("plugins/*/README.md")}
    assert docs | plugins | {"project/contributing.html", "project/changelog.html"} <= built


def test_every_link_and_anchor_has_a_target(site: Path) -> None:
    wrong, seen = [], 0
    for file in pages(site):
        page = parsed(file)
        for link in (*page.links, *page.loads):
            path, anchor = urldefrag(link)
            if "://" in path or path.startswith(("mailto:", "data:")):
                continue
            seen += 1
            target = (file.parent / unquote(path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                anchor and target.suffix == ".html" and unquote(anchor) not in parsed(target).ids
            ):
                wrong.append(f"{file.relative_to(site)}: {link}")
    assert seen > 3000
    assert not wrong


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    foreign = [f"{f.name}: {load}" for f in pages(site) for load in parsed(f).loads if load.startswith(("http", "//"))]
    assert not foreign


def test_no_markdown_is_left_over(site: Path) -> None:
    """A fence or a table that the site's Markdown reads otherwise than a forge does would be shown as text."""
    left = [
        f.name for f in pages(site) for mark in ("<p>```", "<p>| ", "<p>- ") if mark in f.read_text(encoding="utf-8")
    ]
    assert not left


def test_the_search_has_every_page(site: Path) -> None:
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    found = {urldefrag(item["location"])[0] for item in index["items"]}
    assert {file.relative_to(site).as_posix() for file in pages(site)} <= found


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Any]:
    """A function that opens a page of the site."""
    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("needs Chromium and playwright: pip install playwright")
    from playwright.sync_api import sync_playwright

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])

        def opened(path: str, scheme: str = "light", width: int = 1440) -> Any:
            context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/{path}")
            return page

        yield opened
        chromium.close()
    server.shutdown()
    server.server_close()


LOOKS = [("light", 1440), ("dark", 1440), ("light", 390)]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), LOOKS)
@pytest.mark.parametrize("path", ["index.html", "howto/troubleshooting.html", "config.html", "performance.html"])
def test_a_page_breaks_no_rule_of_axe(browser: Any, path: str, scheme: str, width: int) -> None:
    if not axe.AXE.is_file():
        pytest.skip(axe.MISSING)
    page = browser(path, scheme, width)
    assert not axe.violations(page)
    page.context.close()


@pytest.mark.slow
def test_the_search_finds_a_page(browser: Any) -> None:
    page = browser("index.html")
    links = page.locator("a[href*='rank-rate-epochs']")
    before = links.count()
    page.keyboard.press("/")
    page.keyboard.type("rank", delay=30)
    links.nth(before).wait_for(state="attached", timeout=20_000)
    page.context.close()
