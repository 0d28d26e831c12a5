"""axe-core in a browser: the rules of accessibility that a page breaks.

axe-core is a package of npm and is not kept here: `npm install axe-core` at the root of the repository, or elsewhere,
with the path of `axe.min.js` in the variable AXE_CORE.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

AXE = Path(os.environ.get("AXE_CORE", Path(__file__).resolve().parents[2] / "node_modules/axe-core/axe.min.js"))
MISSING = "needs axe-core: npm install axe-core, or AXE_CORE=…/node_modules/axe-core/axe.min.js"


def violations(page: Any) -> list[str]:
    """Each rule of any impact that the page of Playwright breaks, with the element."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 10
    return [f"{v['impact']} {v['id']}: {n['html'][:120]}" for v in found["violations"] for n in v["nodes"]]
