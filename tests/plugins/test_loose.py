"""Modules that no distribution has: a lock of the whole environment names them, and no other is imported under it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import packaging.specifiers  # noqa: F401 - the small environment has no packaging
import pytest
from wheels import make_wheel, unpack

from surogate_core.cli.main import main
from surogate_core.config.schema import PluginPolicy
from surogate_core.errors import PluginError
from surogate_core.plugins import import_policy, load_plugins
from surogate_core.plugins.discovery import installed_plugins
from surogate_core.plugins.lock import installed_lock, write_lock
from surogate_core.plugins.loose import (
    ImportableFiles,
    LooseModuleError,
    allow_loose,
    loose_modules,
    owned_by,
    refuse_loose,
)
from surogate_core.plugins.static import static_view

FILES = {
    "loose_main/__init__.py": (
        "from surogate_core import bundles, hookimpl\nSUROGATE_API = '>=2,<3'\nimport loose_spread.part\n"
        "@hookimpl\ndef surogate_recipe():\n    return bundles.RecipeSpec(name='two', build=lambda *a: None)\n"
    ),
    "loose_spread/part/__init__.py": "",
    "loose_single.py": "",
}
STANDARD = [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('stdlib')}/lib-dynload"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small environment: ``site`` with one distribution, and ``early`` before it on the path."""
    for name in ("early", "site", "added"):
        (tmp_path / name).mkdir()
    unpack(make_wheel(tmp_path / "wheels", "plugin-two", FILES, points={"recipe-two": "loose_main"}), tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "early"), str(tmp_path / "site"), *STANDARD])
    static_view.cache_clear()
    write_lock(installed_lock(installed_plugins(), "environment"), tmp_path / "surogate.lock")
    yield tmp_path
    allow_loose()
    static_view.cache_clear()
    for name in [module for module in sys.modules if module.startswith("loose_")]:
        del sys.modules[name]


def load(place: Path) -> None:
    static_view.cache_clear()
    importlib.invalidate_caches()
    load_plugins(import_policy(PluginPolicy(policy="locked", lock=str(place / "surogate.lock")), {}))


def canary(place: Path) -> str:
    return f"from pathlib import Path\nPath({str(place / 'canary')!r}).touch()\n"


def added(file: str) -> Callable[[Path], None]:
    def add(place: Path) -> None:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(canary(place))

    return add


def archive(place: Path) -> None:
    with zipfile.ZipFile(place / "modules.zip", "w") as file:
        file.writestr("loose_archived.py", canary(place))
    sys.path.append(str(place / "modules.zip"))


def path_of_pth(place: Path) -> None:
    added("added/loose_added.py")(place)
    sys.path.append(str(place / "added"))  # as Python does for a line of a .pth file without an import


LOOSE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file earlier on the path": (added("early/loose_optional.py"), "loose_optional in"),
    "a file beside the installed ones": (added("site/loose_optional.py"), "loose_optional in"),
    "a package": (added("site/loose_package/__init__.py"), "loose_package in"),
    "a part of a namespace": (added("site/loose_spread/evil.py"), r"loose_spread\.evil in"),
    "a part of a namespace elsewhere": (added("early/loose_spread/evil/__init__.py"), r"loose_spread\.evil in"),
    "a namespace": (added("early/loose_new/below/evil.py"), r"loose_new\.below\.evil in"),
    "bytecode": (added("site/loose_compiled.pyc"), "loose_compiled in"),
    "an extension": (added("site/loose_extension.abi3.so"), "loose_extension in"),
    "a name of Python's own that this system lacks": (added("early/nt.py"), "nt in"),
    "an archive": (archive, r"modules\.zip in"),
    "a directory of a .pth file": (path_of_pth, "loose_added in"),
}


@pytest.mark.parametrize("name", LOOSE)
def test_a_loose_module_is_refused_and_does_not_run(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add, line = LOOSE[name]
    add(place)
    with pytest.raises(PluginError, match=rf"loose module {line} .*, SHA-256 .* is not locked"):
        load(place)
    assert main(["plugins", "verify", "--lock", str(place / "surogate.lock")]) == 1
    assert f"loose module {line.partition(' ')[0]}".replace("\\", "") in capsys.readouterr().out
    assert not (place / "canary").exists()
    assert "loose_main" not in sys.modules


def test_an_import_of_what_was_added_after_the_check_is_refused(place: Path) -> None:
    load(place)
    for file in ("early/loose_later.py", "site/loose_spread/later.py", "early/nt.py"):
        added(file)(place)
    archive(place)
    importlib.invalidate_caches()
    for name in ("loose_later", "loose_spread.later", "nt", "loose_archived"):
        with pytest.raises(LooseModuleError, match=f"module {name} .* is in no distribution of the plugin lock"):
            importlib.import_module(name)
    assert not (place / "canary").exists()
    assert importlib.import_module("loose_single").__name__ == "loose_single"
    assert importlib.import_module("colorsys").__name__ == "colorsys"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("loose_nowhere")


def test_a_loose_module_can_be_locked(place: Path) -> None:
    added("site/loose_own/__init__.py")(place)
    added("site/loose_own/below.py")(place)
    write_lock(installed_lock(installed_plugins(), "environment"), place / "surogate.lock")
    load(place)
    importlib.import_module("loose_own.below")
    assert (place / "canary").exists()
    (place / "site" / "loose_own" / "below.py").write_text("altered = True\n")
    with pytest.raises(PluginError, match=r"loose module loose_own in .* is not locked"):
        load(place)


def test_other_scopes_do_not_look(place: Path) -> None:
    write_lock(installed_lock(installed_plugins(), "plugins"), place / "surogate.lock")
    added("early/loose_optional.py")(place)
    load(place)
    importlib.import_module("loose_optional")


def test_what_is_beside_a_script_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("print('beside')\n")
    code = """
import os, sys
from surogate_core.plugins.loose import LooseModuleError, ImportableFiles, loose_modules, refuse_loose
own = ImportableFiles(files=frozenset(), directories=tuple(map(os.path.realpath, sys.path[1:])))
assert not any("beside" in text for text in loose_modules(own))
refuse_loose(own)
try:
    import beside
except LooseModuleError as error:
    print(error.name)
"""
    (tmp_path / "script.py").write_text(code.replace("print(error.name)", "raise"))
    (tmp_path / "command.py").write_text(code.replace("print(error.name)", "print('refused')"))
    for command, said in ((["script.py"], "beside\n"), (["-m", "command"], "refused\n"), (["-c", code], "beside\n")):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (0, said), (command, done.stderr)


def test_links_lead_to_the_same_files(place: Path) -> None:
    (place / "link").symlink_to(place / "site")
    owned = owned_by({"plugin-two": FILES})
    assert owned.has(str(place / "link" / "loose_single.py"))
    assert not owned.has(str(place / "early" / "loose_single.py"))
    sys.path.append(str(place / "link"))
    assert loose_modules(owned) == {}


def test_the_gate_is_there_once() -> None:
    before = list(sys.meta_path)
    none = ImportableFiles(files=frozenset(), directories=("/",))
    refuse_loose(none)
    refuse_loose(none)
    assert len(sys.meta_path) == len(before) + 1
    allow_loose()
    assert sys.meta_path == before
