"""Names whose plugin is not installed: what is missed, what is left out, and the one command that installs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surogate_core.config.resolve import load_run_config
from surogate_core.errors import ConfigError
from surogate_core.plugins import Registry, load_plugins
from surogate_core.plugins.catalogue import catalogue, install_command
from surogate_core.plugins.discovery import InstalledPlugin, installed_plugins


def test_a_plugin_that_is_not_installed_is_named(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue().options, "recipe/fp8-special", "surogate-recipe-special")
    monkeypatch.setitem(catalogue().keys, "fp8_knob", "surogate-recipe-special")
    with pytest.raises(ConfigError) as raised:
        load_run_config(["recipe=fp8-special", "fp8_knob=1"], registry=registry)
    (fix,) = {p.fix for p in raised.value.problems}
    assert fix.startswith("pip install surogate-recipe-special; without an index: pip install --no-index --find-links ")


def test_all_missing_plugins_come_at_once_with_one_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The core alone: everything that a run of one's own needs, the default type of data among it."""
    monkeypatch.setattr("surogate_core.plugins.registry.installed_plugins", list)
    monkeypatch.setattr("surogate_core.plugins.discovery.installed_plugins", list)
    bare = load_plugins()
    with pytest.raises(ConfigError) as raised:
        load_run_config(["model=qwen3-0.6b", "datasets=a.jsonl", "qlora_bnb=true"], registry=bare)
    *single, together = raised.value.problems
    needed = {
        f"surogate-{name}"
        for name in (
            "model-qwen3",
            "recipe-bf16",
            "optimizer-adamw-8bit",
            "dataset-auto",
            "quant-nf4",
        )
    }
    assert {p.needs for p in single} == needed
    assert not any(p.fix for p in single)
    assert together.message == f"{len(needed)} plugins are not installed."
    # From a checkout, its own directories; otherwise by name, or from wheels.
    assert set(re.findall(r"plugins/(surogate-[\w-]+)", together.fix)) == needed
    monkeypatch.setattr("surogate_core.plugins.catalogue.__file__", str(tmp_path / "a/b/catalogue.py"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    assert (
        install_command("a", "b")
        == "pip install a b; without an index: pip install --no-index --find-links /wheels a b"
    )


def test_default_monitors_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a user names, also by `report_to`, are missed; with names of their own nothing is left out."""

    def installed() -> list[InstalledPlugin]:
        return [plugin for plugin in installed_plugins() if not plugin.name.startswith("monitor-")]

    monkeypatch.setattr("surogate_core.plugins.registry.installed_plugins", installed)
    monkeypatch.setattr("surogate_core.plugins.discovery.installed_plugins", installed)
    left = {name: f"surogate-monitor-{name}" for name in ("console", "jsonl", "adaptive")}
    for words, monitors in ([], left), (["monitor=[]"], {}), (["report_to=[]"], left):
        bare = load_plugins()
        assert load_run_config(words, registry=bare).monitor == []
        assert bare.left_out == monitors
    for words in ["monitor=[console]"], ["report_to=[jsonl]"]:
        with pytest.raises(ConfigError, match=r"its plugin surogate-monitor-\w+ is not installed"):
            load_run_config(words, registry=load_plugins())
