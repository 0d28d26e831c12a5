"""Hooks of mkdocs. Pages of the repository outside docs/ join the site, and links to them lead to their pages there.

`../plugins/surogate-quant-nf4/README.md` is a file on a forge, and the page `plugins/surogate-quant-nf4.html` here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security-policy.md",
    "native/README.md": "project/native.md",
    "benchmarks/NOTEBOOK.md": "evidence/notebook.md",
}
"""A file of the repository → the page of the site that it becomes."""

FILES = ("LICENSE", "CITATION.cff", "install.sh", "examples/*", "docker/*", ".devcontainer/*")
"""Files that pages link to, as they are."""

_LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def outside() -> dict[str, str]:
    """Every file outside docs/ that the site shows or offers, and its place there."""
    readmes = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("plugins/*/README.md"))
    plugins = {readme: f"plugins/{readme.split('/')[1]}.md" for readme in readmes}
    found = sorted(path for pattern in FILES for path in ROOT.glob(pattern) if path.is_file())
    files = [path.relative_to(ROOT).as_posix() for path in found]
    return PAGES | plugins | {file: file.removeprefix(".") for file in files}


def on_config(config: Any) -> Any:
    """The plugins' own pages follow the page about plugins."""
    pages = [page for page in outside().values() if page.startswith("plugins/")]
    (reference,) = (entry["Reference"] for entry in config.nav if "Reference" in entry)
    (plugins,) = (entry["Plugins"] for entry in reference if isinstance(entry, dict))
    plugins += pages
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the files of `outside`."""
    for source, place in outside().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def relinked(markdown: str, source: str, places: dict[str, str]) -> str:
    """The text with its links changed. ``source``: the page's path in the repository; ``places``: repository → site."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match[2], match[3] or ""
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = places.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if target == "README.md":
            place, anchor = "index.md", ""
        if place is None:
            return match[0]
        here = posixpath.dirname(places.get(source) or source.removeprefix("docs/"))
        return f"{match[1]}{posixpath.relpath(place, here or '.')}{anchor}{match[4]}"

    parts = _CODE.split(markdown)
    return "".join(part if part.startswith("`") else _LINK.sub(link, part) for part in parts)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Each page before it becomes HTML."""
    places = outside()
    sources = {place: source for source, place in places.items()}
    uri = page.file.src_uri
    return relinked(markdown, sources.get(uri, f"docs/{uri}"), places)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """The theme's search dialog gets the name that screen readers say."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
