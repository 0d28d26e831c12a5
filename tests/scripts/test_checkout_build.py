"""``pip install .`` finds the core and the plugins in the checkout."""

from __future__ import annotations

import re
import zipfile
from email.parser import Parser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.0"
"""


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    spec = spec_from_file_location("checkout_build", ROOT / "scripts" / "checkout_build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A front door with one plugin."""
    front = 'dependencies = ["plug-in[gpu]>=1", "torch"]\n[project.optional-dependencies]\nall = ["plug-in>=1"]\n'
    front += '[tool.uv.workspace]\nmembers = ["plugins/*"]\n'
    for name, directory, rest in (("front", "", front), ("plug-in", "plugins/plug-in", "")):
        place = tmp_path / "checkout" / directory
        (place / name.replace("-", "_")).mkdir(parents=True)
        (place / name.replace("-", "_") / "__init__.py").write_text("")
        (place / "pyproject.toml").write_text(HEAD.format(name=name) + rest)
    return tmp_path / "checkout"


def required(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist")


def test_a_wheel_of_a_checkout_requires_wheels_of_its_plugins(
    backend: ModuleType, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    found = required(tmp_path / backend.build_wheel(str(tmp_path)))
    (wheel,) = (checkout / "build" / "wheels").glob("*.whl")
    assert re.fullmatch(r"plug_in-1\.0\+g[0-9a-f]{8}-[\w.]+-none-any\.whl", wheel.name)
    assert [text.replace(" @ ", "@ ") for text in found] == [
        f"plug-in[gpu]@ {wheel.as_uri()}",
        "torch",
        f"plug-in@ {wheel.as_uri()} ; extra == 'all'",
    ]
    backend.build_wheel(str(tmp_path))
    assert list((checkout / "build" / "wheels").glob("*.whl")) == [wheel], "equal contents have equal versions"
    (checkout / "plugins/plug-in/plug_in/__init__.py").write_text("changed = True")
    backend.build_wheel(str(tmp_path))
    assert len(list((checkout / "build" / "wheels").glob("*.whl"))) == 2


def test_an_sdist_of_a_checkout_requires_names(
    backend: ModuleType, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    backend.build_sdist(str(tmp_path))
    assert not (checkout / "build").exists()


def test_every_sibling_of_the_front_door_is_found(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_labelled", lambda project, place: place / project.name)
    monkeypatch.setattr(backend, "_place", lambda root: Path("/wheels"))
    project = backend.with_files(ROOT)["project"]
    assert [r for r in project["dependencies"] if " @ file:///wheels/" not in r] == []
    assert "surogate-core @ file:///wheels/core" in project["dependencies"]
    assert "surogate-core[cuda13] @ file:///wheels/core" in project["optional-dependencies"]["cuda13"]
