"""Plugins, templates and examples import the public surface alone; parts of the core import the services too."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import blocks

from surogate_core import __version__
from surogate_core.lazy import offered_names

ROOT = Path(__file__).parents[2]
PUBLIC = "surogate_core.plugin"
SERVICES = sorted((ROOT / "surogate_core" / "service").glob("[!_]*.py"))
LIBRARIES = ("surogate-commands", "surogate-reinforcement", "surogate-testing")
DISTRIBUTIONS = sorted(file.parent for file in (ROOT / "plugins").glob("*/pyproject.toml"))
PARTS = [d for d in DISTRIBUTIONS if d.name.startswith("surogate-command-") or d.name in LIBRARIES]
"""Distributions that are parts of the core and require its version."""
INSIDE = {"architecture.md"}
"""Pages about the inside of the core."""


def imported(text: str) -> Iterator[tuple[int, str]]:
    """(line, module) of what a source imports of the core."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "surogate_core":
            yield node.lineno, str(node.module)
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("surogate_core."))


def wrong(file: Path, text: str, *, first: int = 0, services: bool = False) -> list[str]:
    """``file:line imports module`` for what may not be imported."""
    allowed = {PUBLIC, *(f"surogate_core.service.{f.stem}" for f in SERVICES if services)}
    place = file.relative_to(ROOT)
    return [f"{place}:{first + line} imports {module}" for line, module in imported(text) if module not in allowed]


def test_a_plugin_imports_the_public_surface_alone():
    found = []
    for directory in DISTRIBUTIONS:
        for file in sorted(directory.rglob("*.py")):
            inside = file.relative_to(directory).parts
            if inside[0] in {"src", "tests"}:
                # Tests of our own plugins run beside the core of the same commit.
                services = directory in PARTS or inside[0] == "tests"
                found += wrong(file, file.read_text(encoding="utf-8"), services=services)
    assert not found, "\n".join(found)


def test_a_template_imports_the_public_surface_alone():
    found = []
    for file in sorted((ROOT / "surogate_core" / "plugins" / "templates").rglob("*.py.txt")):
        text = file.read_text(encoding="utf-8")
        for mark in ("NAME", "CLASS", "MODULE", "API"):
            text = text.replace(f"@{mark}@", mark)
        found += wrong(file, text)
    assert not found, "\n".join(found)


def test_an_example_imports_the_public_surface_alone():
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*.md"), *ROOT.glob("plugins/*/docs/*.md")]
    found = []
    for page in sorted([*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]):
        for block in blocks(page) if page.name not in INSIDE else ():
            if block.language == "python" and "surogate_core" in block.text:
                found += wrong(page, block.text, first=block.line)
    assert not found, "\n".join(found)


def test_a_wrong_import_is_named_with_file_and_line():
    text = "from surogate_core.plugin import dsl\n\nfrom surogate_core.dsl import Block\nimport surogate_core.batch\n"
    file = ROOT / "plugins" / "acme.py"
    lines = ["plugins/acme.py:3 imports surogate_core.dsl", "plugins/acme.py:4 imports surogate_core.batch"]
    assert wrong(file, text) == lines
    service = "from surogate_core.service.app import Arguments\n"
    assert wrong(file, service, first=9) == ["plugins/acme.py:10 imports surogate_core.service.app"]
    assert not wrong(file, service, services=True)


@pytest.mark.parametrize("service", SERVICES, ids=lambda file: file.stem)
def test_a_service_serves_what_is_used(service):
    served = set(offered_names(service.read_text(encoding="utf-8")))
    module = f"surogate_core.service.{service.stem}"
    used = {
        alias.name
        for file in (ROOT / "plugins").glob("*/*/**/*.py")
        if module in (text := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }
    assert served == used
    assert len(SERVICES) <= 12


def test_parts_of_the_core_require_its_version():
    for directory in PARTS:
        project = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["version"] == __version__
        (core,) = (r for r in project["dependencies"] if r.partition("=")[0].partition("[")[0] == "surogate-core")
        assert core.endswith(f"=={__version__}"), f"{directory.name} requires {core}"
