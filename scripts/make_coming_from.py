"""Write the key tables of docs/coming-from-*.md from surogate_core/config/peers.yaml. With --check nothing is written.

A table stands below the line ``<!-- keys: PEER -->`` and ends at the next empty line; ``<!-- same: PEER -->`` is above
the keys that mean the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core.config import peers  # noqa: E402

PAGES = sorted((ROOT / "docs").glob("coming-from-*.md"))
_PLACE = re.compile(r"(<!-- (keys|same): (\w+) -->\n)(?:[^\n]+\n)*")


def table(peer: str) -> str:
    """The keys of one trainer, what to write here, and which to remove."""
    rows = sorted(key for key, row in peers.table()["keys"].items() if peer in row.get("peers", []))
    lines = [f"| key of {peers.PEERS[peer]} | here |", "| --- | --- |"]
    lines += [f"| `{key}` | {_here(peers.table()['keys'][key])} |" for key in rows]
    return "\n".join(lines) + "\n"


def same(peer: str) -> str:
    """The keys that mean the same, in one paragraph."""
    return ", ".join(f"`{key}`" for key in sorted(peers.table()["same"][peer])) + "\n"


def _here(row: dict[str, Any]) -> str:
    if "drop" in row:
        return f"remove it: {row['drop']}"
    if "to" in row:
        names = row.get("values", {})
        renamed = "; ".join(f"{theirs} → {ours}" for theirs, ours in names.items() if theirs != ours)
        return f"`{row['to']}`" + (f" ({renamed})" if renamed else "")
    return "; ".join(f"{word or 'otherwise'}: {_settings(found)}" for word, found in row["set"].items())


def _settings(found: dict[str, Any] | str) -> str:
    if isinstance(found, str):
        return f"remove it, {found}"
    return ", ".join(f"`{key}: {'its value' if value == '$' else peers.shown(value)}`" for key, value in found.items())


def make(text: str) -> str:
    """The page with its tables made anew."""
    kinds = {"keys": table, "same": same}
    return _PLACE.sub(lambda found: found[1] + kinds[found[2]](found[3]), text)


def main() -> int:
    """Write the pages; the exit code."""
    stale = [page for page in PAGES if make(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    if "--check" not in sys.argv:
        for page in stale:
            page.write_text(make(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(*(f"{'stale' if '--check' in sys.argv else 'wrote'} {page.name}" for page in stale), sep="\n")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
