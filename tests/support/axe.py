"""axe-core in a browser: the rules of accessibility that a page breaks.

axe-core is a package of npm and is not kept here: `npm install axe-core` at the root of the repository, or in the
directory that `AXE_CORE` names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def script() -> Path | None:
    """axe.min.js, if it is installed."""
    places = [Path(os.environ["AXE_CORE"])] if "AXE_CORE" in os.environ else [ROOT]
    found = [p / "node_modules/axe-core/axe.min.js" for p in places]
    return next((p for p in found if p.is_file()), None)


def broken(page: Any, axe: Path) -> list[str]:
    """Each rule that the page of Playwright breaks, with its impact and the first element."""
    page.evaluate(axe.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document)")["violations"]
    return [f"{v['impact']} {v['id']}: {v['nodes'][0]['html'][:160]} ({len(v['nodes'])})" for v in found]
