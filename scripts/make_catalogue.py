"""Write surogate_core/plugins/catalogue.json from plugins/*/: which distribution offers what.

Nothing is imported from the plugins. With --check nothing is written: exit 1 if the file is not current.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core.plugins.catalogue import FILE  # noqa: E402
from surogate_core.plugins.static import view_files  # noqa: E402


def make() -> str:
    """The catalogue's text; a flat key of several distributions is of the first."""
    options: dict[str, str] = {}
    bundles: dict[str, str] = {}
    keys: dict[str, str] = {}
    for pyproject in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        data = tomllib.loads(pyproject.read_text(encoding="utf-8"))
        distribution = data["project"]["name"]
        for module in data["project"].get("entry-points", {}).get("surogate", {}).values():
            package = pyproject.parent / "src" / module.partition(":")[0].partition(".")[0]
            view = view_files(package / "__init__.py", package)
            options.update({f"{group}/{name}": distribution for group, name in view.options})
            bundles.update({f"{kind}/{name}": distribution for kind, name in view.bundles})
            keys = {**dict.fromkeys(view.flat_keys, distribution), **keys}
    tables = {"options": options, "bundles": bundles, "keys": keys}
    return json.dumps({name: dict(sorted(table.items())) for name, table in tables.items()}, indent=2) + "\n"


def main() -> int:
    """Write the file, or check it."""
    text = make()
    if "--check" in sys.argv[1:]:
        current = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        if not current:
            print(f"{FILE.relative_to(ROOT)} is not current; run: python scripts/make_catalogue.py", file=sys.stderr)
        return 0 if current else 1
    FILE.write_text(text, encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
