"""A plugin's directory can be moved: elsewhere it builds, and its tests pass beside the core, the kit, and the plugins
that its dependency group `test` names.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from environments import Environment
from wheels import unpack

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "plugins" / "surogate-testing"
PLUGINS = sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))
LEFT = shutil.ignore_patterns("__pycache__", "build", "dist", ".*")


def built(project: Path, out: Path) -> tuple[Path, Path]:
    """(wheel, sdist) of a project, by the build tool of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="session")
def shared_wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels of the core, of the conformance kit, and of what several plugins share."""
    out = tmp_path_factory.mktemp("wheels")
    libraries = [ROOT / "plugins" / name for name in ("surogate-commands", "surogate-reinforcement")]
    projects = (ROOT / "core", ROOT / "native", *libraries, KIT)
    return [built(project, out / str(number))[0] for number, project in enumerate(projects)]


def sources(names: Iterable[str]) -> set[str]:
    """The names of files in CUDA C++."""
    return {PurePosixPath(name).name for name in names if PurePosixPath(name).suffix in (".cu", ".cuh")}


@pytest.fixture(scope="session")
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a plugin of this repository → its wheel."""
    return cache(lambda name: built(ROOT / "plugins" / name, tmp_path_factory.mktemp(name))[0])


def beside_in_tests(plugin: Path) -> list[str]:
    """The plugins of this repository in its dependency group `test`."""
    groups = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8")).get("dependency-groups", {})
    names = [re.split(r"[\[>]", requirement)[0] for requirement in groups.get("test", [])]
    return [name for name in names if ROOT / "plugins" / name in PLUGINS]


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_moved_plugin_builds_and_passes_its_tests(
    plugin: Path, tmp_path: Path, shared_wheels: list[Path], wheel_of: Callable[[str], Path]
) -> None:
    moved = Path(shutil.copytree(plugin, tmp_path / "elsewhere" / plugin.name, ignore=LEFT))
    wheel, sdist = built(moved, tmp_path / "out")
    own = sources(str(path) for path in moved.rglob("*"))
    with zipfile.ZipFile(wheel) as archive:
        assert sources(archive.namelist()) == own
    with tarfile.open(sdist) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    assert sources(names) == own
    assert {"pyproject.toml", "README.md"} | {f"tests/{f.name}" for f in (plugin / "tests").glob("*.py")} <= names

    environment = Environment(tmp_path, without="*surogate*")
    beside = beside_in_tests(plugin)
    for one in (*shared_wheels, wheel, *map(wheel_of, beside)):
        unpack(one, environment.site)
    # The tests find the installed package, not the sources beside them.
    shutil.rmtree(moved / "src")
    said = environment.run("pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests", cwd=moved)
    assert " passed" in said.splitlines()[-1] or " skipped" in said.splitlines()[-1]
    # A later check of this directory finds no other distribution of ours.
    listed = environment.run("surogate_core", "plugins", "list", cwd=tmp_path)
    others = {path.name for path in PLUGINS} - {plugin.name, *beside}
    assert not [name for name in others if name in listed.split()]
