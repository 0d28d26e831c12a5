"""axe-core finds nothing serious on live page and report, in both schemes, wide and narrow.

Skipped without Chromium, playwright or axe-core (tests/support/axe.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import axe
import pytest

from surogate_core.report import html
from surogate_core.report.records import RunRecord
from surogate_core.report.serve import PageServer
from tests.report.test_page import CHROMIUM, FLAGS, make_run, with_experts, with_rollouts

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not axe.AXE.is_file(), reason=axe.MISSING),
]

VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (390, 768, 1440)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def violations(browser: Any, url: str, scheme: str, width: int) -> list[str]:
    """Each violation of any impact, with the elements."""
    # The page's policy would forbid the checker to run.
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, viewport={"width": width, "height": 900})
    tab = context.new_page()
    tab.goto(url)
    tab.wait_for_selector("body[data-drawn]")
    tab.evaluate("document.querySelectorAll('details').forEach(element => { element.open = true; })")
    found = axe.violations(tab)
    context.close()
    return found


def runs_of(name: str) -> list[RunRecord]:
    failed = RunRecord(directory=Path("r"), name="r")
    failed.add({"event": "run_end", "reason": "failed", "message": "no such data set"})
    return {
        "one": [with_experts(make_run(), 200)],
        "rewards": [with_rollouts(make_run(steps=2), 9)],
        "several": [make_run("a"), make_run("b", loss=9.0)],
        "failed": [failed],
    }[name]


@pytest.mark.parametrize("name", ["one", "rewards", "several", "failed"])
def test_nothing_is_found(browser: Any, tmp_path: Path, name: str) -> None:
    runs, report = runs_of(name), tmp_path / "report.html"
    report.write_text(html.render(runs))
    with closing(PageServer(lambda: runs)) as server:
        for scheme, width in VIEWS if name == "one" else VIEWS[::2]:
            for url in (report.as_uri(), server.url):
                assert violations(browser, url, scheme, width) == [], (scheme, width)
