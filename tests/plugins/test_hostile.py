"""Packages that mean harm, or are broken: each is refused or contained as docs/security.md says.

Every one leaves a line in a file when any of its code runs. Under a lock that file is never made.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from wheels import make_wheel, unpack

from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import PluginPolicy
from surogate_core.errors import PluginError, SurogateError
from surogate_core.plugins import Registry, import_policy, load_plugins
from surogate_core.plugins.discovery import installed_plugins
from surogate_core.plugins.lock import installed_lock, write_lock
from surogate_core.plugins.static import static_view

TRACE = "from pathlib import Path\nPath(SENTINEL).open('a').write(__name__ + '\\n')\n"
HEAD = "from surogate_core import bundles, hookimpl\nSUROGATE_API = '>=2,<3'\n"
RECIPE = "@hookimpl\ndef surogate_recipe():\n    return bundles.RecipeSpec(name='NAME', build=lambda *a: None)\n"
CONFIG = "@hookimpl\ndef surogate_config_path():\n    return 'pkg://' + __name__ + '.conf'\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Directories of packages, of which `early` comes first on `sys.path`."""

    directory: Path

    @property
    def site(self) -> Path:
        return self.directory / "site"

    @property
    def early(self) -> Path:
        return self.directory / "early"

    @property
    def sentinel(self) -> Path:
        return self.directory / "ran"

    def install(
        self,
        name: str,
        body: str = RECIPE,
        *,
        conf: Mapping[str, str] | None = None,
        distribution: str = "",
        point: str = "",
        module: str = "",
        place: Path | None = None,
        head: str = HEAD,
        beside: str = "",
        **metadata: Any,
    ) -> None:
        """Distribution ``plugin-<name>``, entry point ``recipe-<name>``, module ``plugin_<name>``."""
        module = module or f"plugin_{name}"
        code = TRACE.replace("SENTINEL", repr(str(self.sentinel))) + head + body.replace("NAME", name)
        files = {f"{module}/__init__.py": code + (CONFIG if conf else "")}
        for path, text in (conf or {}).items():
            files |= {f"{module}/conf/__init__.py": "", f"{module}/conf/{path.partition('/')[0]}/__init__.py": ""}
            files[f"{module}/conf/{path}"] = text
        if beside:
            files[f"{beside}.py"] = code
        points = {point or f"recipe-{name}": module}
        wheel = make_wheel(
            self.directory / "wheels", distribution or f"plugin-{name}", files, points=points, **metadata
        )
        unpack(wheel, place or self.site)

    def victim(self, version: str = "1.0") -> None:
        """The plugin that the others are after; its extra is not pinned."""
        self.install(
            "victim",
            conf={"recipe/victim.yaml": "name: victim\n"},
            beside="plugin_victim_helper",
            version=version,
            extras=["fast"],
            requires=["plugin-fast; extra == 'fast'"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hostile package."""

    arrive: Callable[[World], None]
    """The change after the lock was written."""
    freely: str
    """The message about it without a policy; empty if it cannot be detected."""
    locked: str
    """The message of the lock about it."""
    use: tuple[str, ...] = ()
    """Overrides that ask for what it offers."""


def alter(world: World) -> None:
    (world.site / "plugin_victim" / "__init__.py").open("a").write("\n# altered\n")


def upgrade(world: World) -> None:
    shutil.rmtree(world.site / "plugin_victim-1.0.dist-info")
    world.victim(version="2.0")


def forget_record(world: World) -> None:
    for record in world.site.glob("plugin_victim-*.dist-info/RECORD"):
        record.unlink()


def stand_before(world: World) -> None:
    shutil.copytree(world.site / "plugin_victim", world.early / "plugin_victim", dirs_exist_ok=True)


def arrives(name: str, body: str = RECIPE, **settings: Any) -> Callable[[World], None]:
    return lambda world: world.install(name, body, **settings)


def added(name: str) -> str:
    return rf"plugin-{name} 1\.0 \(plugin recipe-{name}\) is installed but not locked"


CASES: Mapping[str, Case] = {
    "acts when it is imported": Case(
        arrive=arrives("eager", "import os\nos.environ['PLUGIN_EAGER'] = '1'\n"), freely="", locked=added("eager")
    ),
    "shadows a name": Case(
        arrive=arrives("shadow", RECIPE.replace("NAME", "victim")),
        freely="recipe 'victim' is offered twice: by plugin recipe-shadow .* and by plugin recipe-victim ",
        locked=added("shadow"),
    ),
    "shadows a config option": Case(
        arrive=arrives("option", conf={"recipe/victim.yaml": "name: option\n"}),
        freely="config option recipe=victim is offered twice: by plugin recipe-option .* and by plugin recipe-victim ",
        locked=added("option"),
    ),
    "a file altered after the lock": Case(
        arrive=alter, freely="", locked=r"plugin-victim 1\.0: plugin_victim/__init__\.py was altered"
    ),
    "another version": Case(arrive=upgrade, freely="", locked=r"plugin-victim is 2\.0, the lock has 1\.0"),
    "no RECORD": Case(
        arrive=forget_record,
        freely="",
        locked=r"plugin_victim-1\.0\.dist-info/RECORD is missing, plugin_victim_helper\.py is gone",
    ),
    "the same entry point": Case(
        arrive=arrives("double", point="recipe-victim"),
        freely="entry point 'recipe-victim' is offered twice: by plugin recipe-victim .*plugin-double.*plugin-victim",
        locked=r"plugin-double 1\.0 \(plugin recipe-victim\) is installed but not locked",
    ),
    "the same entry point in other letters": Case(
        arrive=arrives("letters", point="Recipe_Victim"),
        freely="entry point 'recipe-victim' is offered twice: by plugin Recipe_Victim ",
        locked=r"plugin-letters 1\.0 \(plugin Recipe_Victim\) is installed but not locked",
    ),
    "the same distribution in other letters": Case(
        arrive=lambda w: w.install("victim", "pass\n", distribution="Plugin.Victim", place=w.early),
        freely="",
        locked=r"plugin-victim 1\.0: Plugin\.Victim-1\.0\.dist-info/METADATA was added",
    ),
    "the same package earlier on the path": Case(
        arrive=stand_before, freely="", locked="plugin-victim is not imported from its installed files"
    ),
    "the module of another": Case(
        arrive=lambda w: unpack(make_wheel(w.directory, "plugin-borrow", {}, points={"a": "plugin_victim"}), w.site),
        freely="module 'plugin_victim' is offered twice: by plugin a .* and by plugin recipe-victim ",
        locked=r"plugin-borrow 1\.0 \(plugin a\) is installed but not locked",
    ),
    "a misspelt hook": Case(
        arrive=arrives("misspelt", RECIPE.replace("surogate_recipe", "surogate_recipy")),
        freely="plugin recipe-misspelt .* failed when its hooks were checked: .*surogate_recipy",
        locked=added("misspelt"),
    ),
    "a hook with another signature": Case(
        arrive=arrives("signature", RECIPE.replace("surogate_recipe()", "surogate_recipe(config)")),
        freely="plugin recipe-signature .* failed when its hooks were registered: .*config",
        locked=added("signature"),
    ),
    "a hook that raises": Case(
        arrive=arrives("raising", RECIPE.replace("return", "raise RuntimeError('no')\n    return")),
        freely="plugin recipe-raising .* failed in its hook surogate_recipe: RuntimeError: no",
        locked=added("raising"),
    ),
    "leaves the process": Case(
        arrive=arrives("leaving", "raise SystemExit(0)\n"),
        freely="plugin recipe-leaving .* failed when it was imported: SystemExit: 0",
        locked=added("leaving"),
    ),
    "an extra that nobody pinned": Case(arrive=arrives("fast"), freely="", locked=added("fast")),
    "an object to call in its option": Case(
        arrive=arrives("calling", conf={"recipe/calling.yaml": "name: calling\nhelp: {_target_: os.getcwd}\n"}),
        freely=r"recipe\.help\._target_ .*a config cannot name Python objects to call",
        locked=added("calling"),
        use=("recipe=calling",),
    ),
    "written for another hook API": Case(
        arrive=arrives("future", head="SUROGATE_API = '>=7'\n", body="1 / 0\n"),
        freely=">=7, and this surogate has version 2",
        locked=added("future"),
    ),
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The victim, installed and locked; what is there besides is locked with it."""
    made = World(directory=tmp_path)
    for place in (made.site, made.early):
        place.mkdir()
        monkeypatch.syspath_prepend(place)
    made.victim()
    static_view.cache_clear()
    write_lock(installed_lock(installed_plugins()), tmp_path / "surogate.lock")
    modules, environ = set(sys.modules), dict(os.environ)
    yield made
    static_view.cache_clear()
    for name in set(sys.modules) - modules:
        if name.startswith("plugin_"):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environ)


def arrive(world: World, case: Case) -> None:
    case.arrive(world)
    # What is installed is looked at once a process; here it changes under one.
    static_view.cache_clear()
    sys.path_importer_cache.clear()


def outcome(world: World, case: Case) -> tuple[str, Registry | None]:
    """The messages about the installed set without a policy."""
    try:
        registry = load_plugins(import_policy(None, {}))
        registry.check()
        if case.use:
            load_run_config(list(case.use), registry=registry)
    except SurogateError as error:
        return " ".join(str(error).split()), None
    said = [str(b) for b in registry.broken.values()] + [reason for _, reason in registry.blocked.values()]
    return "; ".join(said), registry


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 12


@pytest.mark.parametrize("name", CASES)
def test_without_a_policy_it_is_refused_or_contained_as_documented(world: World, name: str) -> None:
    case = CASES[name]
    arrive(world, case)
    said, registry = outcome(world, case)
    assert bool(said) == bool(case.freely), said
    assert re.search(case.freely, said), said
    if registry is not None:
        assert "bf16" in registry.names("recipe"), "the others stay"


@pytest.mark.parametrize("name", CASES)
def test_under_a_lock_it_is_refused_and_not_a_line_of_it_runs(world: World, name: str) -> None:
    case = CASES[name]
    arrive(world, case)
    rules = PluginPolicy(policy="locked", lock=str(world.directory / "surogate.lock"), allow_editable=True)
    with pytest.raises(PluginError, match=case.locked):
        load_plugins(import_policy(rules, {}))
    assert not world.sentinel.exists()
    assert not [m for m in sys.modules if m.startswith("plugin_")]


def test_the_lock_itself_holds_and_the_sentinel_works(world: World) -> None:
    """Nothing hostile: the locked set loads, and the file that proves the rest is made."""
    rules = PluginPolicy(policy="locked", lock=str(world.directory / "surogate.lock"), allow_editable=True)
    load_plugins(import_policy(rules, {}))
    assert world.sentinel.read_text() == "plugin_victim\n"


@pytest.mark.slow
def test_all_of_them_together_in_processes_of_their_own(world: World) -> None:
    """From the command line, with every hostile package there at once: one message has them all, and none ran."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SUROGATE_PLUGINS")}
    environ |= {"PYTHONPATH": f"{world.early}{os.pathsep}{world.site}", "OMP_NUM_THREADS": "1"}
    lock = str(world.directory / "surogate.lock")

    def surogate(*arguments: str, code: int, **more: str) -> str:
        command = [sys.executable, "-m", "surogate_core.cli.main", *arguments]
        done = subprocess.run(
            command, env=environ | more, cwd=world.directory, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "are the locked ones" in surogate("plugins", "verify", "--allow-editable", code=0)
    for case in CASES.values():
        case.arrive(world)
    locked = {
        "SUROGATE_PLUGINS_POLICY": "locked",
        "SUROGATE_PLUGINS_LOCK": lock,
        "SUROGATE_PLUGINS_ALLOW_EDITABLE": "1",
    }
    said = surogate("max_steps=1", "output_dir=out", code=2, **locked)
    said += surogate("plugins", "verify", "--allow-editable", code=1)
    assert "are not the locked ones, so none was imported" in said
    names = "eager shadow option double letters borrow misspelt signature raising leaving fast calling future"
    assert [n for n in names.split() if f"plugin-{n} 1.0" not in said] == []
    assert "plugin-victim" in said
    surogate("plugins", "list", code=0)
    surogate("plugins", "show", "recipe-leaving", code=0)
    surogate("plugins", "lock", "--output", "new.lock", code=0)
    assert not world.sentinel.exists()
    assert not (world.directory / "out").exists()
