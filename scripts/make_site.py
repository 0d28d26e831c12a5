"""Build the documentation as a site, with zensical. Exit 1 if a link leads nowhere or a page is not in the navigation.

Pages of the repository outside docs/ join the site, and links to them lead to their pages there:
`../plugins/surogate-quant-nf4/README.md` is a file on a forge, and the page `plugins/surogate-quant-nf4.html` here.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security-policy.md",
    "native/README.md": "project/native.md",
}
"""A file of the repository → the page of the site that it becomes."""

UNLISTED = ("benchmarks/NOTEBOOK.md", "benchmarks/evidence/*")
"""Pages that others link to and the navigation leaves out."""

FILES = ("LICENSE", "CITATION.cff", "install.sh", "examples/*", "docker/*", ".devcontainer/*")
"""Files that pages link to, as they are."""

_LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_PLUGINS = "          - plugins.md\n"


def outside() -> dict[str, str]:
    """Every file outside docs/ that the site shows or offers, and its place there."""
    readmes = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("plugins/*/README.md"))
    plugins = {readme: f"plugins/{readme.split('/')[1]}.md" for readme in readmes}
    guides = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("plugins/*/docs/*.md"))
    plugins |= {guide: guide.replace("/docs/", "/") for guide in guides}
    files = sorted(path for pattern in FILES + UNLISTED for path in ROOT.glob(pattern) if path.is_file())
    names = [path.relative_to(ROOT).as_posix() for path in files]
    return PAGES | plugins | {name: name.removeprefix(".") for name in names}


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


def stage(place: Path) -> None:
    """Write into `place` what zensical reads: mkdocs.yml with the plugins' pages, and every page, relinked."""
    places = outside()
    shutil.copytree(ROOT / "docs", place / "docs")
    for source, target in places.items():
        (place / "docs" / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, place / "docs" / target)
    sources = {target: source for source, target in places.items()}
    for page in (place / "docs").rglob("*.md"):
        name = page.relative_to(place / "docs").as_posix()
        text = page.read_text(encoding="utf-8")
        page.write_text(relinked(text, sources.get(name, f"docs/{name}"), places), encoding="utf-8")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    plugins = "".join(f"          - {page}\n" for page in places.values() if page.startswith("plugins/"))
    assert _PLUGINS in config
    (place / "mkdocs.yml").write_text(config.replace(_PLUGINS, _PLUGINS + plugins), encoding="utf-8")


def not_in_navigation(place: Path) -> list[str]:
    """The staged pages that mkdocs.yml should list and does not."""
    listed = set(re.findall(r"- (?:\w+: )?([\w/.-]+\.md)$", (place / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {p.relative_to(place / "docs").as_posix() for p in (place / "docs").rglob("*.md")}
    return sorted(page for page in pages - listed if not page.startswith("benchmarks/"))


def build(output: Path) -> str:
    """Build the site into `output`; returns what is wrong, or nothing."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        stage(place)
        missing = not_in_navigation(place)
        if missing:
            return f"mkdocs.yml does not list {', '.join(missing)}"
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=place, text=True, capture_output=True, check=False)
        if done.returncode:
            return done.stdout + done.stderr
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(place / "site", output)
        return ""


def main(words: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="directory; replaced")
    wrong = build(parser.parse_args(words).output)
    print(wrong, file=sys.stderr, end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
