"""Write docs/plugins.md from the plugins' metadata. With --check nothing is written: exit 1 if it is not current."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from packaging.specifiers import SpecifierSet  # noqa: E402

from surogate_core import API_VERSION  # noqa: E402
from surogate_core.plugins.contract import UNSTATED  # noqa: E402
from surogate_core.plugins.static import view_files  # noqa: E402

FILE = ROOT / "docs" / "plugins.md"

INTRODUCTION = """\
# Plugins

<!-- Made by scripts/make_plugins_page.py from the metadata of plugins/; change those. -->

| command | does |
| --- | --- |
| `surogate plugins list` | what is installed, what it offers, and why it would not be loaded |
| `surogate plugins show NAME` | one plugin in full |
| `surogate plugins new NAME --kind KIND` | write a package that installs, with tests, README and CI file |
| `surogate plugins lock` | write the installed set, to the byte, to `surogate.lock` |
| `surogate plugins verify` | compare the installed set with it; exit code 0, 1 (not equal) or 2 (no sound lock) |

None of them imports a plugin. [config.md](config.md#which-plugins-may-be-imported) has the policies,
[security.md](security.md) what they protect from.

## The hook API

The contract of [hooks.md](hooks.md) has a version, `surogate_core.API_VERSION`, which is raised when a hook changes so
that a plugin written before would break. A plugin says which versions it was written for in the module that its entry
point names, as a literal that is a version specifier:

```python
SUROGATE_API = ">=1,<2"
```

It is read from the source. A plugin that does not fit is set aside before it is imported; `surogate plugins list`, or a
run that asks for what it offers, says why. A plugin that states nothing counts as written for `{unstated}`.
"""


def make() -> str:
    """The page's text."""
    lines = [INTRODUCTION.format(unstated=UNSTATED), "## Compatibility", ""]
    versions = range(1, API_VERSION + 1)
    heads = ["plugin", "version", "surogate", *(f"API {v}" for v in versions), "offers"]
    lines += [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for pyproject in sorted(ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        core = next(r for r in project["dependencies"] if r.startswith("surogate>="))
        for module in project["entry-points"]["surogate"].values():
            package = pyproject.parent / "src" / module.partition(":")[0].partition(".")[0]
            view = view_files(package / "__init__.py", package)
            stated = SpecifierSet(view.api or UNSTATED)
            offers = ", ".join(f"{kind} `{name}`" for kind, name in view.bundles) or "options only"
            fits = ["yes" if stated.contains(str(v)) else "no" for v in versions]
            name = f"[`{project['name']}`](../plugins/{project['name']}/README.md)"
            row = [name, project["version"], f"`{core.removeprefix('surogate')}`", *fits, offers]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or check it."""
    text = make()
    if "--check" in sys.argv[1:]:
        current = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        if not current:
            print(f"{FILE.relative_to(ROOT)} is not current; run: python scripts/make_plugins_page.py", file=sys.stderr)
        return 0 if current else 1
    FILE.write_text(text, encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
