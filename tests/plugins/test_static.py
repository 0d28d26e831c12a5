"""Looking at plugins without importing them, and the catalogue made that way."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surogate_core.plugins.catalogue import FILE, catalogue
from surogate_core.plugins.discovery import installed_plugins, unmet_requirements
from surogate_core.plugins.static import config_options, module_api, static_view

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """
import surogate_core
from surogate_core import bundles, hookimpl as impl, hookimpl
raise SystemExit("this module must not be imported")
NAME = "by_constant"

@hookimpl
def surogate_recipe():
    return [bundles.RecipeSpec(name="plain", build=None), bundles.RecipeSpec(name=NAME, build=None)]

@surogate_core.hookimpl(trylast=True)
def surogate_monitor():
    return bundles.MonitorSpec(name="watcher", build=None)

def helper():
    pass
"""


def test_hooks_options_and_bundles_are_seen_without_importing(install_plugin: Any) -> None:
    install_plugin("seen", SOURCE, conf={"recipe/plain.yaml": "name: plain\n", "monitor/watcher.yaml": "name: w\n"})
    view = static_view("plugin_seen")
    assert view.hooks == ("surogate_monitor", "surogate_recipe")
    assert set(view.options) == {("recipe", "plain"), ("monitor", "watcher")}
    assert set(view.bundles) == {("recipe", "plain"), ("recipe", "by_constant"), ("monitor", "watcher")}
    assert view.offers("recipe", "by_constant")
    assert not view.problem
    assert "plugin_seen" not in sys.modules


def test_the_api_is_read_from_the_one_file(install_plugin: Any) -> None:
    site = install_plugin("stated", "SUROGATE_API = '>=1'\n")
    (site / "plugin_stated" / "garbled.py").write_text("def f(:\n")
    assert module_api("plugin_stated:plugin") == static_view("plugin_stated").api == ">=1"
    install_plugin("broken", "SUROGATE_API = '>=1'\ndef f(:\n")
    with pytest.raises(SyntaxError):
        module_api("plugin_broken")
    with pytest.raises(FileNotFoundError):
        module_api("plugin_absent")


def test_an_object_of_a_submodule_as_entry_point(install_plugin: Any) -> None:
    site = install_plugin("deep", "")
    (site / "plugin_deep" / "hooks.py").write_text("@hookimpl\ndef surogate_launcher(): ...\n")
    assert static_view("plugin_deep.hooks:plugin").hooks == ("surogate_launcher",)


@pytest.mark.parametrize("module", ["no_such_package_anywhere", "no_such.inside", "surogate_core.nothing_here"])
def test_a_missing_module_is_said(module: str) -> None:
    assert "is not found" in static_view(module).problem


def test_a_file_that_does_not_parse_is_said(install_plugin: Any) -> None:
    install_plugin("garbled", "def f(:\n")
    assert "cannot be read" in static_view("plugin_garbled").problem


def test_a_look_at_pip_leaves_setuptools_importable() -> None:
    """A lock of the whole environment and its bill look at every module; Inductor imports setuptools later."""
    code = "from surogate_core.plugins.static import locate; locate('pip'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unmet_requirements_are_named(install_plugin: Any) -> None:
    requires = ("pluggy>=1", "pluggy>=999", "no-such-distribution", "absent; python_version < '3'")
    install_plugin("needy", "", requires=requires)
    plugin = next(p for p in installed_plugins() if p.name == "needy")
    unmet = unmet_requirements(plugin)
    assert len(unmet) == 2
    assert unmet[0].startswith("pluggy>=999 (version ")
    assert unmet[1] == "no-such-distribution (not installed)"


def test_the_catalogue_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_catalogue", ROOT / "scripts" / "make_catalogue.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.make() == FILE.read_text(encoding="utf-8"), "run: python scripts/make_catalogue.py"


def test_every_shipped_option_is_in_the_catalogue() -> None:
    found = {
        f"{group}/{option}"
        for directory in ROOT.glob("plugins/*/src/*/conf")
        for group, option in config_options(directory)
    }
    assert found == set(catalogue().options)


def test_every_directory_of_config_files_is_a_package() -> None:
    """Hydra finds ``pkg://`` config groups through Python packages."""
    for file in [*ROOT.glob("plugins/*/src/*/conf/**/*.yaml"), *ROOT.glob("conf/**/*.yaml")]:
        assert (file.parent / "__init__.py").is_file(), file
