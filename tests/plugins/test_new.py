"""`surogate plugins new`: what it writes installs, is discovered, and passes ruff, mypy and its own tests."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from environments import Environment

from surogate_core import API_VERSION
from surogate_core.cli.main import main
from surogate_core.plugins.new import KINDS, TEMPLATES


def make(kind: str, name: str, tmp_path: Path) -> tuple[Path, Environment]:
    assert main(["plugins", "new", name, "--kind", kind, "--output", str(tmp_path)]) == 0
    package = tmp_path / f"surogate-{kind.replace('_', '-')}-{name}"
    environment = Environment(tmp_path)
    install = ["install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", str(package)]
    environment.run("pip", *install, cwd=tmp_path)
    return package, environment


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_installs_is_discovered_and_passes_its_tests(kind: str, tmp_path: Path) -> None:
    package, environment = make(kind, "first-try", tmp_path)
    shown = environment.run(
        "surogate_core.cli.main", "plugins", "show", f"{kind.replace('_', '-')}-first-try", "--json", cwd=tmp_path
    )
    facts = json.loads(shown)
    assert facts["state"] == "ok"
    offered = KINDS[kind].offered(kind)
    assert facts["offers"] == [f"{one} first-try" for one in offered]
    assert facts["options"] == ([f"{offered[-1]}=first-try"] if KINDS[kind].has_option else [])
    assert facts["api"] == f">={API_VERSION},<{API_VERSION + 1}"
    environment.run("ruff", "check", "--no-cache", ".", cwd=package)
    environment.run("ruff", "format", "--no-cache", "--check", ".", cwd=package)
    environment.run("pytest", "-q", cwd=package)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_strict_types(kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    package, environment = make(kind, "options", tmp_path)
    # Reading torch and the core takes mypy most of its time, so all kinds share what it learns.
    cache = tmp_path_factory.getbasetemp() / "mypy"
    environment.run("mypy", "--cache-dir", str(cache), cwd=package)


def test_every_placeholder_is_filled_and_every_template_used(tmp_path: Path, capsys: Any) -> None:
    for kind in KINDS:
        assert main(["plugins", "new", "two-words", "--kind", kind, "--output", str(tmp_path)]) == 0
        directory = tmp_path / f"surogate-{kind.replace('_', '-')}-two-words"
        assert f"pip install -e '{directory}[dev]'" in capsys.readouterr().out
        texts = {f.relative_to(directory).as_posix(): f.read_text() for f in directory.rglob("*") if f.is_file()}
        left = [
            path
            for path, text in texts.items()
            for key in ("NAME", "KIND", "MODULE", "CLASS", "FLAT")
            if f"@{key}@" in text
        ]
        assert not left
        assert {"README.md", ".github/workflows/ci.yml", "tests/test_two_words.py"} <= texts.keys()
    assert {p.name for p in TEMPLATES.iterdir()} == {"common", *KINDS}


@pytest.mark.parametrize("name", ["Lion", "2fast", "a_b", "a--b", "", "a/b", "ä", "a-"])
def test_a_name_that_cannot_be_one_is_refused(name: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["plugins", "new", name, "--kind", "optimizer", "--output", str(tmp_path)]) == 2
    assert "cannot be the name of a plugin. Fix: lower-case letters" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path, capsys: Any) -> None:
    command = ["plugins", "new", "mine", "--kind", "recipe", "--output", str(tmp_path)]
    assert main(command) == 0
    file = tmp_path / "surogate-recipe-mine" / "README.md"
    file.write_text("mine")
    assert main(command) == 2
    assert "exists. Fix: another name, or --output DIR" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_name_that_an_installed_plugin_offers_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["plugins", "new", "adamw", "--kind", "optimizer", "--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "offers optimizer adamw already, and a duplicate name stops every run. Fix: choose another name" in said
    assert not any(tmp_path.iterdir())
    assert main(["plugins", "new", "adamw", "--kind", "dataset", "--output", str(tmp_path)]) == 0


def test_a_new_package_wants_the_core_that_it_was_made_with(tmp_path: Path, capsys: Any) -> None:
    assert main(["plugins", "new", "other", "--kind", "recipe", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "surogate-recipe-other/pyproject.toml").read_text()
    assert 'dependencies = ["surogate-core>=0.1,<0.2"]' in text


def test_ranks_of_the_fabric_template_may_close_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    """The last rank removes the directory while another looks into it."""
    assert main(["plugins", "new", "closing", "--kind", "fabric", "--output", str(tmp_path)]) == 0
    monkeypatch.syspath_prepend(tmp_path / "surogate-fabric-closing" / "src")
    links = importlib.import_module("surogate_fabric_closing.links")
    fabric = links.ClosingFabric(links.ClosingOptions(), SimpleNamespace(rank=0, world=2))
    fabric._place = tmp_path / "shared"
    fabric._place.mkdir()

    def gone(path: Path, pattern: str) -> Any:
        raise FileNotFoundError(path)  # `glob` sees that it is there, and it is not when it is read

    monkeypatch.setattr(Path, "glob", gone)
    fabric.close()
